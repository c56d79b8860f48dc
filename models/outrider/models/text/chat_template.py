"""Renders chat templates: a conversation in, the model's prompt out.

Templates come with models, so they run in jinja2's immutable sandbox, with the names that transformers gives them and
no others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.models.errors import TokenizerError


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's words, for training; in a prompt only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call has a scope of its own, as in transformers: what the body sets ends with it.
        return jinja2.nodes.CallBlock(self.call_method("words"), [], [], body).set_lineno(line)

    def words(self, caller: jinja2.runtime.Macro) -> str:
        """The body's text."""
        return caller()


def render_template(
    source: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt's text, special tokens included: encode it with `add_special_tokens=False`.

    special_tokens: names that the template may use, such as bos_token. messages: `{"role": ..., "content": ...}` each.
    variables: further names, such as enable_thinking. Raises TokenizerError if the template is not valid jinja2, and
    with the template's own message when it refuses the conversation.
    """
    template = _compiled(source)
    names = {"documents": None, **special_tokens, **(variables or {})}
    own = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
    try:
        return template.render({**names, **own})
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
        ArithmeticError,
    ) as error:
        raise TokenizerError(f"the model's chat template refuses these messages: {error}") from None


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    # Kept: compiling a model's template takes milliseconds, in which a server's other threads want the interpreter.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerError(
            f"the model's chat template is not valid jinja2: {error}; correct it in the model"
        ) from None


def choose_template(
    chat_template: str | Sequence[Mapping[str, str]] | Mapping[str, str] | None, *, has_tools: bool
) -> str | None:
    """The template to use, of one or of several by name; None if the model has none."""
    if chat_template is None or isinstance(chat_template, str):
        return chat_template
    if isinstance(chat_template, Mapping):
        named = dict(chat_template)
    else:
        named = {entry["name"]: entry["template"] for entry in chat_template}
    if has_tools and "tool_use" in named:
        return named["tool_use"]
    return named.get("default")


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would put \u003c into prompts. Names and order are those of transformers.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
