"""Writes docs/api.md from the OpenAPI document: `make docs`. tests/test_api_page.py runs its curl lines.

python -m tools.api_page          writes the page
python -m tools.api_page --check  exit status 1 if the page is not up to date
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import EOS_ID, fake_tokenizer

from outrider.cloud.api.app import OPEN_PATHS, PROBE_PATHS, create_app
from outrider.cloud.api.openapi import shared_codes
from outrider.cloud.api.state import ServedModel, ServerSettings
from outrider.cloud.engine.thread import EngineThread
from outrider.models.http.keys import KeyRing

PAGE: Final = Path(__file__).parent.parent / "docs" / "api.md"
KEYLESS: Final = frozenset((*PROBE_PATHS, *OPEN_PATHS))
MOST: Final = 2**31 - 1
"""The bound of every integer on the wire; a field that has no tighter one is shown without."""

WIDTH: Final = 156
"""Columns of a paragraph."""

_AUTH: Final = '-H "Authorization: Bearer $KEY"'
_JSON: Final = '-H "Content-Type: application/json"'

CURL: Final[Mapping[str, str]] = {
    "POST /v1/sessions": "curl -sSN $URL/v1/sessions {auth} {json} "
    """-d '{"prompt": [12, 5, 80], "max_tokens": 64, "seed": 7}'""",
    "POST /v1/sessions/{session_id}/drafts": "curl -sS $URL/v1/sessions/$SESSION/drafts {auth} {json} "
    """-d '{"base": 0, "paths": [[17, 3, 95], [17, 44]]}'""",
    "DELETE /v1/sessions/{session_id}": "curl -sS -X DELETE $URL/v1/sessions/$SESSION {auth}",
    "POST /v1/verify": "curl -sS $URL/v1/verify {auth} {json} "
    """-d '{"items": [{"prefix": [12, 5, 80], "draft": [17, 3], "seed": 7}]}'""",
    "POST /v1/completions": "curl -sS $URL/v1/completions {auth} {json} "
    """-d '{"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}'""",
    "POST /v1/chat/completions": "curl -sSN $URL/v1/chat/completions {auth} {json} "
    """-d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "stream": true}'""",
    "POST /v1/render": "curl -sS $URL/v1/render {auth} {json} "
    """-d '{"messages": [{"role": "user", "content": "Hello"}]}'""",
    "GET /v1/models": "curl -sS $URL/v1/models {auth}",
    "GET /v1/models/{model}": "curl -sS $URL/v1/models/$MODEL {auth}",
    "GET /v1/model": "curl -sS $URL/v1/model {auth}",
    "GET /v1/drafts": "curl -sS $URL/v1/drafts {auth}",
    "GET /v1/drafts/{name}/{path}": '''curl -sS $URL/v1/drafts/$DRAFT/manifest.json {auth} -H "Range: bytes=0-99"''',
    "GET /v1/tokenizer": "curl -sS $URL/v1/tokenizer {auth}",
    "GET /v1/tokenizer/{path}": "curl -sS $URL/v1/tokenizer/tokenizer.json {auth}",
    "GET /health/live": "curl -sS $URL/health/live",
    "GET /health/ready": "curl -sS $URL/health/ready",
    "GET /metrics": "curl -sS $URL/metrics {auth}",
}
"""A line for each endpoint, in the order of the page. SESSION: from the first event of the session's stream."""

INTRODUCTION: Final = """\
Every endpoint of `outrider-cloud serve`. **Generated** from the server's OpenAPI document by `make docs`; do not edit.
The document itself is at `/openapi.json`, and `/docs` shows it. [protocol.md](protocol.md) explains sessions, drafts
and error codes; `outrider serve`, the endpoint on a device, is in [serve.md](serve.md).

Where a table gives no upper bound, an integer is at most 2147483647, and `seed` at most 9223372036854775807. A whole
body is at most 1 MiB.

The lines below run as they are, with these variables; a test runs each of them.
"""
VARIABLES: Final = (
    "URL=http://127.0.0.1:8000 KEY=one-of-the-servers-keys MODEL=the-models-name DRAFT=the-name-of-a-draft"
)

ERRORS: Final = """\
Every error is `{"error": {"code": ..., "message": ..., "type": ..., "param": ...}}`. `code` is stable;
[the list](protocol.md#error-codes) says when each is sent. `Retry-After` comes with 429 and 503. In an event stream
that has begun, an error is its last event. Besides its own errors, any endpoint may answer:
"""


def application() -> FastAPI:
    """The application of a server with keys. Nothing is served."""
    tokenizer = fake_tokenizer()
    engine = EngineThread(FakeBatchRuntime(vocab_size=tokenizer.size))
    model = ServedModel("fake", tokenizer, frozenset({EOS_ID}), target="0" * 16)
    return create_app(engine, model, ServerSettings(keys=KeyRing(["sixteen-characters"])))


def document() -> dict[str, Any]:
    """Its OpenAPI document."""
    return application().openapi()


def curl_line(name: str) -> str:
    """The endpoint's curl line, as it stands on the page. Raises KeyError for an endpoint without one."""
    return CURL[name].replace("{auth}", _AUTH).replace("{json}", _JSON + " \\\n ").strip()


def page(document: Mapping[str, Any]) -> str:
    """The whole page. Raises ValueError if CURL and the document do not have the same endpoints."""
    endpoints = {
        f"{method.upper()} {path}": operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    if endpoints.keys() != CURL.keys():
        different = sorted(endpoints.keys() ^ CURL.keys())
        raise ValueError(f"tools/api_page.py has no curl line for, or has one too many for: {', '.join(different)}")
    schemas = document["components"]["schemas"]
    parts = ["# HTTP API\n", _paragraphs(INTRODUCTION) + "\n", f"```sh\n{VARIABLES}\n```\n", _contents()]
    for name in CURL:
        parts += _section(name, endpoints[name], schemas)
    parts += ["## Errors\n", _paragraphs(ERRORS) + "\n"]
    parts.append(_codes({str(status): _names(codes) for status, codes in shared_codes(needs_key=True).items()}))
    return "\n".join(parts).rstrip() + "\n"


def _contents() -> str:
    anchors = {name: re.sub(r"[^a-z0-9_ -]", "", name.lower()).replace(" ", "-") for name in CURL}
    return "\n".join(f"* [`{name}`](#{anchor})" for name, anchor in anchors.items()) + "\n"


def _section(name: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {name}\n"
    if name.partition(" ")[2] in KEYLESS:
        yield "Needs no key.\n"
    words = _paragraphs(operation["description"])
    yield words + "\n"
    yield f"```sh\n{curl_line(name)}\n```\n"
    shown = {words[: end.end()].strip() for end in re.finditer(r"\n\n|$", words) if end.end()}
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        if "$ref" in content["schema"]:
            yield from _message("Body", content["schema"], schemas, shown)
        else:
            yield f"Or a body of the type `{media}`: {content['schema']['description']}.\n"
    for status, answer in operation["responses"].items():
        if status[0] == "2":
            yield from _answer(status, answer, schemas, shown)
    errors = {status: each["description"] for status, each in operation["responses"].items() if status[0] in "45"}
    coded = {status: words for status, words in errors.items() if words.startswith("`")}
    if "503" in errors and "503" not in coded:
        yield "**503** has the same form.\n"
    if coded:
        yield "**Errors**\n"
        yield _codes(coded)


def _answer(status: str, answer: Mapping[str, Any], schemas: Mapping[str, Any], shown: set[str]) -> Iterator[str]:
    content = answer.get("content", {})
    if not content:
        yield f"**{status}**: no body.\n"
    for media, each in content.items():
        schema = each.get("schema", {})
        if media == "text/event-stream":
            yield from _events(status, schema["properties"]["data"], schemas, shown)
        elif "$ref" in schema:
            yield from _message(str(status), schema, schemas, shown)
        else:
            yield f"**{status}**: `{media}`.\n"


def _events(status: str, data: Mapping[str, Any], schemas: Mapping[str, Any], shown: set[str]) -> Iterator[str]:
    """The events of a stream; those of OpenAI's end with a plain word."""
    last = " The last one is `data: [DONE]`." if "anyOf" in data else ""
    inner = data["anyOf"][1] if "anyOf" in data else data
    yield f"**{status}, `text/event-stream`**: each event is `data: ` and one of these as JSON.{last}\n"
    for schema in inner["contentSchema"]["oneOf"]:
        if not schema["$ref"].endswith("/ErrorAnswer"):
            yield from _message("Event", schema, schemas, shown)


def _message(label: str, schema: Mapping[str, Any], schemas: Mapping[str, Any], shown: set[str]) -> Iterator[str]:
    """A table of an object's fields, and of the objects inside it, each once in a section."""
    name = _referred(schema)
    if name in shown:
        yield f"**{label}**: `{name}`, as above.\n"
        return
    shown.add(name)
    properties = schemas[name].get("properties", {})
    closed = " Other fields are refused." if schemas[name].get("additionalProperties") is False else ""
    yield f"**{label}**: `{name}`.{closed}\n"
    words = _paragraphs(schemas[name].get("description", ""))
    if words and words not in shown:
        yield words + "\n"
    without = {field: each for field, each in properties.items() if _is_unsupported(each)}
    required = schemas[name].get("required", ())
    rows = [
        f"| `{field}` | {_type(each)} | {_default(each, is_required=field in required)} | {_cell(each)} |"
        for field, each in properties.items()
        if field not in without
    ]
    if rows:
        yield "| field | type | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    if without:
        allowed = ", ".join(f"`{field}` {json.dumps(each['enum'][0])}" for field, each in without.items())
        yield _paragraphs(f"Not supported; accepted with the value that changes nothing, or `null`: {allowed}.") + "\n"
    inside = (inner for each in properties.values() for inner in _references(each))
    for inner in dict.fromkeys(inside):
        if inner not in shown and schemas[inner].get("properties"):
            yield from _message("In it", {"$ref": f"#/{inner}"}, schemas, shown)


def _is_unsupported(schema: Mapping[str, Any]) -> bool:
    return str(schema.get("description", "")).startswith("not supported")


def _referred(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _references(schema: Any) -> Iterator[str]:
    """Names of the schemas that a schema mentions, in order."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield _referred(schema)
        for each in schema.values():
            yield from _references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _type(schema: Mapping[str, Any]) -> str:
    """A field's type with its limits, in a few words."""
    if "$ref" in schema:
        return f"`{_referred(schema)}`"
    if "anyOf" in schema:
        kinds = (_type(each) for each in schema["anyOf"] if each.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds)) or "null"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        count = _range(schema.get("minItems", 0), schema.get("maxItems")).removeprefix("≥ 0")
        return f"list{f' ({count})' if count else ''} of {_type(schema.get('items', {}))}"
    if kind == "string":
        count = _range(schema.get("minLength"), schema.get("maxLength"))
        return f"string ({count} characters)" if count else kind
    if "exclusiveMinimum" in schema:
        return f"{kind}, above {schema['exclusiveMinimum']:g}, at most {schema['maximum']:g}"
    return " ".join((kind, _range(schema.get("minimum"), schema.get("maximum")))).strip()


def _range(low: float | None, high: float | None) -> str:
    """Bounds in words; a bound that all integers have is left out."""
    if high is not None and high < MOST:
        return f"{low:g} to {high:g}" if low is not None else f"at most {high:g}"
    return f"≥ {low:g}" if low is not None else ""


def _default(schema: Mapping[str, Any], *, is_required: bool) -> str:
    if is_required:
        return "required"
    return f"`{json.dumps(schema['default'])}`" if schema.get("default") is not None else ""


def _cell(schema: Mapping[str, Any]) -> str:
    return " ".join(str(schema.get("description", "")).split()).replace("|", "\\|")


def _names(codes: tuple[str, ...]) -> str:
    return ", ".join(f"`{code}`" for code in codes)


def _codes(rows: Mapping[str, str]) -> str:
    lines = "\n".join(f"| {status} | {words} |" for status, words in rows.items())
    return f"| status | code |\n|---|---|\n{lines}\n"


def _paragraphs(text: str) -> str:
    """Text of a docstring as lines of the page. The endpoint at its beginning is left out: the section names it."""
    text = re.sub(r"^(GET|POST) \S+[.:](\s+|$)", "", text.strip())
    blocks = re.split(r"\n\s*\n", text[:1].upper() + text[1:])
    return "\n\n".join(textwrap.fill(" ".join(block.split()), WIDTH, break_on_hyphens=False) for block in blocks)


def main() -> None:
    """Writes the page, or compares it."""
    new = page(document())
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != new:
            sys.exit("docs/api.md is not up to date; run make docs")
        return
    PAGE.write_text(new, encoding="utf-8")
    print(f"docs/api.md: {len(CURL)} endpoints")


if __name__ == "__main__":
    main()
