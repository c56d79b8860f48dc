"""States the options of structured output, as a group: a JSON schema, a regular expression, choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.reasoning import after_reasoning, marks_reasoning
from outrider.models.grammar.spec import GrammarSpec, dump_schema
from outrider.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """Which texts are allowed. The draft knows it too."""

    __slots__ = ()

    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON schema that the text follows.", show_default=False)
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole text matches.", show_default=False)
    ] = None
    choice_of: Annotated[
        list[str], typer.Option("--choice", help="A text that is allowed, and no other; repeatable.")
    ] = field(default_factory=list)
    grammar: GrammarSpec | None = field(init=False)

    def _set_grammar(self) -> None:
        """Sets `grammar`. Raises ConfigError, and RequestError `invalid_grammar`."""
        asked = {"--schema": self.schema is not None, "--regex": self.regex is not None, "--choice": self.choice_of}
        names = [name for name, is_given in asked.items() if is_given]
        if len(names) > 1:
            raise ConfigError(f"{names[0]} and {names[1]} both say which texts are allowed; leave one of them out")
        object.__setattr__(self, "grammar", self._spec())

    def _spec(self) -> GrammarSpec | None:
        if self.schema is not None:
            try:
                return GrammarSpec("json_schema", self.schema.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise ConfigError(f"--schema {self.schema} cannot be read: {reason}; expected a JSON schema") from None
        if self.regex is not None:
            return GrammarSpec("regex", self.regex)
        return GrammarSpec("choice", dump_schema(self.choice_of)) if self.choice_of else None

    def grammar_after(self, prompt: list[int], tokenizer: Tokenizer, *, is_chat: bool) -> GrammarSpec | None:
        """The grammar of the text after this prompt: in a chat, of what follows the reasoning."""
        if self.grammar is None or not is_chat or not marks_reasoning(tokenizer):
            return self.grammar
        return after_reasoning(self.grammar, tokenizer, prompt)


def compiled_for_draft(spec: GrammarSpec | None, tokenizer: Tokenizer) -> CompiledGrammar | None:
    """The grammar for a draft of this vocabulary; None where the library is not installed: it drafts without.

    Raises RequestError, TokenizerError.
    """
    if spec is None:
        return None
    compiler = GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids)
    try:
        return compiler.compile(spec)
    except RuntimeUnavailable:
        return None
    finally:
        compiler.close()
