"""Attacks by trees of drafts: sure and wrong, without parents, as large as they may be, malformed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Final

import psutil
from bench.attacks.attackers import attacking, pipeline, received, received_for, repeat
from bench.attacks.devices import Devices, run_devices
from bench.attacks.drafts import texts_of
from bench.attacks.probes import MAX_GROWTH_MB, beside, memory_of
from bench.attacks.subject import Answer, NotMeasured, Row, Server, Stream, Subject, prompt_of
from bench.attacks.tree_bytes import MAX_NODES, MEDIA_TYPE, chain, fan, post_bytes, tree_bytes, wrong_trees
from tests.hostile_bodies import BROKEN_TREES

ATTACK_S: Final = 8.0
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
    with (
        subject.emulated(step_ms=10.0) as server,
        subject.serve() as idle,
        server.crowd([{"prompt": prompt_of(1), **LONG}]) as crowd,
    ):
        stream = crowd.running()
        # Parents a million numbers back: no message has them.
        bodies = [
            tree_bytes(0, 2_000_000 + index * MAX_NODES, [(1 + i, 1_000_000) for i in range(MAX_NODES)])
            for index in range(8)
        ]
        block = b"".join(post_bytes(server.port, stream.session, body) for body in bodies)
        status = _post(server, stream, bodies[0]).status
        _require_taken(Counter([status]))
        server.wait_until_awake()
        with beside(server, idle) as seen, attacking(pipeline, server.port, block, 4, True):
            time.sleep(ATTACK_S)
    yield Row(
        "17",
        f"a flood of nodes without parents to one session, {ATTACK_S:g} s: GET /health/live",
        f"{seen}",
        "p99 under 50 ms; max under 50 ms more than the idle server's",
        seen.is_prompt,
        {**seen.in_ms, "status": status},
    )
    yield Row(
        "17",
        "the same: memory",
        f"+{seen.memory.growth_mb:.0f} MB",
        f"+{MAX_GROWTH_MB:.0f} MB",
        seen.is_small,
        seen.raw,
    )


def large_trees(subject: Subject) -> Iterator[Row]:
    """Sends the deepest and the widest trees of 512 nodes, one message after the other, beside messages of one node."""
    rng = random.Random(2)
    shapes: dict[str, Callable[[int], list[tuple[int, int]]]] = {
        "one node": lambda index: chain(1, rng),
        "a chain of 512": lambda index: chain(MAX_NODES, rng),
        "a chain that each message goes on with": lambda index: chain(MAX_NODES, rng, below=index > 0),
        "512 children of one node": lambda index: fan(MAX_NODES, rng),
    }
    found: dict[str, dict[str, float]] = {}
    statuses: Counter[int] = Counter()
    with subject.emulated(step_ms=50.0) as server:
        process = psutil.Process(server.pid)
        for name, nodes_of in shapes.items():
            server.wait_until_idle()
            with server.crowd([{"prompt": prompt_of(3), **LONG}]) as crowd:
                stream, first = crowd.running(), 0
                before_s, took_s = 0.0, list[float]()
                for index in range(WARM_UP_MESSAGES + NUM_MESSAGES):
                    if index == WARM_UP_MESSAGES:
                        before_s = _cpu_s(process)
                    nodes = nodes_of(index)
                    answer = _post(server, stream, tree_bytes(len(stream.tokens), first, nodes))
                    first += len(nodes)
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


def malformed_trees(subject: Subject) -> Iterator[Row]:
    """Sends bodies that no encoder writes, all kinds at once; that each is refused is said by tests."""
    with (
        subject.emulated(step_ms=10.0) as server,
        server.crowd([{"prompt": prompt_of(4), **LONG}]) as crowd,
    ):
        stream = crowd.running()
        _require_taken(Counter([_post(server, stream, tree_bytes(len(stream.tokens), 0, [(1, 0)])).status]))
        requests = [post_bytes(server.port, stream.session, body) for body, _ in BROKEN_TREES]
        with (
            memory_of(server) as memory,
            attacking(repeat, server.port, requests, 4, 20.0) as reports,
        ):
            statuses = Counter(received_for(reports, ATTACK_S))
    num_refused = sum(num for status, num in statuses.items() if 400 <= status < 500)
    yield Row(
        "19",
        f"malformed trees, {len(requests)} kinds, four at a time for {ATTACK_S:g} s: memory",
        f"+{memory.growth_mb:.0f} MB after {num_refused} refusals of {statuses.total()} bodies",
        f"+{MAX_GROWTH_MB:.0f} MB; all refused",
        memory.is_small and 0 < num_refused == statuses.total(),
        {"before_mb": memory.before_mb, "peak_mb": memory.peak_mb, "statuses": dict(statuses)},
    )


def _post(server: Server, stream: Stream, body: bytes) -> Answer:
    path = f"/v1/sessions/{stream.session}/drafts"
    return server.ask("POST", path, body, headers={"Content-Type": MEDIA_TYPE})


def _require_taken(statuses: Counter[int]) -> None:
    """Raises NotMeasured where the server takes no trees: an attack that is refused measures nothing."""
    if not statuses[204] + statuses[409]:  # 409: a commit came first
        raise NotMeasured(f"the server takes no trees: answers {dict(statuses)}")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
