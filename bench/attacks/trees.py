"""Attacks by trees of drafts: sure and wrong, without parents, as large as they may be, malformed."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, Final

import psutil
from bench.attacks.attackers import attacking, for_ever, pipeline, received
from bench.attacks.drafts import Devices, run_devices, texts_of
from bench.attacks.exchange import read_answer, request_bytes
from bench.attacks.probes import MAX_GROWTH_MB, Beside, beside
from bench.attacks.subject import HOST, Answer, NotMeasured, Row, Server, Stream, Subject, prompt_of
from tests.hostile_bodies import BROKEN_TREES

from outrider.models.wire.tree_draft import CHANCES, MAX_MESSAGE_NODES, ROOT, TREE_MEDIA_TYPE, TreeDraft

ATTACK_S: Final = 8.0
MAX_NODES: Final = MAX_MESSAGE_NODES
SURE: Final = len(CHANCES) - 1
MAX_MESSAGE_MS: Final = 10.0
WARM_UP_MESSAGES: Final = 10
NUM_MESSAGES: Final = 60
MESSAGES_PER_S: Final = 10.0
"""Of 512 nodes: within the budget of a session's drafts."""
LONG: Final[dict[str, Any]] = {"max_tokens": 1900, "ignore_eos": True, "patience_ms": 0}


def sure_wrong_trees(subject: Subject) -> Iterator[Row]:
    """Runs a device with honest drafts beside a session that sends sure and wrong trees, in turn with one without."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    statuses: Counter[int] = Counter()
    with subject.emulated(step_ms=20.0, extra_ms=1.0) as server:
        texts = texts_of(server, 1, 400)
        for sends in (False, True) * 3:
            server.wait_until_idle()
            devices = Devices(server.port, texts, 0.005, None, acceptance=0.85)
            with attacking(wrong_trees, server.port, prompt_of(50), sends) as answers:
                with attacking(run_devices, devices, 2.0, 6.0) as reports:
                    rates[sends].append(reports.recv())
                statuses.update(received(answers))
    _require_taken(statuses)
    without, during = median(rates[False]), median(rates[True])
    yield Row(
        "16",
        "a session whose trees are sure and always wrong: tokens/s of a session with honest drafts beside it, step of "
        "20 ms and 1 ms per token",
        f"{during:.0f}; beside a session without drafts {without:.0f} ({during / without:.2f}x)",
        "at least 0.95x",
        during >= 0.95 * without,
        {"tokens_per_s": {"without": rates[False], "during": rates[True]}, "statuses": dict(statuses)},
    )


def orphan_flood(subject: Subject) -> Iterator[Row]:
    """Floods one session with the largest messages, whose nodes have parents that were never sent."""
    # Parents a million numbers back: no message has them.
    firsts = range(2_000_000, 2_000_000 + 8 * MAX_NODES, MAX_NODES)
    tokens, back = range(1, 1 + MAX_NODES), 1_000_000
    bodies = [tree_bytes(0, first, tokens, range(first - back, first - back + MAX_NODES)) for first in firsts]
    what, seen = f"a flood of nodes without parents to one session, {ATTACK_S:g} s", _flooded(subject, bodies)
    limit = "p99 under 50 ms; max under 50 ms more than the idle server's"
    yield Row("17", f"{what}: GET /health/live", f"{seen}", limit, seen.is_prompt, seen.in_ms)
    yield _memory_row("17", what, seen)


def malformed_trees(subject: Subject) -> Iterator[Row]:
    """The same with bodies that no encoder writes. That each is refused is said by tests."""
    seen = _flooded(subject, sorted((body for body, _ in BROKEN_TREES), key=len))
    yield _memory_row("19", f"a flood of malformed trees, {len(BROKEN_TREES)} kinds, {ATTACK_S:g} s", seen)


def _flooded(subject: Subject, bodies: Sequence[bytes]) -> Beside:
    with (
        subject.emulated(step_ms=10.0) as server,
        subject.serve() as idle,
        server.crowd([{"prompt": prompt_of(1), **LONG}]) as crowd,
    ):
        stream = crowd.running()
        _require_taken(Counter([_post(server, stream, tree_bytes(0, 0, [1], [ROOT])).status]))
        server.wait_until_awake()
        block = b"".join(post_bytes(server.port, stream.session, body) for body in bodies)
        with beside(server, idle) as seen, attacking(pipeline, server.port, block, 4, True):
            time.sleep(ATTACK_S)
    return seen


def _memory_row(number: str, what: str, seen: Beside) -> Row:
    limit = f"+{MAX_GROWTH_MB:.0f} MB"
    return Row(number, f"{what}: memory", f"+{seen.memory.growth_mb:.0f} MB", limit, seen.is_small, seen.raw)


def large_trees(subject: Subject) -> Iterator[Row]:
    """Sends the deepest and the widest trees of 512 nodes, one message after the other, beside messages of one node."""
    rng = random.Random(2)
    shapes: dict[str, Callable[[int], Sequence[int]]] = {  # the parents, by the number of the first node
        "one node": lambda first: [ROOT],
        "a chain of 512": lambda first: [ROOT, *range(first, first + MAX_NODES - 1)],
        "a chain that each message goes on with": lambda first: range(first - 1, first + MAX_NODES - 1),  # -1: ROOT
        "512 children of one node": lambda first: [ROOT] * MAX_NODES,
    }
    found: dict[str, dict[str, float]] = {}
    statuses: Counter[int] = Counter()
    with subject.emulated(step_ms=50.0) as server:
        process = psutil.Process(server.pid)
        for name, parents_of in shapes.items():
            server.wait_until_idle()
            with server.crowd([{"prompt": prompt_of(3), **LONG}]) as crowd:
                stream, first = crowd.running(), 0
                before_s, took_s = 0.0, list[float]()
                for index in range(WARM_UP_MESSAGES + NUM_MESSAGES):
                    if index == WARM_UP_MESSAGES:
                        before_s = _cpu_s(process)
                    parents = parents_of(first)
                    tokens = rng.sample(range(1, 4000), len(parents))
                    answer = _post(server, stream, tree_bytes(len(stream.tokens), first, tokens, parents))
                    first += len(parents)
                    statuses[answer.status] += 1
                    took_s.append(answer.took_s)
                    time.sleep(max(0.0, 1.0 / MESSAGES_PER_S - answer.took_s))
                cpu_s = _cpu_s(process) - before_s
                found[name] = {
                    "cpu_ms": 1e3 * cpu_s / NUM_MESSAGES,
                    "answer_ms": 1e3 * median(took_s),
                    "longest_step_ms": 1e3 * max(crowd.gaps_s(), default=0.0),
                }
    _require_taken(statuses)
    small_ms = found.pop("one node")["cpu_ms"]
    slowest = max(found, key=lambda name: found[name]["cpu_ms"])
    extra_ms, step_ms = found[slowest]["cpu_ms"] - small_ms, found[slowest]["longest_step_ms"]
    yield Row(
        "18",
        f"the deepest and the widest trees of {MAX_NODES} nodes: the server's CPU per message, over one of one node",
        f"{extra_ms:+.1f} ms to {small_ms:.1f}, most with: {slowest}; longest step {step_ms:.0f} ms of 50",
        f"{MAX_MESSAGE_MS:g} ms",
        extra_ms <= MAX_MESSAGE_MS,
        {"shapes": found, "one_node_cpu_ms": small_ms, "statuses": dict(statuses)},
    )


def _post(server: Server, stream: Stream, body: bytes) -> Answer:
    path = f"/v1/sessions/{stream.session}/drafts"
    return server.ask("POST", path, body, headers={"Content-Type": TREE_MEDIA_TYPE})


def _require_taken(statuses: Counter[int]) -> None:
    """Raises NotMeasured where the server takes no trees: an attack that is refused measures nothing."""
    if not statuses[204] + statuses[409]:  # 409: a commit came first
        raise NotMeasured(f"the server takes no trees: answers {dict(statuses)}")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def tree_bytes(base: int, first: int, tokens: Sequence[int], parents: Sequence[int]) -> bytes:
    """A message of sure nodes."""
    return TreeDraft(base, first, tokens, parents, [SURE] * len(tokens)).encode()


def post_bytes(port: int, session: str, body: bytes) -> bytes:
    """The request with a message."""
    return request_bytes(port, "POST", f"/v1/sessions/{session}/drafts", body, content_type=TREE_MEDIA_TYPE)


def wrong_trees(report: Any, port: int, prompt: list[int], sends: bool) -> None:
    """Keeps a session open that answers each commit with four chains of 16 wrong and sure nodes, if `sends`.

    Reports the status of each answer.
    """
    rng = random.Random(1)
    for_ever(report, lambda: _session(report, port, prompt, sends, rng), 1)


def _session(report: Any, port: int, prompt: list[int], sends: bool, rng: random.Random) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 1000, "ignore_eos": True}).encode()
    session, first = "", 0
    with socket.create_connection((HOST, port)) as stream, socket.create_connection((HOST, port)) as posts:
        stream.sendall(request_bytes(port, "POST", "/v1/sessions", body))
        for line in stream.makefile("rb"):
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if event.get("type") == "open":
                session = event["session"]
            elif event.get("type") == "end":
                return
            elif sends:
                tokens = rng.sample(range(1, 4000), 64)
                parents = [ROOT if number % 16 == 0 else first + number - 1 for number in range(64)]
                message = tree_bytes(event["base"] + len(event["tokens"]), first, tokens, parents)
                posts.sendall(post_bytes(port, session, message))
                report.send(read_answer(posts))
                first += len(tokens)
