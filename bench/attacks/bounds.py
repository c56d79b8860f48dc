"""Makes requests from an OpenAPI document: every route, and every field at its documented bounds.

A field is a place in a body, such as `items.[].draft.[]`, or a part of the path, such as `{model}`. Where the document
has no bound, a value fills what the body may have, or the model's context. Knows no server and sends nothing. Attackers
run it in processes of their own, so it needs the standard library only.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

Field = tuple[str, ...]
"""Names on the way to a value; "[]": each item of a list, "{}": each value of a mapping."""

MAX_COMMAS: Final = 230_000
MAX_KEYS: Final = 32_000
"""A little less than a server's JSON may have: a body with more is refused unread."""
_NO_BOUND: Final = {"integer": 2**63 - 1, "number": 1e308}
_DEPTH: Final = 90
_JSON: Final = "application/json"
_BYTES: Final[Field] = ("",)
"""The whole of a body that is no JSON."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request: a route, such as `POST /v1/verify`, and its fields at a bound, each with the number of its value."""

    route: str
    media: str = _JSON
    values: tuple[tuple[Field, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.route} {' + '.join('.'.join(field) or self.media for field, _ in self.values) or '-'}"


class Requests:
    """All requests of a document. room: bytes of a body. context, vocab_size: the model's. max_tokens: of a text whose
    length is not at its bound, but a count is, such as how many texts; of others a quarter. names: values of the path's
    parameters that exist, by name; others are "none".
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        *,
        room: int,
        context: int,
        vocab_size: int,
        max_tokens: int = 16,
        names: Mapping[str, str],
    ) -> None:
        self.names = dict(names)
        self._room, self._context, self._vocab_size, self._max_tokens = room, context, vocab_size, max_tokens
        self._components = document.get("components", {}).get("schemas", {})
        self._known: dict[tuple[str, str], dict[Field, list[Any]]] = {}
        # route -> media type -> the body's schema; without bodies: none.
        self._bodies: dict[str, dict[str, Any]] = {
            f"{method.upper()} {path}": {
                media: content["schema"]
                for media, content in operation.get("requestBody", {}).get("content", {}).items()
            }
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        }

    @property
    def routes(self) -> list[str]:
        """Every route, as a Case has it."""
        return list(self._bodies)

    def __getstate__(self) -> dict[str, Any]:
        """Without the values, which are large: another process makes its own."""
        return self.__dict__ | {"_known": {}}

    def fields(self, route: str, media: str = _JSON) -> dict[Field, list[Any]]:
        """The fields of a route's requests of this type, each with its values at bounds: the largest first."""
        if (route, media) not in self._known:
            self._known[route, media] = self._fields(route, media)
        return self._known[route, media]

    def _fields(self, route: str, media: str) -> dict[Field, list[Any]]:
        found: dict[Field, list[Any]] = {}
        schema = self._bodies[route].get(media)
        for name in re.findall(r"{(\w+)", route):
            found["{" + name + "}",] = ["a" * 4_000, "%2e%2e%2f" * 440]
        if schema is None:
            return found
        if media != _JSON:
            length = schema.get("maxLength", self._room)
            return {**found, _BYTES: [random.Random(length).randbytes(length), bytes(length)]}
        for field, branches in self._walk((), schema).items():
            values = [value for branch in branches for value in self._extremes(branch)]
            found[field] = [value for index, value in enumerate(values) if value not in values[:index]]
        return found

    def singles(self, route: str) -> Iterator[Case]:
        """Plain requests of a route, and one for each value of each field."""
        for media in self._bodies[route] or (_JSON,):
            if media == _JSON:
                yield Case(route)
            for field, values in self.fields(route, media).items():
                for number in range(len(values)):
                    yield Case(route, media, ((field, number),))

    def pairs(self, route: str) -> Iterator[Case]:
        """One request for each two fields that have a choice, each at its largest value; lists of words in turn."""
        values = {field: found for field, found in self.fields(route).items() if _is_choice(found)}
        for number, (one, other) in enumerate(itertools.combinations(values, 2)):
            chosen = [
                (field, number % len(values[field]) if _are_words(values[field]) else 0) for field in (one, other)
            ]
            yield Case(route, _JSON, tuple(chosen))

    def request(self, case: Case, nonce: int = 0) -> tuple[str, str, str, bytes]:
        """Method, path, media type and body. nonce: requests with different ones share no prompt."""
        method, _, pattern = case.route.partition(" ")
        names, schema = dict(self.names), self._bodies[case.route].get(case.media)
        values = self.fields(case.route, case.media)
        # Longer ones lie within shorter ones.
        chosen = sorted(((field, values[field][number]) for field, number in case.values), key=lambda one: len(one[0]))
        fill = {field[0][1:-1]: value for field, value in chosen if field[0].startswith("{")}
        path = re.sub(r"{(\w+)[^}]*}", lambda found: fill.get(found[1], names.get(found[1], "none")), pattern)
        if schema is None or case.media != _JSON:
            return method, path, case.media, next((value for field, value in chosen if field == _BYTES), b"")
        inside = [(field, value) for field, value in chosen if not field[0].startswith("{")]
        roots = {field[0] for field, _ in inside}
        body = self._base(schema, roots)
        for field, value in inside:
            body = self._put(schema, body, field, value)
        body = self._in_room(body, [field for field, _ in inside])
        if "max_tokens" in body and "max_tokens" not in roots and not any(map(_is_count, inside)):
            body["max_tokens"] = max(1, self._max_tokens // 4)
        ids = body.get("prompt")
        if isinstance(ids, list) and all(isinstance(each, int) and 0 < each < self._vocab_size for each in ids):
            body["prompt"] = [(each + nonce * 7919 - 1) % (self._vocab_size - 1) + 1 for each in ids]
        return method, path, case.media, json.dumps(body, ensure_ascii=False).encode()

    def size(self, case: Case) -> int:
        """Bytes of its body."""
        return len(self.request(case)[3])

    def _plain(self, schema: Any) -> dict[str, Any]:
        """The schema without references."""
        while "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[1]
            schema = self._components[name] | {key: value for key, value in schema.items() if key != "$ref"}
        return dict(schema)

    def _branches(self, schema: Any) -> list[dict[str, Any]]:
        """Every kind of value that the schema takes, null left out, one type each."""
        plain = self._plain(schema)
        if kinds := plain.get("anyOf"):
            return [branch for kind in kinds for branch in self._branches(kind) if branch.get("type") != "null"]
        if isinstance(types := plain.get("type"), list):
            return [plain | {"type": each} for each in types if each != "null"]
        return [plain]

    def _walk(self, at: Field, schema: Any) -> dict[Field, list[dict[str, Any]]]:
        """Field -> kinds of values, of all that lie within `schema`."""
        found: dict[Field, list[dict[str, Any]]] = {}
        for branch in self._branches(schema):
            for name, inner in _within(branch).items():
                field = (*at, name)
                for deeper, branches in ((field, self._branches(inner)), *self._walk(field, inner).items()):
                    found.setdefault(deeper, []).extend(branches)
        return found

    def _extremes(self, schema: dict[str, Any]) -> list[Any]:
        """Values at the bounds of a schema of one type; the largest first."""
        if "enum" in schema or "const" in schema:
            return [value for value in schema.get("enum", [schema.get("const")]) if value is not None] or [None]
        match schema.get("type"):
            case "boolean":
                return [True, False]
            case "integer" | "number" as kind:
                return _extreme_numbers(schema, kind)
            case "string":
                return self._extreme_texts(schema)
            case "array":
                return self._extreme_lists(schema)
            case "object":
                return self._extreme_objects(schema)
        nested: Any = "a"
        for _ in range(_DEPTH):
            nested = [nested]
        return [
            _filled([5], self._room, schema.get("maxItems", MAX_COMMAS)),
            {f"k{index}": 0 for index in range(min(MAX_KEYS, schema.get("maxProperties", MAX_KEYS), self._room // 12))},
            _text(min(self._room, schema.get("maxLength", self._room))),
            nested,
        ]

    def _extreme_texts(self, schema: dict[str, Any]) -> list[Any]:
        if pattern := schema.get("pattern"):
            longest = max((each for each in ("a", "a" * 64, "0") if re.search(pattern, each)), key=len)
            return [longest]
        if (length := schema.get("maxLength")) is None:
            return [_text(self._context), _text(self._room), "\N{GRINNING FACE}" * (self._room // 4)]
        return [_text(min(length, self._room)), "\N{GRINNING FACE}" * min(length, self._room // 4)]

    def _extreme_lists(self, schema: dict[str, Any]) -> list[Any]:
        most = schema.get("maxItems", MAX_COMMAS)
        found = []
        for branch in self._branches(schema.get("items", {})):
            if branch.get("type") == "integer":
                # Lists of integers are lists of ids. The context's bound is the model's, so no schema has it.
                counts = (most,) if "maxItems" in schema else (self._context, most)
                found += [[1 + index * 7 % (self._vocab_size - 1) for index in range(count)] for count in counts]
                found = [ids[: self._room // 6] for ids in found]
            else:
                found.append(_filled([self._least(branch)], self._room, most))
                found.append(_filled([self._extremes(branch)[0]], self._room, most))
        return found

    def _extreme_objects(self, schema: dict[str, Any]) -> list[Any]:
        known = {name: self._least(inner) for name, inner in schema.get("properties", {}).items()}
        if not (extra := schema.get("additionalProperties", not known)):
            return [known]
        most = min(schema.get("maxProperties", MAX_KEYS), MAX_KEYS)
        head = "" if "propertyNames" in schema else "k"  # names with a pattern are ids
        value = self._least(extra) if isinstance(extra, dict) and extra else "a"
        size = len(json.dumps(value)) + len(head) + 10
        required = {name: known[name] for name in schema.get("required", ())}
        return [required | {f"{head}{index}": value for index in range(min(most, self._room // size))}]

    def _least(self, schema: Any, chosen: frozenset[str] | set[str] = frozenset()) -> Any:
        """A small value that is valid. chosen: properties of which one is meant."""
        branch = self._branches(schema)[0]
        if examples := branch.get("examples"):
            return deepcopy(examples[0])
        if "enum" in branch or "const" in branch:
            return branch.get("const", branch.get("enum", [None])[0])
        match branch.get("type"):
            case "boolean":
                return False
            case "integer" | "number":
                least = branch.get("minimum", branch.get("exclusiveMinimum", 0))
                return min(max(least, 1), branch.get("maximum", 1))
            case "string":
                return "a"
            case "array":
                return [self._least(branch.get("items", {})) for _ in range(max(1, branch.get("minItems", 0)))]
            case "object":
                return self._base(branch, chosen)
        return "a"

    def _base(self, schema: Any, chosen: frozenset[str] | set[str]) -> dict[str, Any]:
        """What an object needs, and what the document shows by example."""
        plain = self._plain(schema)
        properties = plain.get("properties", {})
        needed = list(plain.get("required", ()))
        # Of alternatives the one that has what is chosen, or the first.
        alternatives = [each["required"] for each in plain.get("oneOf", ()) if "required" in each]
        needed += min(alternatives, key=lambda each: chosen.isdisjoint(each), default=[])
        needed += [name for name, inner in properties.items() if "examples" in self._plain(inner)]
        body = {name: self._least(properties[name]) for name in dict.fromkeys(needed)}
        if "max_tokens" in properties and not chosen & {"max_completion_tokens"}:
            body["max_tokens"] = self._max_tokens
        return body

    def _put(self, schema: Any, current: Any, field: Field, value: Any) -> Any:
        """`current` with the value at `field`, in every item of the lists on the way."""
        if not field:
            return value
        name, rest = field[0], field[1:]
        kinds = ((branch, _within(branch).get(name)) for branch in self._branches(schema))
        branch, inner = next(
            kind for kind in kinds if kind[1] is not None and (not rest or rest in self._walk((), kind[1]))
        )
        if name == "[]":
            items = current if isinstance(current, list) and current else [self._least(inner)]
            items = items[: max(1, self._room // (len(json.dumps(value)) + 2))]
            return [self._put(inner, item, rest, value) for item in items]
        if name == "{}":
            entries = current if isinstance(current, dict) and current else {"5": None}
            return {key: self._put(inner, each, rest, value) for key, each in entries.items()}
        whole = current if isinstance(current, dict) else self._base(branch, {name})
        return {**whole, name: self._put(inner, whole.get(name), rest, value)}

    def _in_room(self, body: Any, fields: list[Field]) -> Any:
        """The body with shorter lists and texts, where two fields together have more than the room."""
        while (size := len(json.dumps(body, ensure_ascii=False).encode())) > self._room + 1024:
            for field in fields:
                value = body[field[0]]
                share = self._room / size
                if isinstance(value, (list, str)):
                    body[field[0]] = value[: max(1, int(len(value) * share * 0.9))]
                elif isinstance(value, dict):
                    body[field[0]] = dict(itertools.islice(value.items(), max(1, int(len(value) * share * 0.9))))
        return body


def _within(branch: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> schema of what lies directly within a value of one type."""
    inner = dict(branch.get("properties", {}))
    if "items" in branch:
        inner["[]"] = branch["items"]
    if isinstance(extra := branch.get("additionalProperties"), dict) and extra:
        inner["{}"] = extra
    return inner


def _extreme_numbers(schema: dict[str, Any], kind: str) -> list[Any]:
    step = 1 if kind == "integer" else 1e-3
    most = schema.get("maximum", _NO_BOUND[kind])
    least = schema.get("minimum", schema["exclusiveMinimum"] + step if "exclusiveMinimum" in schema else -most)
    return [most, least] if most != least else [most]


def _text(length: int) -> str:
    return ("ab " * (length // 3 + 1))[:length]


def _filled(items: list[Any], room: int, most: int = MAX_COMMAS) -> list[Any]:
    """As many as fit."""
    text = json.dumps(items[0], ensure_ascii=False)
    parts = sum(text.count(mark) for mark in '[{:"') or 1
    count = min(most, room // (len(text.encode()) + 2), 2 * MAX_KEYS // parts if parts > 1 else most)
    return items * max(1, count)


def _is_count(placed: tuple[Field, Any]) -> bool:
    """Whether a value is one that a document bounds closely, such as a number of texts."""
    return type(placed[1]) is int and 1 < placed[1] < 1 << 16


def _are_words(values: list[Any]) -> bool:
    return all(isinstance(value, str) and len(value) < 64 for value in values)


def _is_choice(values: list[Any]) -> bool:
    """Whether there is anything to choose: not where only null or one value is taken."""
    return len(values) > 1 or bool(values and isinstance(values[0], (list, dict)) and values[0])
