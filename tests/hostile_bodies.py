"""Lists hostile request bodies: each is as large as a server takes, and none is a valid request.

Tests check what each costs in objects and memory, row 6 of `bench.abuse` in time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

MAX_BYTES = 1 << 20
"""A server's default limit."""


@dataclass(frozen=True)
class HostileBody:
    """A body for one route, made by `make(max_bytes)`, and the error code that answers it."""

    name: str
    path: str
    code: str
    make: Callable[[int], bytes]


def repeated(head: bytes, element: bytes, tail: bytes) -> Callable[[int], bytes]:
    """As many elements as fit, separated by commas."""

    def make(max_bytes: int) -> bytes:
        num = (max_bytes - len(head) - len(tail) + 1) // (len(element) + 1)
        return head + b",".join([element] * num) + tail

    return make


def numbered(head: bytes, element: bytes, tail: bytes) -> Callable[[int], bytes]:
    """As many elements as fit, with %d replaced by 0, 1, 2, ..."""

    def make(max_bytes: int) -> bytes:
        room = max_bytes - len(head) - len(tail)
        parts = [element % number for number in range(room // len(element))]
        ends = accumulate(len(part) + 1 for part in parts)
        return head + b",".join(part for part, end in zip(parts, ends, strict=True) if end <= room) + tail

    return make


def long(head: bytes, unit: bytes, tail: bytes) -> Callable[[int], bytes]:
    """One long run of `unit`."""
    return lambda max_bytes: head + unit * ((max_bytes - len(head) - len(tail)) // len(unit)) + tail


BROKEN_TREES: tuple[tuple[bytes, str], ...] = (
    (b"", "ends within"),
    (b"\x00\x00\x00", "ends within"),
    (b"\x00\x00\x01\x05", "parent 1 numbers before"),
    (b"\x00\x20\x0f\x03\x05", "distance 3"),
    (b"\x00\x20\x0f\x00\x05", "distance 0"),
    (b"\xff\xff\xff\xff\xff\x01", "more than 31 bits"),
    (b"\x00\x00\xf0" + b"\xff\xff\xff\xff\x0f", "at most 2147483647"),
    (b"\x00\x00\xf0" + b"\x80" * 60_000, "more than 31 bits"),
    (b"\x00\x00\xf0\x05\xf0\x85", "ends within"),
    (b"\x00\x00\xf0\x05\xff", "ends within"),
    (b"\x00\x00\xff\x64\x05", "parent 100 numbers before"),
    (b"\x00\x00" + b"\x00\x05" * 513, "513 nodes"),
    (b"\x00\x00" + b"\x00\x05" * (1 << 19), "nodes"),
    (b"\xff" * 4096, "more than 31 bits"),
)
"""Draft messages that are no tree, and what their refusal says. Row 10 of `bench.abuse` floods a server with them."""

COMPLETIONS, CHAT, VERIFY, SESSIONS = "/v1/completions", "/v1/chat/completions", "/v1/verify", "/v1/sessions"
DRAFTS, RENDER = "/v1/sessions/{session}/drafts", "/v1/render"

HOSTILE_BODIES: tuple[HostileBody, ...] = (
    HostileBody("empty texts", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b'""', b"]}")),
    HostileBody("true for ids", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b"true", b"]}")),
    HostileBody("nulls for ids", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b"null", b"]}")),
    HostileBody("empty id lists", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b"[]", b"]}")),
    HostileBody("objects for ids", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b"{}", b"]}")),
    HostileBody("fractions for ids", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b"0.5", b"]}")),
    HostileBody("one wrong id, last", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b"999", b",-1]}")),
    HostileBody("too many ids", COMPLETIONS, "context_length_exceeded", repeated(b'{"prompt":[', b"1023", b"]}")),
    HostileBody("a body of digits", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b"1", b"]}")),
    HostileBody("a long text", COMPLETIONS, "context_length_exceeded", long(b'{"prompt":"', b"a", b'"}')),
    HostileBody("long escapes", COMPLETIONS, "context_length_exceeded", long(b'{"prompt":"', b"\\u00e9", b'"}')),
    HostileBody("brackets in a text", COMPLETIONS, "context_length_exceeded", long(b'{"prompt":"', b'[{:\\"', b'"}')),
    HostileBody("stop strings", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":"a","stop":[', b'""', b"]}")),
    HostileBody("a long stop string", COMPLETIONS, "invalid_parameter", long(b'{"prompt":"a","stop":"', b"a", b'"}')),
    HostileBody(
        "stop ids", COMPLETIONS, "invalid_parameter", numbered(b'{"prompt":"a","stop_token_ids":[', b"%d", b"]}")
    ),
    HostileBody("a long name", COMPLETIONS, "model_not_found", long(b'{"prompt":"a","model":"', b"a", b'"}')),
    HostileBody("a long name", VERIFY, "invalid_parameter", long(b'{"items":[{"prefix":[1]}],"model":"', b"a", b'"}')),
    HostileBody(
        "a long name", SESSIONS, "invalid_parameter", long(b'{"prompt":[1],"max_tokens":1,"model":"', b"a", b'"}')
    ),
    HostileBody(
        "names", SESSIONS, "invalid_parameter", repeated(b'{"prompt":[1],"max_tokens":1,"model":[', b'"a"', b"]}")
    ),
    HostileBody("a number of 1 MiB", COMPLETIONS, "malformed_json", long(b'{"prompt":"a","n":', b"9", b"}")),
    HostileBody(
        "a fraction of 1 MiB", COMPLETIONS, "invalid_parameter", long(b'{"prompt":"a","best_of":0.', b"1", b"}")
    ),
    HostileBody(
        "numbers of 4,000 digits", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b"9" * 4000, b"]}")
    ),
    HostileBody("deep lists", COMPLETIONS, "invalid_parameter", long(b'{"prompt":', b"[", b"")),
    HostileBody("60,000 deep lists", COMPLETIONS, "malformed_json", lambda _: b'{"prompt":' + b"[" * 60_000),
    HostileBody("deep objects", COMPLETIONS, "invalid_parameter", long(b"", b'{"a":', b"")),
    HostileBody("one key again and again", COMPLETIONS, "invalid_parameter", repeated(b"{", b'"a":1', b"}")),
    HostileBody("unknown keys", SESSIONS, "invalid_parameter", numbered(b"{", b'"k%d":1', b"}")),
    HostileBody(
        "60,000 unknown keys",
        SESSIONS,
        "invalid_parameter",
        lambda _: numbered(b'{"prompt":[1],"max_tokens":1,', b'"k%d":1', b"}")(600_000),
    ),
    HostileBody(
        "an unknown key of 1 MiB", SESSIONS, "invalid_parameter", long(b'{"prompt":[1],"max_tokens":1,"', b"a", b'":1}')
    ),
    HostileBody("wrong ids", SESSIONS, "invalid_parameter", repeated(b'{"max_tokens":1,"prompt":[', b"-1", b"]}")),
    HostileBody(
        "too many ids", SESSIONS, "context_length_exceeded", repeated(b'{"max_tokens":1,"prompt":[', b"1023", b"]}")
    ),
    HostileBody(
        "a body of digits", SESSIONS, "invalid_parameter", repeated(b'{"max_tokens":1,"prompt":[', b"1", b"]}")
    ),
    HostileBody(
        "too many ids, of which many are asked for",
        COMPLETIONS,
        "context_length_exceeded",
        repeated(b'{"truncate_prompt_tokens":2000000,"prompt":[', b"1023", b"]}"),
    ),
    HostileBody(
        "a schema of numbers",
        COMPLETIONS,
        "invalid_parameter",
        repeated(b'{"prompt":"a","guided_json":[', b"1023", b"]}"),
    ),
    HostileBody(
        "a closed schema of numbers",
        COMPLETIONS,
        "invalid_parameter",
        repeated(b'{"prompt":"a","structured_outputs":{"disable_additional_properties":true,"json":[', b"1023", b"]}}"),
    ),
    HostileBody(
        "a schema's text of lists",
        COMPLETIONS,
        "invalid_parameter",
        long(b'{"prompt":"a","guided_json":"[', b"[],", b'0]"}'),
    ),
    HostileBody(
        "arguments of lists",
        CHAT,
        "invalid_parameter",
        long(
            b'{"messages":[{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"a","arguments":"[',
            b"[],",
            b'0]"}}]}]}',
        ),
    ),
    HostileBody(
        "30,000 unknown keys", VERIFY, "invalid_parameter", lambda _: numbered(b"{", b'"k%d":0', b"}")(350_000)
    ),
    HostileBody("empty messages", CHAT, "invalid_parameter", repeated(b'{"messages":[', b"{}", b"]}")),
    HostileBody(
        "20,000 messages",
        CHAT,
        "invalid_parameter",
        lambda _: repeated(b'{"messages":[', b'{"role":"user"}', b"]}")(320_000),
    ),
    HostileBody(
        "empty parts", CHAT, "invalid_parameter", repeated(b'{"messages":[{"role":"user","content":[', b"0", b"]}]}")
    ),
    HostileBody(
        "a long message",
        CHAT,
        "context_length_exceeded",
        long(b'{"messages":[{"role":"user","content":"', b"a ", b'"}]}'),
    ),
    HostileBody(
        "template variables",
        CHAT,
        "invalid_parameter",
        repeated(b'{"messages":[{"role":"user"}],"chat_template_kwargs":{"a":[', b"0", b"]}}"),
    ),
    HostileBody(
        "deep template variables",
        CHAT,
        "invalid_parameter",
        lambda _: (
            b'{"messages":[{"role":"user"}],"chat_template_kwargs":'
            + b'{"a":[0,0,0,0,0,0,0,0,0,0,0,0,' * 90
            + b"0"
            + b"]}" * 90
            + b"}"
        ),
    ),
    HostileBody("tools", CHAT, "invalid_parameter", repeated(b'{"messages":[{"role":"a"}],"tools":[', b"0", b"]}")),
    HostileBody(
        "a thousand tools",
        CHAT,
        "invalid_parameter",
        lambda _: repeated(
            b'{"messages":[{"role":"a"}],"tools":[', b'{"type":"function","function":{"name":"a"}}', b"]}"
        )(100_000),
    ),
    HostileBody(
        "a large schema of a tool",
        CHAT,
        "invalid_parameter",
        lambda _: repeated(
            b'{"messages":[{"role":"a"}],"tools":[{"type":"function","function":{"name":"a","parameters":{"enum":[',
            b"0",
            b"]}}}]}",
        )(60_000),
    ),
    HostileBody(
        "a long prediction",
        CHAT,
        "invalid_parameter",
        long(b'{"messages":[{"role":"a"}],"prediction":{"type":"content","content":"', b"a ", b'"}}'),
    ),
    HostileBody(
        "parts of a prediction",
        COMPLETIONS,
        "invalid_parameter",
        repeated(b'{"prompt":"a","prediction":{"type":"content","content":[', b"0", b"]}}"),
    ),
    HostileBody(
        "a session's prediction",
        SESSIONS,
        "invalid_parameter",
        repeated(b'{"prompt":[1],"max_tokens":1,"prediction":[', b"1", b"]}"),
    ),
    HostileBody(
        "a session's stop strings",
        SESSIONS,
        "invalid_parameter",
        repeated(b'{"prompt":[1],"max_tokens":1,"stop":[', b'"a"', b"]}"),
    ),
    HostileBody("empty messages", RENDER, "invalid_parameter", repeated(b'{"messages":[', b"{}", b"]}")),
    HostileBody(
        "a long message",
        RENDER,
        "context_length_exceeded",
        long(b'{"messages":[{"role":"user","content":"', b"a ", b'"}]}'),
    ),
    HostileBody("empty items", VERIFY, "invalid_parameter", repeated(b'{"items":[', b"{}", b"]}")),
    HostileBody("wrong items", VERIFY, "invalid_parameter", repeated(b'{"items":[', b"0", b"]}")),
    HostileBody("unknown keys in an item", VERIFY, "invalid_parameter", numbered(b'{"items":[{', b'"k%d":1', b"}]}")),
    HostileBody(
        "wrong drafts", VERIFY, "invalid_parameter", repeated(b'{"items":[{"prefix":[1],"draft":[', b"-1", b"]}]}")
    ),
    HostileBody("not JSON", VERIFY, "malformed_json", long(b"", b"\xff", b"")),
    HostileBody("empty paths", DRAFTS, "invalid_parameter", repeated(b'{"base":0,"paths":[', b"[]", b"]}")),
    HostileBody("texts and ids in turn", COMPLETIONS, "invalid_parameter", repeated(b'{"prompt":[', b'"a",1', b"]}")),
    HostileBody("true for ids", SESSIONS, "invalid_parameter", repeated(b'{"max_tokens":1,"prompt":[', b"true", b"]}")),
    HostileBody(
        "numbers of 40 digits",
        SESSIONS,
        "invalid_parameter",
        repeated(b'{"max_tokens":1,"prompt":[', b"9" * 40, b"]}"),
    ),
    HostileBody("one huge number", SESSIONS, "malformed_json", long(b'{"max_tokens":1,"prompt":[', b"9", b"]}")),
    HostileBody(
        "as many keys as a body may have",
        SESSIONS,
        "invalid_parameter",
        lambda _: numbered(b'{"prompt":[1],"logit_bias":{', b'"%d":0.5', b"}}")(400_000),
    ),
    HostileBody(
        "deep lists that end",
        SESSIONS,
        "invalid_parameter",
        lambda size: b'{"prompt":' + b"[" * (size // 2 - 8) + b"]" * (size // 2 - 8) + b"}",
    ),
    HostileBody(
        "wrong roles", CHAT, "invalid_parameter", repeated(b'{"messages":[', b'{"role":0,"content":[]}', b"]}")
    ),
    HostileBody(
        "empty tools", CHAT, "invalid_parameter", repeated(b'{"messages":[{"role":"a"}],"tools":[', b"{}", b"]}")
    ),
    HostileBody(
        "a name of many", VERIFY, "invalid_parameter", repeated(b'{"items":[{"prefix":[5]}],"model":[', b'"a"', b"]}")
    ),
    HostileBody(
        "256 items of wrong drafts",
        VERIFY,
        "invalid_parameter",
        lambda _: repeated(
            b'{"items":[', b'{"prefix":[],"draft":[%s],"temperature":"warm"}' % b",".join([b'"a"'] * 800), b"]}"
        )(850_000),
    ),
    HostileBody("wrong ids", DRAFTS, "invalid_parameter", repeated(b'{"base":0,"paths":[', b'["a"]', b"]}")),
    HostileBody("one long path", DRAFTS, "invalid_parameter", repeated(b'{"base":0,"paths":[[', b"1", b"]]}")),
    HostileBody(
        "a grammar of line breaks",
        SESSIONS,
        "invalid_grammar",
        lambda _: (
            b'{"prompt":[1],"max_tokens":1,"grammar":{"kind":"grammar","text":"root ::= \\"a\\" # %json {'
            + b"\\n" * 65_000
            + b'}\\n"}}'
        ),
    ),
)
