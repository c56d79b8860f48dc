"""Attacks a server and the local endpoint by bodies of 1 MiB that are wrong in every element, and by documents of every
hostile shape. Valid bodies are `generated`.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from bench.attacks.attackers import attacking, received, repeat
from bench.attacks.local import ATTACKER, CHAT, GENERATE, VERIFY, endpoint_and_idle, honest_texts
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S, Beside, beside
from bench.attacks.subject import COMPLETIONS, Row, Server, Subject
from bench.bare_http import NotMeasured, wait_for
from bench.changed_bundle import change_bundle
from tests.hostile_bodies import HOSTILE_BODIES

TEMPLATE: Final = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
"""Of a target whose chats may have tools."""
_CHAT: Final = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 64, "temperature": 1.0}
SIZE: Final = (1 << 20) - 512
"""Bytes of a body: what a server takes by default, less a little."""
IN_FLIGHT: Final = 4
_NUM_DOCUMENTS: Final = 256
_TEXT: Final = (1 << 17) - 512
"""Bytes of the documents of a request: what the endpoint takes."""
MIN_RATE: Final = 0.8
"""Of another client's tokens/s, without the attack."""
_DOCUMENTS: Final = '{"prompt":"what is abcde?","max_tokens":1,"documents":['
_KEYS: Final = ",".join(f'"k{i}":0' for i in range(SIZE // 11))

Bodies = Mapping[str, tuple[str, bytes]]
"""Name -> (path, body)."""
_T = TypeVar("_T")


def filled(head: str, element: str, tail: str, separator: str = ",") -> bytes:
    """As many elements as fit."""
    count = (SIZE - len(head) - len(tail)) // (len(element) + len(separator))
    return (head + separator.join([element] * count) + tail).encode()


def _nested(name: str) -> bytes:
    return b'{"%s":' % name.encode() + b"[" * (SIZE // 2) + b"]" * (SIZE // 2 - 16) + b"}"


def hostile_bodies() -> Bodies:
    """Bodies for the verifier's server: those of the tests, which look at what each costs in objects and memory."""
    plain = {f"{body.path}: {body.name}": (body.path, body.make(SIZE)) for body in HOSTILE_BODIES}
    numbers = " ".join(map(str, range(3400)))  # not over the bound: a number of four digits has four tokens at most
    predicted = {"prompt": "a", "max_tokens": 1, "n": 128, "prediction": {"type": "content", "content": numbers}}
    plain["128 texts with a prediction"] = COMPLETIONS, json.dumps(predicted).encode()
    return {name: (path.format(session="none"), body) for name, (path, body) in plain.items()} | hostile_grammars()


def hostile_local_bodies() -> Bodies:
    """Bodies for the local endpoint."""
    return {
        "prompt of empty texts": (COMPLETIONS, filled('{"prompt":[', '""', "]}")),
        "prompt of texts and ids in turn": (COMPLETIONS, filled('{"prompt":[', '"a",1', "]}")),
        "100,000 chat messages": (CHAT, filled('{"messages":[', "{}", "]}")),
        "chat messages of wrong roles": (CHAT, filled('{"messages":[', '{"role":0,"content":[]}', "]}")),
        "100,000 tools": (CHAT, filled('{"messages":[{"role":"user","content":"a"}],"tools":[', "{}", "]}")),
        "prompt of one huge number": (COMPLETIONS, filled('{"prompt":[', "9", "]}", separator="")),
        "unknown keys": (COMPLETIONS, f"{{{_KEYS}}}".encode()),
        "deep nesting": (CHAT, _nested("messages")),
        "a model's name of 1 MiB": (COMPLETIONS, filled('{"prompt":"a","model":"', "a", '"}', separator="")),
        "the page's messages of nothing": (GENERATE, filled('{"seed":1,"messages":[', "{}", "]}")),
        "the page's deep nesting": (GENERATE, _nested("messages")),
        "an id of 1 MiB": (VERIFY, filled('{"id":"', "a", '"}', separator="")),
        "an id of lists": (VERIFY, filled('{"id":[', "[]", "]}")),
    }


def hostile_documents() -> Bodies:
    """Bodies with documents. All are taken, or refused for their shape."""
    rng = random.Random(22)
    words = " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(SIZE // 6 - 100))
    part = words[:_TEXT]
    pairs = "".join(chr(0x4E00 + rng.randrange(2000)) for _ in range(_TEXT // 3))
    many = (part[at : at + 1000] for at in range(0, 1000 * _NUM_DOCUMENTS, 1000))
    bodies = {
        "documents without text": filled(_DOCUMENTS, '{"text":""}', "]}"),
        "documents of wrong types": filled(_DOCUMENTS, '{"text":0}', "]}"),
        f"{_NUM_DOCUMENTS} documents of 1,000 characters": _documents(*many),
        "a document of 170,000 words": _documents(words),
        "a document of 43,000 words": _documents(part),
        "a document of one word": _documents("a" * _TEXT),
        "a document of headings": _documents("# a\n\n" * (_TEXT // 5)),
        "a document of short lines": _documents("ab\n\n" * (_TEXT // 4)),
        "a document of blanks": _documents(" " * _TEXT),
        "a document of names in humps": _documents("aB" * (_TEXT // 2)),
        "a document without blanks between words": _documents(pairs),
    }
    return {name: (COMPLETIONS, body) for name, body in bodies.items()}


def _documents(*texts: str) -> bytes:
    request = {"prompt": "what is abcde?", "max_tokens": 1, "documents": [{"text": text} for text in texts]}
    return json.dumps(request, ensure_ascii=False).encode()


def hostile_grammars() -> dict[str, tuple[str, bytes]]:
    """Name -> (path, body), of sessions and chats. Before they were bounded, these took seconds, 500 MB, or ended the
    process.
    """
    defs: dict[str, Any] = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1500)}
    rules = "\n".join(f'A{i}: A{i + 1} | "x{i}"' for i in range(800))
    schemas: dict[str, Any] = {
        "definitions that refer to the next one": {"$defs": {**defs, "a1500": {}}, "$ref": "#/$defs/a0"},
        "500 properties, four times": {
            "allOf": [{"properties": {f"p{i}_{j}": {"type": "string"} for i in range(500)}} for j in range(4)]
        },
        "a multiple of a large number": {"type": "integer", "multipleOf": 999983},
        "16,000 objects": {"enum": [{}] * 16_000},
        "many multiples": {"prefixItems": [{"type": "integer", "multipleOf": 97 + i} for i in range(90)]},
        "patterns that double": {
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^(.*[a-m].{{{30 + i}}}[n-z].*)$"} for i in range(20)
            }
        },
    }
    grammars: dict[str, dict[str, Any]] = {
        **{name: {"kind": "json_schema", "text": json.dumps(schema)} for name, schema in schemas.items()},
        "repetition of repetition": {"kind": "regex", "text": "((((a{100}){100}){100}){100})"},
        "an automaton that doubles": {"kind": "regex", "text": ".*[a-m].{200}[n-z].{100}"},
        "rules that refer to the next one": {"kind": "grammar", "text": f'start: A0\n{rules}\nA800: "x"'},
        "ambiguous rules": {"kind": "grammar", "text": 'start: a a a a\na: (a a | "x" | "")*'},
    }
    body = {"prompt": [5, 9], "max_tokens": 64, "temperature": 1.0}
    chats = {name: _asked_in_chat(grammar) for name, grammar in grammars.items()} | _hostile_tools(schemas)
    return {
        f"grammar: {name}": ("/v1/sessions", json.dumps({**body, "grammar": grammar}).encode())
        for name, grammar in grammars.items()
    } | {
        f"a chat's grammar: {name}": ("/v1/chat/completions", json.dumps({**_CHAT, **fields}).encode())
        for name, fields in chats.items()
    }


def _asked_in_chat(grammar: dict[str, Any]) -> dict[str, Any]:
    """The fields of OpenAI's and vLLM's that ask for this grammar."""
    if grammar["kind"] != "json_schema":
        return {"structured_outputs": {grammar["kind"]: grammar["text"]}}
    schema = {"name": "a", "schema": json.loads(grammar["text"]), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _hostile_tools(schemas: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields of chats whose grammar has many schemas, as many as the bounds take, or one that is costly."""

    def functions(schema: Any, count: int) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": {"name": f"function_{index}", "parameters": schema, "strict": True}}
            for index in range(count)
        ]

    wide = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(480)}}
    small = {"type": "object", "properties": {name: {"type": "string"} for name in "abc"}}
    named = {"type": "function", "function": {"name": "function_0"}}
    return {
        "four functions of 480 properties": {"tools": functions(wide, 4)},
        "128 functions": {"tools": functions(small, 128), "tool_choice": "required"},
        **{
            f"a function: {name}": {"tools": functions(schemas[name], 1), "tool_choice": named}
            for name in ("definitions that refer to the next one", "many multiples", "patterns that double")
        },
    }


def wrong_elements(subject: Subject) -> Iterator[Row]:
    """Keeps four bodies in flight, for each kind; asks the server, and an idle one beside it, for their health."""
    # A small KV cache, which is in use to its last block before the attack: pages that a text touches for the first
    # time are no attack's.
    small = () if subject.verifier.is_vllm else ("--kv-cache-mb", "32")
    found = Found()
    with tempfile.TemporaryDirectory() as place:
        target = Path(place, "target")
        change_bundle(subject.bundles[0], target, template=TEMPLATE)  # so that chats get as far as their grammars
        with subject.serve(*small, bundle=target) as server, subject.serve() as idle:
            for path, body in (
                (COMPLETIONS, b'{"prompt":"a","max_tokens":1}'),
                ("/v1/sessions", b"{}"),
                (COMPLETIONS, b'{"prompt":"a","max_tokens":64,"temperature":1}'),
            ):
                with attacking(repeat, server.port, [server.request("POST", path, body)], 4, 20.0) as reports:
                    for _ in range(160):  # memory that any use takes is not the attack's
                        reports.recv()
            before_mb = server.memory_mb()
            for name, (path, body) in hostile_bodies().items():
                server.wait_until_awake()
                found.flood(name, server, idle, server.request("POST", path, body), lambda: time.sleep(3.0))
    # 0: the server closed while the body was being sent, which refuses it. One that died would not answer for health.
    failures = {status for status in found.statuses if status and not 200 <= status < 500}
    limit = "p99 under 50 ms; max under 50 ms more than the idle server's; no 5xx"
    what = "four bodies of 1 MiB of wrong elements in flight"
    yield found.health_row("6", what, limit, failures, all(one.is_prompt for one in found.seen.values()))
    yield found.memory_row("6", "memory, without grammars", before_mb, hostile_grammars())
    yield found.memory_row("6", "memory, with costly grammars too", before_mb)


def local_bodies(subject: Subject) -> Iterator[Row]:
    """Keeps four bodies of one key in flight, for each kind, beside two texts of another key."""
    yield from _beside_texts(subject, "bodies of 1 MiB of wrong elements", hostile_local_bodies())


def local_documents(subject: Subject) -> Iterator[Row]:
    """The same with documents, which are indexed for each request."""
    yield from _beside_texts(subject, "requests with documents, of 128 KiB and more", hostile_documents())


def _beside_texts(subject: Subject, what: str, bodies: Bodies) -> Iterator[Row]:
    found, rates = Found(), dict[str, tuple[float, float]]()
    with endpoint_and_idle(subject) as (endpoint, idle), honest_texts(endpoint) as texts:
        if endpoint.ask("POST", COMPLETIONS, _documents("abcde fghij\n" * 2000), key=ATTACKER).status != 200:
            raise NotMeasured("the endpoint takes no documents: pip install bm25s")
        before_mb = endpoint.memory_mb()  # with what finding passages takes at its first use
        for name, (path, body) in bodies.items():
            alone, request = texts.tokens_per_s(2.0), endpoint.request("POST", path, body, ATTACKER)
            rates[name] = alone, found.flood(name, endpoint, idle, request, lambda: texts.tokens_per_s(4.0))
            # Only the other key's texts run then: an abandoned request may still be in work.
            wait_for("the attack's requests did not end", lambda: endpoint.num_running() <= 2, 120.0, 0.1)
    is_quick = all(
        one.is_steady and one.health.worst < 2 * MAX_HEALTH_S + one.idle.worst for one in found.seen.values()
    )
    failures = {status for status in found.statuses if status >= 500 and status != 503}
    limit = "p99 under 50 ms and max under 100 ms more than the idle endpoint's; no 5xx but 503"
    yield found.health_row("24", f"`outrider serve`: four {what} in flight", limit, failures, is_quick)
    yield found.memory_row("24", "memory", before_mb)
    share, least = min((during / max(1e-9, alone), name) for name, (alone, during) in rates.items())
    alone, during = rates[least]
    yield Row(
        "24",
        "the same: tokens/s of another key's two texts",
        f"{during:.0f}; without {alone:.0f} ({share:.2f}x), least with: {least}",
        f"at least {MIN_RATE:g}x",
        share >= MIN_RATE,
        {"tokens_per_s": rates},
    )


@dataclass(slots=True)
class Found:
    """What others noticed of each kind of bodies, and every answer's status."""

    seen: dict[str, Beside] = field(default_factory=dict)
    statuses: set[int] = field(default_factory=set)

    def flood(self, name: str, server: Server, idle: Server, request: bytes, measure: Callable[[], _T]) -> _T:
        """Keeps four in flight while `measure` runs; returns what that does."""
        with beside(server, idle) as seen, attacking(repeat, server.port, [request], IN_FLIGHT, 60.0) as reports:
            measured = measure()
            self.statuses |= set(received(reports))
        self.seen[name] = seen
        return measured

    def health_row(self, number: str, what: str, limit: str, failures: set[int], is_quick: bool) -> Row:
        """failures: statuses that no answer should have."""
        slowest = max(self.seen, key=lambda name: self.seen[name].health.worst - self.seen[name].idle.worst)
        one = self.seen[slowest]
        return Row(
            number,
            f"{what}, {len(self.seen)} kinds: GET /health/live",
            f"worst: {slowest}: {one.health}; idle beside it: {one.idle}"
            + (f"; statuses {sorted(failures)}" if failures else ""),
            limit,
            is_quick and not failures,
            {"bodies": {name: str(each) for name, each in self.seen.items()}, "statuses": sorted(self.statuses)},
        )

    def memory_row(self, number: str, what: str, before_mb: float, without: Iterable[str] = ()) -> Row:
        """without: kinds that do not count."""
        counted = {name: one.memory.peak_mb - before_mb for name, one in self.seen.items() if name not in {*without}}
        largest = max(counted, key=counted.__getitem__)
        return Row(
            number,
            f"the same: {what}",
            f"+{counted[largest]:.0f} MB, most with: {largest}",
            f"+{MAX_GROWTH_MB:.0f} MB",
            counted[largest] <= MAX_GROWTH_MB,
            {"before_mb": before_mb, "growth_mb": counted},
        )
