"""Attacks on what admits work: tokens per minute, the priority field, deadlines, and the audit log."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.attacks.attackers import attacking, received, repeat
from bench.attacks.exchange import Answer, request_bytes
from bench.attacks.subject import COMPLETIONS, KEYS, Row, Server, Subject, middle, prompt_of, seconds

CAP_S = 20.0
FLOOD_S = 8.0
NUM_CALLERS = 6
FLOODER, VICTIM = KEYS
_TOKENS_PER_MINUTE = 600
_TEXT_TOKENS = 32
_NUM_SESSIONS = 48
_MAX_LOG_BYTES = 64 << 10


def little_budget(subject: Subject) -> Iterator[Row]:
    """Floods with a key of few tokens a minute; another key completes meanwhile."""
    lines = [_line(FLOODER, f"name=flooder tokens-per-minute={_TOKENS_PER_MINUTE}"), VICTIM]
    with subject.serve(keys=lines) as server:
        alone = [_small(server, i).took_s for i in range(10)]
        bodies = [_completion(i, FLOODER) for i in range(64)]
        with attacking(repeat, server.port, bodies, NUM_CALLERS, CAP_S) as reports:
            during = _during(server)
            statuses = received(reports)
        num_tokens = sum(status == 200 for status in statuses) * (_TEXT_TOKENS + len(prompt_of(0)))
    # What the bucket held, what came in, and one text of each caller that was begun with the last token.
    most = _TOKENS_PER_MINUTE * (1 + (FLOOD_S + 2) / 60) + NUM_CALLERS * (_TEXT_TOKENS + len(prompt_of(0)))
    yield _beside(
        "31",
        f"a key of {_TOKENS_PER_MINUTE} tokens a minute floods: another key's completion; its own tokens",
        alone,
        during,
        f"; {num_tokens} tokens, {sum(status == 429 for status in statuses)} refused",
        f"; {most:.0f} tokens",
        num_tokens <= most and 429 in statuses,
    )


def borrowed_priority(subject: Subject) -> Iterator[Row]:
    """Opens many sessions that ask for priority 100 with a key of priority 0; a key of priority 5 comes in."""
    lines = [_line(FLOODER, "name=flooder priority=0"), _line(VICTIM, "name=urgent priority=5")]
    with subject.serve("--max-running", "8", keys=lines) as server:
        alone = [server.first_token_s({"prompt": prompt_of(200 + i)}, CAP_S, key=VICTIM) for i in range(5)]
        bodies = [
            {"prompt": prompt_of(i), "max_tokens": 300, "ignore_eos": True, "priority": 100}
            for i in range(_NUM_SESSIONS)
        ]
        with server.crowd(bodies, keeps=True, key=FLOODER) as crowd:
            crowd.wait(lambda: sum(bool(s.commits) for s in crowd.streams) >= _NUM_SESSIONS // 2, CAP_S)
            took = [server.first_token_s({"prompt": prompt_of(100 + i)}, CAP_S, key=VICTIM) for i in range(5)]
            turn_s = median(crowd.gaps_s())
    # Places go round: a flooder's session runs in one step of six.
    limit_s = 2.0 * turn_s + middle(alone, CAP_S)
    found = middle(took, CAP_S)
    yield Row(
        "32",
        f"{_NUM_SESSIONS} sessions that ask for priority 100 without having it: first token of a key that has priority",
        seconds(found if found < CAP_S else None, CAP_S),
        f"two rounds of the flood ({seconds(turn_s)}), and the time alone: {seconds(limit_s)}",
        found <= limit_s,
        {"took_s": took, "alone_s": alone, "turn_s": turn_s},
    )


def deadline_flood(subject: Subject) -> Iterator[Row]:
    """Floods with long prompts whose deadlines pass in the queue or in prefill; another key completes meanwhile.

    Beside the same flood without deadlines: prompts take their owner's share of a step either way.
    """
    during: dict[bool, list[float]] = {}
    statuses: list[int] = []
    with subject.serve("--max-running", "8", keys=KEYS) as server:
        for has_deadlines in (False, True):
            bodies = []
            for i in range(256):
                prompt = [1 + (i * 7 + j * (2 + has_deadlines)) % 4000 for j in range(400)]
                fields = {"deadline_ms": 1.0 + i % 40} if has_deadlines else {"max_tokens": 1}
                bodies.append(_completion(i, FLOODER, prompt=prompt, **fields))
            with attacking(repeat, server.port, bodies, NUM_CALLERS, CAP_S) as reports:
                during[has_deadlines] = _during(server)
                statuses = received(reports)
            server.wait_until_idle()
    num_late, plain_s = sum(status == 504 for status in statuses), median(during[False])
    yield Row(
        "33",
        "a flood of long prompts with deadlines of 1 to 40 ms: another key's completion",
        f"median {seconds(median(during[True]))}; {num_late} of {len(statuses)} answered 504",
        f"1.5x of that beside the same flood without deadlines ({seconds(plain_s)})",
        median(during[True]) <= 1.5 * plain_s and num_late > 0 and set(statuses) <= {200, 504},
        {"during_s": during[True], "plain_s": during[False]},
    )


def audit_flood(subject: Subject) -> Iterator[Row]:
    """Floods with refused requests while the audit log is on; how much does it grow."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "audit.jsonl"
        with subject.serve("--audit-log", str(log), keys=KEYS) as server:
            alone = [_small(server, i).took_s for i in range(10)]
            before = log.stat().st_size
            bodies = [_completion(i, f"a-wrong-key-of-its-own-{i:04}") for i in range(256)]
            with attacking(repeat, server.port, bodies, NUM_CALLERS, CAP_S) as reports:
                during = _during(server)
                statuses = received(reports)
        grown = log.stat().st_size - before - len(during) * before // len(alone)
    yield _beside(
        "34",
        "a flood of refused requests with --audit-log: another key's completion; how much the log grows",
        alone,
        during,
        f"; {len(statuses)} refused, {grown / 1024:.0f} KiB",
        f"; {_MAX_LOG_BYTES >> 10} KiB",
        grown <= _MAX_LOG_BYTES and set(statuses) == {401},
    )


def _beside(
    number: str, what: str, alone: Sequence[float], during: Sequence[float], more: str, most: str, is_kept: bool
) -> Row:
    limit_s = 3.0 * median(alone) + 0.02
    return Row(
        number,
        what,
        f"median {seconds(median(during))} of {len(during)}{more}",
        f"3x alone ({seconds(median(alone))}) and 20 ms: {seconds(limit_s)}{most}",
        median(during) <= limit_s and is_kept,
        {"alone_s": list(alone), "during_s": list(during)},
    )


def _line(key: str, attributes: str) -> str:
    """A line of a key file."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {attributes}"


def _completion(index: int, key: str, **fields: Any) -> bytes:
    body = {"prompt": prompt_of(index), "max_tokens": _TEXT_TOKENS, "ignore_eos": True} | fields
    return request_bytes(0, "POST", COMPLETIONS, json.dumps(body).encode(), key)


def _small(server: Server, index: int) -> Answer:
    """The victim's request: a token."""
    prompt = prompt_of(10_000 + index + int(time.perf_counter() * 1e3))
    return server.ask_in_time("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 1}, CAP_S, key=VICTIM)


def _during(server: Server) -> list[float]:
    """Times of the victim's requests for some seconds; one that is not answered 200 counts as the longest."""
    began_s, took = time.perf_counter(), list[float]()
    time.sleep(0.5)
    while time.perf_counter() - began_s < FLOOD_S:
        answer = _small(server, len(took))
        took.append(answer.took_s if answer.status == 200 else CAP_S)
    return took
