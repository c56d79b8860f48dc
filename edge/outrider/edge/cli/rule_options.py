"""States the options of rules on rows, as a group: penalties, bias, bad words, least tokens, typical-p, XTC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from outrider.models.errors import ConfigError
from outrider.models.transforms.bad_words import bad_word_ids
from outrider.models.transforms.rules import RowRules


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """What changes the target's choice besides sampling. The draft knows the rules too."""

    __slots__ = ()

    repetition_penalty: Annotated[
        float, typer.Option(help="Penalty of tokens that are in prompt or text; 1 is off.")
    ] = 1.0
    presence_penalty: Annotated[float, typer.Option(help="Penalty of tokens that are in the text, -2 to 2.")] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="Penalty for each time that a token is in the text, -2 to 2.")
    ] = 0.0
    logit_bias: Annotated[
        list[str], typer.Option(metavar="ID=NUMBER", help="Added to a token's logit, -100 to 100; repeatable.")
    ] = field(default_factory=list)
    bad_word: Annotated[list[str], typer.Option(help="A word that the text never has; repeatable.")] = field(
        default_factory=list
    )
    min_tokens: Annotated[int, typer.Option(min=0, help="Shortest text, in tokens.")] = 0
    typical_p: Annotated[float, typer.Option(help="Locally typical sampling; 1 keeps all.")] = 1.0
    xtc_probability: Annotated[float, typer.Option(help="Chance that XTC excludes top choices; 0 is off.")] = 0.0
    xtc_threshold: Annotated[float, typer.Option(help="Of XTC: least probability of a top choice.")] = 0.1
    rules: RowRules = field(init=False)

    def _set_rules(self) -> None:
        """Sets `rules`, without the bad words. Raises ConfigError, SamplingError."""
        rules = RowRules(
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            tuple(map(_bias, self.logit_bias)),
            (),
            self.min_tokens,
            None,
            self.typical_p,
            self.xtc_probability,
            self.xtc_threshold,
        )
        object.__setattr__(self, "rules", rules)

    def with_bad_words(self, encode: Callable[[str], list[int]]) -> RowRules:
        """The rules with the bad words. encode: without special tokens. Raises SamplingError."""
        if not self.bad_word:
            return self.rules
        return replace(self.rules, bad_words=tuple(map(tuple, bad_word_ids(encode, self.bad_word))))


def _bias(text: str) -> tuple[int, float]:
    token, separator, addend = text.partition("=")
    try:
        if not (separator and token.isascii() and token.isdecimal()):
            raise ValueError
        return int(token), float(addend)
    except ValueError:
        raise ConfigError(f"--logit-bias is {text!r}; expected ID=NUMBER, such as 42=-100") from None
