"""Bounds a client's grammar before the library compiles it.

llguidance 1.9.1 bounds most of its work itself (`LIMITS` in `matchers`). What it does not bound, measured on one core
with 2 MB to 8 MB of stack (docs/log.md):

* It recurses along subschemas and rules: 300 nested ones end a process with a stack of 2 MB, 1,500 one with 8 MB.
* `multipleOf` takes time in proportion to its digits as one number: 9 s for 999983.
* The properties of an object take time that grows with their square: 0.4 s for 1,000, 2.6 s for 3,000.
* Alternatives of one rule: 1 s for the first mask of 9,000.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from outrider.models.errors import RequestError

MAX_JSON_BYTES: Final = 64 * 1024
MAX_TEXT_BYTES: Final = 16 * 1024
"""Of a regular expression, or of a grammar without the schemas in it: people write them, programs write schemas."""
MAX_NESTING: Final = 96
MAX_PATH: Final = 800
"""JSON levels of the schema and of all definitions that it refers to, together: no path through them is longer."""
MAX_PROPERTIES: Final = 500
MAX_ALL_PROPERTIES: Final = 2000
MAX_PATTERNS: Final = 64
"""Entries of `patternProperties`: those of one object take time that grows with their cube, 31 s for 400."""
MAX_MULTIPLES: Final = 10_000
MAX_RULES: Final = 256


def read_json(text: str) -> Any:
    """The value of a JSON text; raises RequestError `invalid_grammar`."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _refused(f"it is not JSON: {str(error)[:200]}") from None


def check_schema(text: str) -> None:
    """Raises RequestError for a text that is no JSON schema, or one that is costly to compile."""
    _check_sums([read_json(text)])


def _check_sums(schemas: Sequence[Any]) -> None:
    """Checks schemas that one grammar has: each alone, and what costs in proportion together."""
    properties, multiples = 0, Decimal(0)
    for schema in schemas:
        more_properties, more_multiples = _checked(schema)
        properties, multiples = properties + more_properties, multiples + more_multiples
    if properties > MAX_ALL_PROPERTIES:
        raise _refused(f"the schema has {properties:,} properties; expected at most {MAX_ALL_PROPERTIES:,}")
    if multiples > MAX_MULTIPLES:
        raise _refused(f"multipleOf is {multiples:f} without its decimal point; expected at most {MAX_MULTIPLES:,}")


def _checked(schema: Any) -> tuple[int, Decimal]:
    """Checks one schema; its properties, and its multiples as whole numbers."""
    if not isinstance(schema, dict | bool):
        raise _refused(f"the schema is a {type(schema).__name__}; expected an object")
    depths = _depths(schema)
    depth = depths.get(id(schema), 0)
    if depth > MAX_NESTING:
        raise _refused(f"the schema is nested {depth} levels deep; expected at most {MAX_NESTING}")
    targets: set[str] = set()
    properties = patterns = 0
    multiples = Decimal(0)
    for key, value in _pairs(schema):
        if key == "$ref" and isinstance(value, str):
            targets.add(value)
        elif key in ("properties", "patternProperties") and isinstance(value, dict):
            if len(value) > MAX_PROPERTIES:
                raise _refused(f"an object has {len(value):,} properties; expected at most {MAX_PROPERTIES}")
            if key == "patternProperties" and (patterns := patterns + len(value)) > MAX_PATTERNS:
                raise _refused(f"the schema has over {MAX_PATTERNS} patternProperties; expected at most as many")
            properties += len(value)
        elif key == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
            multiples += _digits(value)
    path = depth
    # Each part once, however it is called: a name that leads nowhere counts as the whole.
    for part in {id(part): part for part in (_target(schema, name) for name in targets)}.values():
        path += min(depths.get(id(part), 0), MAX_NESTING)
        if path > MAX_PATH:
            raise _refused(f"the schema and what it refers to are {path:,} levels deep; expected at most {MAX_PATH}")
    return properties, multiples


def check_lark(text: str) -> None:
    """Raises RequestError for a grammar with too many rules, or with a schema inside that is costly to compile."""
    if not text.strip():
        raise _refused("it is empty; expected rules, the first of them `start` or `root`")
    if text.lstrip().startswith("{"):
        # The library reads this as its own JSON form, past the checks of schemas.
        raise _refused("it begins with '{'; expected Lark or GBNF rules (kind json_schema takes schemas)")
    schemas: list[Any] = []
    own, end = "", 0  # the text without its schemas
    for found in re.finditer(r"%json\s*", text):
        if found.start() < end:
            continue  # a word inside a schema
        own += text[end : found.end()]
        try:
            schema, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise _refused(f"no JSON schema follows %json: {str(error)[:200]}") from None
        schemas.append(schema)
    own += text[end:]
    if (size := len(own.encode())) > MAX_TEXT_BYTES:
        raise _refused(f"it has {size:,} bytes besides its schemas; expected at most {MAX_TEXT_BYTES:,}")
    # Each rule has one. Which colons are in strings is not looked for: who hid a rule there would pass.
    rules = own.replace("(?:", "").replace("::=", ":").count(":")
    if rules > MAX_RULES:
        raise _refused(f"it has {rules:,} rules and other colons; expected at most {MAX_RULES}")
    _check_sums(schemas)


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """All keys of all objects inside, with their values."""
    waiting = [value]
    while waiting:
        at = waiting.pop()
        if isinstance(at, dict):
            yield from at.items()
        waiting.extend(_children(at))


def _depths(value: Any) -> dict[int, int]:
    """How many levels each object and list inside has, by its id. All at once: references may name parts of parts."""
    parts, found = [value], dict[int, int]()
    for at in parts:  # grows: all come after what they are in
        parts += (child for child in _children(at) if isinstance(child, dict | list))
    for at in reversed(parts):
        found[id(at)] = max((1 + found.get(id(child), 0) for child in _children(at)), default=0)
    return found


def _children(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())


def _target(schema: Any, name: str) -> Any:
    """What a `$ref` inside the schema points to; the whole schema where that is not known."""
    at = schema
    for part in name.removeprefix("#").split("/")[1:] if name.startswith("#") else ():
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and key in at:
            at = at[key]
        elif isinstance(at, list) and key.isdecimal() and len(key) < 6 and int(key) < len(at):
            at = at[int(key)]
        else:
            return schema
    return at


def _digits(value: float) -> Decimal:
    """A number without its decimal point: 25 for 0.25."""
    try:
        _, digits, exponent = Decimal(str(value)).as_tuple()
    except (InvalidOperation, ValueError):
        return Decimal(0)
    number = Decimal((0, digits, 0))
    return number if not isinstance(exponent, int) or exponent <= 0 else number.scaleb(min(exponent, 30))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _refused(what: str) -> RequestError:
    return RequestError("invalid_grammar", f"the grammar is refused: {what}")
