"""Places a grammar after the reasoning of a model that marks it by `<think>` and `</think>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from outrider.models.errors import RequestError
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.text.tokenizer import Tokenizer

BEGIN: Final = "<think>"
END: Final = "</think>"
_TAIL_TOKENS: Final = 8
"""Of a prompt: enough to see whether it opens the reasoning, or closes it."""


def marks_reasoning(tokenizer: Tokenizer) -> bool:
    """Whether the chat template of this tokenizer knows reasoning."""
    return END in (tokenizer.template_source(has_tools=True) or "")


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends inside reasoning: its template opens it for the model."""
    return _ends_with(tokenizer, prompt, BEGIN)


def after_reasoning(spec: GrammarSpec, tokenizer: Tokenizer, prompt: Sequence[int]) -> GrammarSpec:
    """The grammar for what follows the reasoning, if there is any, of a model that marks it.

    Raises RequestError where no single token ends the reasoning that the prompt has begun.
    """
    is_open = opens_reasoning(tokenizer, prompt)
    if tokenizer.token_id(END) is None:
        if is_open:
            raise RequestError(
                "unsupported_parameter",
                f"a grammar is not supported here: {END}, which ends the model's reasoning, is no single token; leave "
                "it out",
            )
        return spec  # the text has no reasoning
    if is_open:
        return replace(spec, after=END)
    # A prompt that has closed the reasoning, as Qwen's without thinking, gets none.
    if _ends_with(tokenizer, prompt, END) or tokenizer.token_id(BEGIN) is None:
        return spec
    return replace(spec, after=END, opener=BEGIN)


def _ends_with(tokenizer: Tokenizer, prompt: Sequence[int], marker: str) -> bool:
    """Whether the prompt's text ends with `marker`, but for spaces."""
    return tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip().endswith(marker)
