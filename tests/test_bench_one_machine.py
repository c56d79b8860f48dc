"""What `bench.one_machine` makes of texts, how benchmarks choose their verifier, and the processes that they start."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import pytest
from bench.beside import Written
from bench.one_machine import Found, compare, drafts_of, gaps_ms, likelihoods, own_text
from bench.pairs import PAIR_OPTIONS, open_pair
from bench.peer_drafts import LLAMA_SERVER, Asked, Counts, Emit, Write, answer
from bench.peer_processes import PeerCommand, PeerFailed, prepare
from bench.processes import Program, started
from bench.report import parser
from bench.verifier import VLLM, Verifier, make_verifier

from outrider.edge.lab.cores import plan_cores
from outrider.edge.results import GenerationRequest
from outrider.export.make.pair import PairPaths
from outrider.models.errors import ConfigError
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.picks.sampling import SamplingParams
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

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
    return Written(tokens, arrival_s, num_passes=2, num_drafted=4, num_accepted=1, draft_s=0.5)


def test_gaps_are_those_within_texts() -> None:
    """None lies between two texts; tokens that come together have one of 0."""
    assert gaps_ms([(0.1, 0.1, 0.1), (5.0, 5.0, 5.0)]) == {50: 0.0, 95: 0.0, 99: 0.0}
    assert gaps_ms([(0.0, 0.002), (9.0, 9.004)])[50] == pytest.approx(3.0)


def test_figures_are_of_all_runs() -> None:
    """Rates are of each run, from the request to the last token; shares are sums over sums."""
    found = Found("plain", [[text((1, 2, 3))], [text((1, 2, 3), (1.0, 1.0, 3.0))]])
    figures = found.figures
    assert found.rates == [1.5, 1.0] and figures["first_ms"] == 1000.0
    assert figures["passes"] == pytest.approx(4 / 6) and figures["accepted"] == 0.25 and figures["draft_ms"] == 125.0


def test_a_text_is_compared_with_that_of_the_same_target() -> None:
    ways = {"plain": Found("plain", [[text((1, 2, 3)), text((4, 5, 6))]])}
    assert own_text(Found("plain", [[text((1, 2, 3)), text((4, 5, 7))]]), ways) == "1 of 2"
    assert own_text(Found("not there", [[text((1, 2, 3))]]), ways) == ""


def test_a_text_of_another_distribution_is_less_likely() -> None:
    """The reference target against ids that say nothing, all equally likely to be drawn."""
    prompt = tuple(Tokenizer.from_dir(target_dir()).encode("def main():\n    return"))
    request = GenerationRequest(prompt=prompt, params=SamplingParams(temperature=0.8), max_tokens=3)
    likely = tuple(Tokenizer.from_dir(target_dir()).encode(" self.name"))
    ways = {"likely": Found("", [[text(likely)]]), "drawn": Found("", [[text((4000, 3000, 2000))]])}
    found = likelihoods(target_dir(), [request], ways)
    assert 0.0 > found["likely"] > -6.0 > -9.0 > found["drawn"]


def test_lookup_has_no_target_of_its_own() -> None:
    assert drafts_of("openvino_lookup", [3, 5], [4, 8]) == [4]
    assert drafts_of("openvino_genai", [3, 5], [4, 8]) == (0, 3, 5)
    assert drafts_of("vllm", [3, 5], [4, 8]) == (0, 4, 8)


def test_a_peer_that_fails_is_named_and_the_others_go_on() -> None:
    num_texts = 0

    async def works(request: GenerationRequest) -> Written:
        return text(request.prompt)

    async def ends(request: GenerationRequest) -> Written:
        nonlocal num_texts
        num_texts += 1
        if num_texts > 2:
            raise PeerFailed("no more")
        return text(request.prompt)

    found, failed = asyncio.run(compare({"a": (works, "a"), "b": (ends, "a")}, [REQUEST, REQUEST], 1))
    assert failed == {"b": "no more"} and list(found) == ["a"] and len(found["a"].tokens) == 2


def test_what_is_not_given_is_an_error() -> None:
    with pytest.raises(PeerFailed, match="--vllm-python"):
        prepare("vllm", None, None, None)
    with pytest.raises(PeerFailed, match="--llama-cpp"):
        prepare("llama_cpp", None, None, None)


def test_errors_are_answers() -> None:
    """Of the opening, and of a text; the next question is answered again."""
    opened: list[str] = []

    def opens() -> Write:
        opened.append("")
        if len(opened) == 1:
            raise ImportError("no such engine")

        def write(asked: Asked, emit: Emit) -> Counts:
            emit([7, 8])
            return Counts(1, 2, asked.max_tokens)

        return write

    question = json.dumps({"prompt": [1], "max_tokens": 2, "temperature": 0.0, "seed": 0})
    answers = StringIO()
    answer(opens, StringIO(f"{question}\n{question}\n"), answers)
    told = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert told[0] == {"error": "ImportError: no such engine"}
    assert told[1:] == [
        {"tokens": [7, 8]},
        {"counts": {"num_passes": 1, "num_drafted": 2, "num_accepted": 2, "draft_s": 0.0}},
    ]


def peer(stack: ExitStack, **variables: str) -> Written:
    command = PeerCommand("llama_cpp", PairPaths(Path("draft"), Path("target")), sys.executable, variables)
    return asyncio.run(command(4, plan_cores(0), 0.0, stack).generate(REQUEST))


def test_a_peers_process_streams_its_tokens(tmp_path: Path) -> None:
    """Also one whose server is a child of it. What it cannot open is an error by name."""
    server = tmp_path / "llama-server"
    server.write_text(LLAMA.format(python=sys.executable))
    server.chmod(stat.S_IRWXU)
    with ExitStack() as stack:
        found = peer(stack, **{LLAMA_SERVER: str(server)})
        assert found.tokens == (1, 2, 3) and found.num_accepted == 1 and found.num_passes == 2
        assert 0.0 < found.arrival_s[0] <= found.arrival_s[1]
        with pytest.raises(PeerFailed, match="FileNotFoundError"):
            peer(stack, **{LLAMA_SERVER: str(tmp_path / "none")})


def test_the_embedded_engine_needs_nothing() -> None:
    """This interpreter, and no options."""
    assert make_verifier("embedded", None) == Verifier("embedded", sys.executable)
    assert Verifier().options == ()


def test_vllm_runs_by_an_interpreter_of_its_own() -> None:
    """One that exists; its texts are compared, so it computes in float32."""
    verifier = make_verifier(VLLM, sys.executable)
    assert verifier.is_vllm and "dtype=float32" in verifier.options
    with pytest.raises(ConfigError, match="give its interpreter with --server"):
        make_verifier(VLLM, None)
    with pytest.raises(ConfigError, match="there is no interpreter /no/such"):
        make_verifier(VLLM, "/no/such")


def test_what_vllm_cannot_be_compared_with_is_refused() -> None:
    """The draft beside the target runs on a runtime of ours."""
    options = parser(None, PAIR_OPTIONS).parse_args(["--engine", "vllm", "--server", sys.executable])
    with pytest.raises(ConfigError, match="--leave-out beside"), open_pair(options, beside=True):
        pass


SERVER = f"print({READY_PREFIX!r} + 'http://127.0.0.1:9', flush=True); import time; time.sleep(600)"


@pytest.mark.skipif(not os.access("/proc/self/autogroup", os.W_OK), reason="sessions have no nice level here")
def test_a_session_has_the_nice_level_of_its_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `nice` alone would not reach: Linux shares the processors between sessions first."""
    for level in (0, 7):
        monkeypatch.setattr(os, "getpriority", lambda which, who, level=level: level)
        with started(Program(["-c", SERVER], tmp_path / "log")) as program:
            assert Path(f"/proc/{program.pid}/autogroup").read_text().split()[-2:] == ["nice", str(level)]
