"""States the options of `outrider run`, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import typer

from outrider.edge.cli.option_groups import (
    AS_PARAM,
    DRAFTS,
    REMOVED_DRAFTING,
    TREE,
    Docs,
    DraftingOptions,
    KeyOptions,
    OfflineOk,
    SamplingOptions,
    SourceOptions,
    is_typed,
    refuse_idle,
)
from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.results import Mode
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec, dump_schema
from outrider.models.picks.acceptance import DEFAULT_DELTA, MAX_DELTA, Rule, RuleTerms
from outrider.models.processors.options import PLAIN, ProcessorOptions, bad_word_ids
from outrider.models.text.tokenizer import Tokenizer


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


NUMBERS: Final = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "typical_p", "xtc_probability", "xtc_threshold"),
)
"""Rules on rows that --param gives."""


def _bias(text: str) -> tuple[int, float]:
    token, separator, addend = text.partition("=")
    try:
        if not (separator and token.isascii() and token.isdecimal()):
            raise ValueError
        return int(token), float(addend)
    except ValueError:
        raise ConfigError(f"--logit-bias is {text!r}; expected ID=NUMBER, such as 42=-100") from None


@dataclass(frozen=True)
class RunOptions(SourceOptions, DraftingOptions, SamplingOptions, KeyOptions):
    """The command line. Raises ConfigError for options that contradict each other, SamplingError for their values.

    terms: the rule, and tolerance's parameter. processors: what else changes the target's choice, without the bad
    words. grammar: which texts are allowed. The draft knows both.
    """

    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue; read from standard input where it is - or missing.", show_default=False
        ),
    ] = None
    rule: Annotated[
        Rule,
        typer.Option(
            help="How the target accepts drafted tokens. coupled, greedy: exactly its text; rejection: a text of the "
            "same distribution; tolerance: LOSSY, and the server must allow it. The last two need --mode stop-and-wait."
        ),
    ] = Rule.COUPLED
    delta: Annotated[
        str,
        typer.Option(
            metavar="NUMBER|SHARE%",
            help="tolerance: accept while log p >= log q - delta; 70% calibrates delta until so many are accepted.",
        ),
    ] = str(DEFAULT_DELTA)
    mode: Annotated[Mode, typer.Option(help="How device and cloud share the work.")] = Mode.STREAM
    _drafting: ClassVar = DraftingOptions
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest text, in tokens.")] = 128
    _sampling: ClassVar = SamplingOptions
    seed: Annotated[int | None, typer.Option(help="Same seed, same text; default: drawn, and printed.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False
    logit_bias: Annotated[
        list[str], typer.Option(metavar="ID=NUMBER", help="Added to a token's logit, -100 to 100; repeatable.")
    ] = field(default_factory=list)
    bad_word: Annotated[list[str], typer.Option(help="A word that the text never has; repeatable.")] = field(
        default_factory=list
    )
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON schema that the text follows.", show_default=False)
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole text matches.", show_default=False)
    ] = None
    choice_of: Annotated[
        list[str], typer.Option("--choice", help="A text that is allowed, and no other; repeatable.")
    ] = field(default_factory=list)
    docs: Docs = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Wrap the prompt in the chat template of the draft's bundle; of the target, where the draft has "
            "another tokenizer.",
        ),
    ] = False
    offline_ok: OfflineOk = False
    no_recent: Annotated[
        bool,
        typer.Option("--no-recent", help="Have the server draft from no earlier answer to this prompt, and keep none."),
    ] = False
    compare: Annotated[
        bool, typer.Option("--compare", help="Then measure this mode and cloud-only in turn; print the speed-up.")
    ] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print the other figures, and which passages the prompt has.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False
    _keys: ClassVar = KeyOptions
    terms: RuleTerms = field(init=False)
    processors: ProcessorOptions = field(init=False)
    grammar: GrammarSpec | None = field(init=False)

    HELP: ClassVar = {
        "The text": ("max_tokens", "temperature", "seed", "param", "schema", "docs", "chat"),
        "The draft and the cloud": (
            "draft",
            "draft_device",
            "cloud",
            "target",
            "key_file",
            "mode",
            "on_battery",
            "offline_ok",
            "steady",
        ),
        "What is shown": ("compare", "verbose", "as_json"),
    }
    REMOVED: ClassVar = REMOVED_DRAFTING | {
        **dict.fromkeys(
            ("--top-k", "--top-p", "--min-p", *(f"--{name.replace('_', '-')}" for name in NUMBERS)), AS_PARAM
        ),
        "--acceptance": "Give the share to --delta: --delta 70%.",
        "--repeat": "--compare measures three rounds.",
        "--docs-tokens": "Passages have 512 tokens at most.",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose_verifier()
        numbers: dict[str, Any] = self._set_params(self.seed, NUMBERS)
        object.__setattr__(self, "processors", replace(PLAIN, **numbers, logit_bias=tuple(map(_bias, self.logit_bias))))
        object.__setattr__(self, "terms", self._terms())
        object.__setattr__(self, "grammar", self._grammar())
        self._refuse_idle()
        if self.mode is Mode.CLOUD_ONLY:
            if self.compare and is_typed("compare"):
                raise ConfigError("--compare measures cloud-only beside another --mode; leave one of them out")
            # What is left was configured for other modes.
            object.__setattr__(self, "choice", AS_BUNDLED)
            object.__setattr__(self, "compare", False)

    def _terms(self) -> RuleTerms:
        """Raises ConfigError, also for a typed delta that has no effect under the rule."""
        refuse_idle(self, self.rule is not Rule.TOLERANCE, f"the rule is {self.rule.value}", "delta")
        number, is_share = self.delta.removesuffix("%"), self.delta.endswith("%")
        try:
            if is_share and 1.0 <= float(number) <= 99.0:
                return RuleTerms(self.rule, acceptance=float(number) / 100.0)
            if not is_share and 0.0 <= float(number) <= MAX_DELTA:
                return RuleTerms(self.rule, float(number))
        except ValueError:
            pass  # no number
        raise ConfigError(f"--delta is {self.delta!r}; expected a number, 0 to {MAX_DELTA:g}, or a share, 1% to 99%")

    def _grammar(self) -> GrammarSpec | None:
        """Raises ConfigError, and RequestError `invalid_grammar`."""
        asked = {"--schema": self.schema is not None, "--regex": self.regex is not None, "--choice": self.choice_of}
        names = [name for name, is_given in asked.items() if is_given]
        if len(names) > 1:
            raise ConfigError(f"{names[0]} and {names[1]} both say which texts are allowed; leave one of them out")
        if self.schema is not None:
            try:
                return GrammarSpec("json_schema", self.schema.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise ConfigError(f"--schema {self.schema} cannot be read: {reason}; expected a JSON schema") from None
        if self.regex is not None:
            return GrammarSpec("regex", self.regex)
        return GrammarSpec("choice", dump_schema(self.choice_of)) if self.choice_of else None

    @property
    def may_write_alone(self) -> bool:
        """Whether the draft writes where no cloud answers: a configuration file may ask for it beside any mode."""
        return self.offline_ok and self.mode is Mode.STREAM

    def with_bad_words(self, encode: Callable[[str], list[int]]) -> ProcessorOptions:
        """The processors with the bad words. encode: without special tokens. Raises SamplingError."""
        if not self.bad_word:
            return self.processors
        return replace(self.processors, bad_words=tuple(map(tuple, bad_word_ids(encode, self.bad_word))))

    def _refuse_idle(self) -> None:
        """Raises ConfigError for typed options that would have no effect."""
        if self.offline_ok and self.mode is not Mode.STREAM and is_typed("offline_ok"):
            raise ConfigError("--offline-ok needs a draft that streams; leave out --mode, or --offline-ok")
        if self.offline_ok and self.compare and is_typed("compare"):
            raise ConfigError("--compare measures the cloud, and --offline-ok does without; leave one of them out")
        if self.steady and self.mode is Mode.STOP_AND_WAIT:
            raise ConfigError(
                "--steady, here or in the configuration file, needs a stream, and --mode stop-and-wait has none; leave "
                "one of them out"
            )
        refuse_idle(self, self.grammar is not None, "the grammar says where the text ends", "ignore_eos")
        if self.rule.needs_evidence and self.mode is Mode.STREAM:
            raise ConfigError(
                f"--rule {self.rule.value} judges a block at a time; add --mode stop-and-wait, or leave out --rule"
            )
        refuse_idle(self, self.mode is Mode.CLOUD_ONLY, "nothing drafts with --mode cloud-only", "rule", *DRAFTS)
        refuse_idle(
            self,
            self.mode is Mode.STOP_AND_WAIT,
            "--mode stop-and-wait sends one path and waits for its answer",
            *TREE,
        )
        self._refuse_idle_drafting()
