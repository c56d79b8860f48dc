"""States which texts a request allows, as data that travels on the wire and is the key of every cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, get_args

from outrider.models.errors import RequestError
from outrider.models.grammar.bounds import MAX_JSON_BYTES, MAX_TEXT_BYTES, check_lark, check_schema, read_json
from outrider.models.wire.fields import GrammarField

GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]
KINDS: Final[tuple[GrammarKind, ...]] = get_args(GrammarKind)
MAX_CHOICES: Final = 2048


@dataclass(frozen=True)
class GrammarSpec:
    """The texts that a request allows; equal specs allow the same texts. Checked and bounded: see `bounds`.

    kind: what `text` is: a JSON schema, nothing ("json_object"), a regular expression for the whole text, a Lark or
    GBNF grammar, or a JSON list of strings ("choice").
    after: the spelling of the token that the grammar begins after, such as "</think>"; "": it begins at once.
    opener: of the token, such as "<think>", that a text begins with where `after` is to come; the grammar of any other
    text begins at once. "": `after` always comes.

    JSON is written without spaces and line breaks unless the schema says otherwise under "x-guidance"
    (`with_whitespace`). Raises RequestError `invalid_grammar`.
    """

    kind: GrammarKind
    text: str = ""
    after: str = ""
    opener: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise invalid_grammar(f"the grammar's kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        # Schemas inside a grammar are JSON; `check_lark` bounds its own text.
        limit = MAX_TEXT_BYTES if self.kind == "regex" else MAX_JSON_BYTES
        check_size(self.text, limit)
        for name, spelling in (("after", self.after), ("opener", self.opener)):
            if len(spelling) > 128:
                raise invalid_grammar(f"`{name}` has {len(spelling)} characters; expected the spelling of one token")
        if self.opener and not self.after:
            raise invalid_grammar("there is an `opener` without `after`; set `after` to the token that ends it")
        _CHECKS[self.kind](self.text)

    @cached_property
    def hash(self) -> str:
        """64 hexadecimal digits, the same on every machine."""
        parts = (self.kind, self.text, self.after, *([self.opener] if self.opener else []))
        return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()

    @classmethod
    def checked(cls, kind: GrammarKind, text: str, after: str, opener: str) -> GrammarSpec:
        """One that another process of this server has checked: a second check of 60 kB holds Python for 0.1 s."""
        spec = object.__new__(cls)
        for name, value in (("kind", kind), ("text", text), ("after", after), ("opener", opener)):
            object.__setattr__(spec, name, value)
        return spec

    @classmethod
    def of_wire(cls, field: GrammarField | None) -> GrammarSpec | None:
        """The spec of a message's field."""
        return None if field is None else cls(field.kind, field.text, field.after, field.opener)

    def to_wire(self) -> GrammarField:
        """The field of a message."""
        return GrammarField(kind=self.kind, text=self.text, after=self.after, opener=self.opener)

    @classmethod
    def json_schema(cls, schema: Any, **options: Any) -> GrammarSpec:
        """The spec for a schema as Python has it; options: as `with_whitespace`."""
        return cls("json_schema", dump_schema(with_whitespace(schema, **options) if options else schema))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> GrammarSpec:
        """The spec that allows these texts only."""
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))


def check_size(text: str, limit: int = MAX_JSON_BYTES) -> None:
    """Raises RequestError for a text of more bytes, and for one that is no Unicode text."""
    try:
        found = len(text.encode())
    except UnicodeEncodeError:
        raise invalid_grammar("the grammar holds half of a surrogate pair; expected Unicode text") from None
    if found > limit:
        raise invalid_grammar(f"the grammar has {found:,} bytes; expected at most {limit:,}")


def dump_schema(schema: Any) -> str:
    """A schema's text; raises RequestError for what JSON cannot hold."""
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise invalid_grammar(f"the schema is not JSON: {error}") from None


def with_whitespace(
    schema: Any, *, flexible: bool | None = None, pattern: str | None = None, lenient: bool = False
) -> Any:
    """The schema with what llguidance reads under "x-guidance".

    flexible: spaces and line breaks may stand between JSON's tokens. pattern: a regular expression for what may stand
    there. lenient: keywords that the library does not know are ignored, not refused. Of a schema that says it already,
    its own values stay.
    """
    said = {"whitespace_flexible": flexible, "whitespace_pattern": pattern, "lenient": lenient or None}
    added = {key: value for key, value in said.items() if value is not None}
    if not added or not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**added, **(own if isinstance(own, dict) else {})}}


def invalid_grammar(message: str) -> RequestError:
    """The refusal of a grammar."""
    return RequestError("invalid_grammar", message)


def _check_choices(text: str) -> None:
    found = read_json(text)
    if not isinstance(found, list) or not found or not all(isinstance(item, str) and item for item in found):
        raise invalid_grammar("the choices are not a list of texts; expected at least one, none of them empty")
    if len(found) > MAX_CHOICES:
        raise invalid_grammar(f"there are {len(found):,} choices; expected at most {MAX_CHOICES:,}")


def _check_nothing(text: str) -> None:
    if text:
        raise invalid_grammar("a grammar of kind json_object has no text; expected json_schema for a schema")


def _check_regex(text: str) -> None:
    if not text:
        raise invalid_grammar("the regular expression is empty; expected one for the whole text")


_CHECKS: Final = {
    "json_schema": check_schema,
    "json_object": _check_nothing,
    "regex": _check_regex,
    "grammar": check_lark,
    "choice": _check_choices,
}
