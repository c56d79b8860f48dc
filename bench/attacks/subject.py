"""What an attack takes and gives: servers and agents, and rows."""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import psutil
from bench.attacks.crowd import Crowd
from bench.bare_http import HOST, Answer, NotMeasured, is_reached_in, request_bytes, values_of, wait_for
from bench.processes import ANY_PORT, Program, started

if TYPE_CHECKING:
    from bench.pairs import Verifier  # attackers' processes import this module, and not the whole product

KEYS: Final = ("key-of-the-first-owner-0001", "key-of-the-second-owner-0002")
COMPLETIONS: Final = "/v1/completions"
_LEAST_STEP_MS: Final = 100.0
"""Of vLLM's: it computes, and a step of 32 sequences or 256 tokens has to take no longer than one of a few."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. is_met: None where nothing could be measured; `measured` then says why.

    raw: the numbers behind `measured`, for --json.
    """

    number: str
    what: str
    measured: str
    limit: str
    is_met: bool | None
    raw: dict[str, Any] = field(default_factory=dict)


def seconds(value: float | None, cap_s: float = 0.0) -> str:
    """A time for people; None is one that did not end within `cap_s`."""
    if value is None:
        return f"over {cap_s:g} s"
    return f"{value:.1f} s" if value >= 1.0 else f"{value * 1e3:.0f} ms"


def middle(values: Sequence[float | None], cap_s: float) -> float:
    """The median, where None counts as `cap_s`."""
    return median(cap_s if value is None else value for value in values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; the largest where there are few."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def listed(names: Sequence[str], word: str) -> str:
    """How many, and which: all of a few, the first of many."""
    if len(names) > 5:
        return f"{len(names)} {word}: {', '.join(names[:3])}, ..."
    return f"{len(names)} {word}" + (f": {', '.join(names)}" if names else "")


def prompt_of(index: int, length: int = 16) -> list[int]:
    """A prompt that no other index shares."""
    return [1 + (index * 7919 + position * 104729) % 4000 for position in range(length)]


class Server(Program):
    """A server under attack."""

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = None,
        address: str = HOST,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Answer:
        """One request on a connection of its own. body: bytes as they are, anything else as JSON.

        address: the client's own.
        """
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if content is not None else {}
        sent |= {"Authorization": f"Bearer {key}"} if key else {}
        began_s = time.perf_counter()
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s, source_address=(address, 0))
        with closing(connection), suppress(http.client.HTTPException, OSError):
            connection.request(method, path, content, {**sent, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, response.read(), time.perf_counter() - began_s)
        return Answer(0, b"", time.perf_counter() - began_s)

    def request(self, method: str, path: str, body: object = None, key: str | None = None, **options: Any) -> bytes:
        """The same request as bytes."""
        return request_bytes(self.port, method, path, body, key, **options)

    def crowd(self, bodies: Sequence[dict[str, Any]], **options: Any) -> closing[Crowd]:
        """Sessions that are open at once."""
        return closing(Crowd(self.port, bodies, **options))

    def first_token_s(self, body: dict[str, Any], cap_s: float, **options: Any) -> float | None:
        """A newcomer's time to its first token; None where it takes longer than `cap_s`."""
        with self.crowd([body | {"max_tokens": 1}], **options) as crowd:
            stream = crowd.streams[0]
            is_reached_in(cap_s, lambda: bool(stream.commits) or stream.is_over, 0.002)
            return stream.first_token_s

    def memory_mb(self) -> float:
        """Resident memory of the server and its children."""
        try:
            leader = psutil.Process(self.pid)
            return float(sum(p.memory_info().rss for p in (leader, *leader.children(recursive=True))) / 1e6)
        except psutil.NoSuchProcess:
            return 0.0

    def metrics(self, name: str, *labels: str, key: str | None = None) -> list[float]:
        """The values of a metric that have `labels`: several where replicas are behind a front."""
        return values_of(self.ask("GET", "/metrics", key=key).body.decode(), name, *labels)

    def readiness(self) -> Answer:
        """Of /health/ready."""
        return self.ask("GET", "/health/ready", timeout_s=10.0)

    def num_running(self) -> int:
        """Texts in work. Raises NotMeasured where the endpoint does not say."""
        answer = self.readiness()
        if "running" not in (answer.json or {}):
            raise NotMeasured(f"/health/ready got status {answer.status}")
        return int(answer.json["running"])

    def complete(self, body: dict[str, Any], key: str | None = None) -> Any:
        """The answer to a completion. Raises NotMeasured where it is refused."""
        answer = self.ask("POST", COMPLETIONS, body, key=key)
        if answer.status != 200:
            raise NotMeasured(f"a completion got status {answer.status}: {answer.body[:200]!r}")
        return answer.json

    def wait_until_awake(self, timeout_s: float = 30.0) -> None:
        """Returns once /health/live answers at once, five times in a row. Raises NotMeasured after `timeout_s`."""

        def is_awake() -> bool:
            return all(self.ask("GET", "/health/live", timeout_s=timeout_s).took_s < 0.03 for _ in range(5))

        wait_for("the server's health took long after the attack had ended: no quick answers", is_awake, timeout_s)

    def wait_until_idle(self, timeout_s: float = 30.0) -> None:
        """Returns once nothing runs and nothing is queued. Raises NotMeasured after `timeout_s`."""

        def is_idle() -> bool:
            answer = self.readiness()
            return answer.status == 200 and not answer.json["running"] and not answer.json.get("queue_depth")

        wait_for("the server was not idle after the last request had ended", is_idle, timeout_s, 0.02)


def rates_of(
    server: Server, attack: Callable[[bool], AbstractContextManager[Any]], times: int = 2, **options: Any
) -> dict[bool, list[float]]:
    """Tokens/s of four sessions in turn, without an attack and during it. attack: opens what runs beside them, given
    whether it is the attack. options: of the crowd.
    """
    rates: dict[bool, list[float]] = {False: [], True: []}
    for is_attacked in (False, True) * times:
        server.wait_until_idle()
        bodies = [{"prompt": prompt_of(i), "max_tokens": 900, "ignore_eos": True} for i in range(4)]
        with server.crowd(bodies, keeps=True, **options) as crowd:
            crowd.require_running(4)
            with attack(is_attacked):
                rates[is_attacked].append(crowd.tokens_per_s(5.0))
    return rates


def slowed(
    number: str,
    what: str,
    rates: Mapping[bool, Sequence[float]],
    more: str = "",
    *,
    most: float = 1.2,
    limit: str = "",
    is_kept: bool = True,
    **raw: Any,
) -> Row:
    """A row of `rates_of`. more, limit: the end of what was measured and of the bound. is_kept: whether that is met."""
    without, during = median(rates[False]), median(rates[True])
    return Row(
        number,
        f"{what}: four others' tokens/s",
        f"{during:.0f}; without {without:.0f} ({without / max(during, 1e-9):.1f}x slower){more}",
        f"at most {most:g}x slower{limit}",
        most * during >= without and is_kept,
        {"tokens_per_s": {"without": rates[False], "during": rates[True]}, **raw},
    )


@dataclass(frozen=True)
class Subject:
    """What is under attack. verifier: runs its servers; agents run by this process's interpreter. options: of every
    server. start_s: for a server to start.
    """

    verifier: Verifier
    options: tuple[str, ...] = ()
    start_s: float = 120.0

    @cached_property
    def bundles(self) -> tuple[Path, Path]:
        """The reference target and draft, not widened."""
        pair = self.verifier.pair(None)
        return pair.target, pair.draft

    def serve(
        self, *options: str, keys: Sequence[str] = (), bundle: Path | None = None
    ) -> AbstractContextManager[Server]:
        """Runs `outrider-cloud serve` on the reference target."""
        arguments = ["-m", "outrider.cloud.server", "serve", str(bundle or self.bundles[0]), *ANY_PORT]
        arguments += ["--threads", "1", "--drain-s", "0", *self.verifier.options, *self.options, *options]
        return self._running(arguments, keys)

    def emulated(self, step_ms: float, extra_ms: float = 0.0, *options: str) -> AbstractContextManager[Server]:
        """Runs `bench.emulated`: the real server over a model whose every step takes `step_ms`, and extra_ms more for
        each token after the first. options: more of its own. With vLLM, `bench.paced_vllm` over the reference target:
        its steps take as long at least, and never less than `_LEAST_STEP_MS`.
        """
        if self.verifier.is_vllm:
            step = str(max(step_ms, _LEAST_STEP_MS))
            paced = ["-m", "bench.paced_vllm", str(self.bundles[0]), "--step-ms", step, "--extra-ms", str(extra_ms)]
            return self._running([*paced, *ANY_PORT, "--threads", "1", "--drain-s", "0", *self.verifier.options])
        return self._running(["-m", "bench.emulated", "--step-ms", str(step_ms), "--extra-ms", str(extra_ms), *options])

    def endpoint(
        self, cloud: str, *options: str, keys: Sequence[str] = (), draft: Path | None = None
    ) -> AbstractContextManager[Server]:
        """Runs `outrider serve` on a draft, by default the reference draft, for the verifier at the URL `cloud`."""
        arguments = ["-m", "outrider.edge.cli", "serve", "--cloud", cloud, "--draft", str(draft or self.bundles[1])]
        return self._running([*arguments, *ANY_PORT, "--threads", "1", *options], keys, sys.executable)

    @contextmanager
    def _running(self, arguments: Sequence[str], keys: Sequence[str] = (), python: str = "") -> Iterator[Server]:
        with tempfile.TemporaryDirectory() as place:
            if keys:
                file = Path(place, "keys")
                file.write_text("\n".join(keys) + "\n", encoding="utf-8")
                file.chmod(0o600)
                arguments = [*arguments, "--api-key-file", str(file)]
            log, python = Path(place, "log"), python or self.verifier.python
            with started(Server(arguments, log, python=python, start_s=self.start_s)) as server:
                yield server
