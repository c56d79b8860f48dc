"""The arithmetic of the measurements under load, beside peers, of capacity, and of leaks; what `bench.one_machine`
makes of texts, how benchmarks choose their verifier, and the processes that they start.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from bench.bare_http import Completion, complete, values_of
from bench.beside import Written
from bench.capacity import Costs, Found
from bench.load import AUTO, CLOUD_ONLY, Cell, Figures, misses
from bench.load_devices import Session
from bench.one_machine import Found as Way
from bench.one_machine import gaps_ms, likelihoods, own_text
from bench.pairs import PAIR_OPTIONS, VLLM, Verifier, make_verifier, open_pair
from bench.peer_drafts import LLAMA_SERVER
from bench.peer_engines import Batch, Done, Run
from bench.peer_processes import PeerCommand, PeerFailed
from bench.peers import compare, done_of
from bench.processes import Program, remote, started, turn_of
from bench.report import parser
from tests.raw_server import RawServer, raw_server

from outrider.edge.lab.cores import plan_cores
from outrider.edge.results import GenerationRequest
from outrider.export.make.pair import PairPaths
from outrider.models.errors import CloudError, ConfigError, RuntimeUnavailable
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.picks.sampling import SamplingParams
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir


def test_figures_are_taken_while_all_sessions_run() -> None:
    """What comes before the last first commit and after the first end does not count, except for the passes."""
    first = Session([(0.0, (1,)), (1.0, (2, 3)), (2.0, (4,)), (3.0, (5, 6))])
    second = Session([(1.0, (1,)), (2.0, (2, 3, 4)), (6.0, (5, 6))])
    # Tokens from second 1 to second 3.
    assert Figures.of([first, second]) == Figures((1 + 2 + 3) / 2.0, 5 / 10, (1000.0, 1000.0, 1000.0))
    for sessions in (
        [Session([(0.0, (1,))]), Session([(0.0, (1,))])],
        [Session([(0.0, (1,)), (3.0, (2,))]), Session([(2.0, (1,)), (5.0, (2,))])],  # no whole gap in common
    ):
        with pytest.raises(ValueError, match="raise --max-tokens"):
            Figures.of(sessions)


def test_limits_hold_at_16_sessions() -> None:
    """Passes and tokens/s where the target is bound by memory, texts everywhere."""

    def missed(
        rate: float, passes: float, *, at: int = 16, is_memory_bound: bool = False, differ: int = 0
    ) -> list[str]:
        gaps_ms = (1.0, 2.0, 3.0)
        auto = Cell([Figures(rate, passes, gaps_ms)], differ)
        cells = {CLOUD_ONLY: Cell([Figures(100.0, 1.0, gaps_ms)], 0), AUTO: auto}
        return misses({at: cells}, is_memory_bound=is_memory_bound)

    assert missed(140.0, 0.51) == [] and missed(150.0, 0.5, is_memory_bound=True) == []
    found = missed(140.0, 0.51, is_memory_bound=True)
    assert [line.split(":")[0] for line in found] == ["16 sessions"] * 2
    assert "texts differ" in missed(1.0, 1.0, at=4, differ=1)[0]


def test_capacity_counts_rounds_after_the_first() -> None:
    """The first pass reads the prompt and drafts nothing."""
    text = Written(
        tokens=tuple(range(9)),
        arrival_s=(1.0, *[2.0] * 4, *[3.0] * 4),
        num_passes=3,
        num_drafted=8,
        num_accepted=6,
        draft_s=0.4,
    )
    costs = Costs.of([text, text])
    assert (costs.draft_s, costs.verify_s, costs.gamma, costs.gain) == pytest.approx((0.05, 0.8, 4.0, 1.25))
    found = Found({"beside": [10.0, 10.0], "devices": [11.0, 11.4]}, [costs])
    assert found.over_beside("devices") == pytest.approx(1.12)
    assert len(found.misses) == 1  # under 0.9 of 1.25


def test_decoding_begins_when_every_text_has_begun() -> None:
    """The rates of an engine, and those of a streamed batch."""
    done = Done(((1, 2, 3, 4), (1, 2, 3, 4)), 8, took_s=4.0, before_s=2.0, num_before=4)
    streamed = done_of([Completion(("a", "b"), 4, (1.0, 3.0)), Completion(tuple("abcd"), 4, (2.0, 3.0, 4.0, 5.0))])
    assert streamed.texts == ("ab", "abcd")
    assert (done.rate, done.decode_rate, streamed.rate, streamed.decode_rate) == (2.0, 2.0, 8 / 5, (2 + 3) / 3)


def test_a_remote_object_answers_while_it_has_its_turn() -> None:
    """Calls go to a process of its own and back; outside of its turn it is stopped, and then it can be ended."""
    with remote(partial(nullcontext, [3, 1])) as process:
        with turn_of(process.pid):
            process.call("append", 2)
            assert process.call("index", 2) == 2
        stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped is not None and stopped.si_status == signal.SIGSTOP
    assert not psutil.pid_exists(process.pid)


STREAM = [
    b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n',
    b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n',
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize(
    ("lines", "error"), [(STREAM, ""), ([b'data: {"error": {"message": "no room"}}\n\n'], "no room")]
)
def test_a_stream_is_read_with_its_usage(lines: list[bytes], error: str) -> None:
    """Text, tokens and arrivals; an error in the stream is raised."""

    def reply(server: RawServer, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(lines))

    with raw_server(reply) as server:
        reading = complete(server.url, {"prompt": "x"}, time.perf_counter())
        if error:
            with pytest.raises(CloudError, match=error):
                asyncio.run(reading)
        else:
            found = asyncio.run(reading)
            assert (found.pieces, found.num_tokens, len(found.arrival_s)) == (("a",), 3, 1)


def _run(seconds: Sequence[float], num_tokens: int = 2) -> Run:
    """Takes the given seconds for its batches."""
    left = iter(seconds)

    def run(batch: Batch) -> Done:
        took_s = next(left)
        texts = tuple((7,) * num_tokens for _ in batch.prompts)
        return Done(texts, num_tokens * len(texts), took_s, took_s / 2, 2)

    return run


def test_peers_take_turns_and_the_first_turn_does_not_count() -> None:
    """The bound is on the median of the runs' ratios."""
    batch = Batch(((1,), (2,)), 2)
    found = compare("x", _run([9.0, 1.0, 1.0, 2.0]), _run([9.0, 1.0, 0.5, 1.0]), batch, 3)
    assert (found.ours, found.peer) == ((4.0, 4.0, 2.0), (4.0, 8.0, 4.0))
    assert found.ratio == found.decode_ratio == 0.5 and len(found.misses) == 2 and found.num_same == 2
    assert replace(found, ours=found.peer, ours_decode=found.peer_decode).misses == []
    with pytest.raises(RuntimeUnavailable, match="expected 4"):
        compare("x", _run([1.0], num_tokens=1), _run([1.0]), batch, 1)


def test_values_of_one_server_and_of_replicas() -> None:
    """A metric's values come with and without labels; other metrics that begin alike do not count."""
    one = "# TYPE held gauge\nheld 3\nheld_bytes 70\n"
    two = 'held{outcome="kept",replica="a"} 3\nheld{outcome="kept",replica="b"} 4.5\nheld{outcome="lost"} 9\n'
    assert values_of(one, "held") == [3.0] and values_of(two, "held", 'outcome="kept"') == [3.0, 4.5]


# -- on one machine ----------------------------------------------------------------------------------------------------

REQUEST = GenerationRequest(prompt=(1, 2, 3), max_tokens=3)
# It answers as llama-server does: one token each line of the stream, the counts in the last.
LLAMA = """\
#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for token in asked["prompt"][: asked["n_predict"]]:
            self.wfile.write(b"data: " + json.dumps({{"tokens": [token]}}).encode() + b"\\n\\n")
        timings = {{"draft_n": 4, "draft_n_accepted": 1}}
        self.wfile.write(b"data: " + json.dumps({{"tokens": [], "timings": timings}}).encode() + b"\\n\\n")

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def text(tokens: tuple[int, ...], arrival_s: tuple[float, ...] = (1.0, 1.0, 2.0)) -> Written:
    return Written(tokens, arrival_s, num_passes=2, num_drafted=4, num_accepted=1)


def test_gaps_are_those_within_texts() -> None:
    """None lies between two texts; tokens that come together have one of 0."""
    assert gaps_ms([(0.1, 0.1, 0.1), (5.0, 5.0, 5.0)]) == {50: 0.0, 95: 0.0, 99: 0.0}
    assert gaps_ms([(0.0, 0.002), (9.0, 9.004)])[50] == pytest.approx(3.0)


def test_figures_are_of_all_runs() -> None:
    """Rates are of each run, from the request to the last token; shares are sums over sums."""
    found = Way("plain", [[text((1, 2, 3))], [text((1, 2, 3), (1.0, 1.0, 3.0))]])
    expected = {"first_ms": 1000.0, "passes": pytest.approx(4 / 6), "accepted": 0.25}
    assert found.rates == [1.5, 1.0] and {name: found.figures[name] for name in expected} == expected


def test_a_text_is_compared_with_that_of_the_same_target() -> None:
    ways = {"plain": Way("plain", [[text((1, 2, 3)), text((4, 5, 6))]])}
    for name, last, expected in (("plain", 7, "1 of 2"), ("not there", 6, "")):
        assert own_text(Way(name, [[text((1, 2, 3)), text((4, 5, last))]]), ways) == expected


def test_a_text_of_another_distribution_is_less_likely() -> None:
    """The reference target against ids that say nothing, all equally likely to be drawn."""
    prompt, likely = (
        tuple(Tokenizer.from_dir(target_dir()).encode(words)) for words in ("def main():\n    return", " self.name")
    )
    request = GenerationRequest(prompt=prompt, params=SamplingParams(temperature=0.8), max_tokens=3)
    ways = {"likely": likely, "drawn": (4000, 3000, 2000)}
    of = {name: Way("", [[text(tokens)]]) for name, tokens in ways.items()}
    found = likelihoods(target_dir(), [request], of)
    assert 0.0 > found["likely"] > -6.0 > -9.0 > found["drawn"]


def test_a_peers_process_streams_its_tokens(tmp_path: Path) -> None:
    """Also one whose server is a child of it. What it cannot open is an error by name."""
    server, models = tmp_path / "llama-server", PairPaths(Path("draft"), Path("target"))
    server.write_text(LLAMA.format(python=sys.executable))
    server.chmod(stat.S_IRWXU)

    def written(program: Path) -> Written:
        command = PeerCommand("llama_cpp", models, sys.executable, {LLAMA_SERVER: str(program)})
        with ExitStack() as stack:
            return asyncio.run(command(4, plan_cores(0), 0.0, stack).generate(REQUEST))

    found = written(server)
    assert (found.tokens, found.num_accepted, found.num_passes) == ((1, 2, 3), 1, 2)
    assert 0.0 < found.arrival_s[0] <= found.arrival_s[1]
    with pytest.raises(PeerFailed, match="FileNotFoundError"):
        written(tmp_path / "none")


def test_vllm_runs_by_an_interpreter_of_its_own() -> None:
    """One that exists; its texts are compared, so it computes in float32. The embedded engine needs nothing."""
    assert make_verifier("embedded", None) == Verifier("embedded", sys.executable)
    verifier = make_verifier(VLLM, sys.executable)
    assert verifier.is_vllm and "dtype=float32" in verifier.options
    for python, message in (
        (None, "give its interpreter with --server"),
        ("/no/such", "there is no interpreter /no/such"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_verifier(VLLM, python)


def test_what_vllm_cannot_be_compared_with_is_refused() -> None:
    """The draft beside the target runs on a runtime of ours."""
    options = parser(None, PAIR_OPTIONS).parse_args(["--engine", "vllm", "--server", sys.executable])
    with pytest.raises(ConfigError, match="--leave-out beside"), open_pair(options, beside=True):
        pass


SPEAKS = f"print({READY_PREFIX!r} + 'http://127.0.0.1:9', flush=True); print('x' * (1 << 20), flush=True)"


def test_a_process_that_goes_on_to_speak_is_read(tmp_path: Path) -> None:
    """More than a pipe holds: it is not stopped by that, and ends."""
    with started(Program(["-c", SPEAKS], tmp_path / "log")) as program:
        _, running = psutil.wait_procs([psutil.Process(program.pid)], 60.0)
        assert running == []
