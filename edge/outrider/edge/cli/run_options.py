"""States the options of `outrider run`, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from outrider.edge.cli.acceptance_options import AcceptanceOptions
from outrider.edge.cli.docs_flags import Docs, DocsTokens
from outrider.edge.cli.draft_flags import DRAFTS, TREE, OfflineOk, Patience, Threads, given, is_typed, refuse_idle
from outrider.edge.cli.grammar_options import GrammarOptions
from outrider.edge.cli.option_groups import DraftingOptions, KeyOptions, SamplingOptions, SourceOptions
from outrider.edge.cli.rule_options import RuleOptions
from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.results import Mode
from outrider.edge.retrieval.documents import DOCS_TOKENS
from outrider.models.acceptance import RuleTerms
from outrider.models.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunOptions(
    SourceOptions, DraftingOptions, SamplingOptions, RuleOptions, GrammarOptions, AcceptanceOptions, KeyOptions
):
    """The command line. Raises ConfigError for options that contradict each other, SamplingError for their values."""

    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue; read from standard input where it is - or missing.", show_default=False
        ),
    ] = None
    _accepting: ClassVar = AcceptanceOptions
    mode: Annotated[Mode, typer.Option(help="How device and cloud share the work.")] = Mode.STREAM
    _drafting: ClassVar = DraftingOptions
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest text, in tokens.")] = 128
    _sampling: ClassVar = SamplingOptions
    seed: Annotated[int | None, typer.Option(help="Same seed, same text; default: drawn, and printed.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False
    _rules: ClassVar = RuleOptions
    _grammar: ClassVar = GrammarOptions
    patience_ms: Patience = None
    docs: Docs = None
    docs_tokens: DocsTokens = DOCS_TOKENS
    threads: Threads = 0
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the draft bundle's chat template.")] = False
    offline_ok: OfflineOk = False
    no_recent: Annotated[
        bool,
        typer.Option("--no-recent", help="Have the server draft from no earlier answer to this prompt, and keep none."),
    ] = False
    compare: Annotated[
        bool, typer.Option("--compare", help="Then measure this mode and cloud-only in turn; print the speed-up.")
    ] = False
    repeat: Annotated[int, typer.Option(min=1, help="Rounds of --compare; the median counts.")] = 3
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print the other figures, and which passages the prompt has.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False
    _keys: ClassVar = KeyOptions
    terms: RuleTerms = field(init=False)

    def __post_init__(self) -> None:
        self._choose()
        self._set_params(self.seed)
        self._set_rules()
        self._set_grammar()
        self._refuse_idle()
        terms = RuleTerms(self.rule, self.delta, self.acceptance)
        object.__setattr__(self, "terms", terms)
        if self.mode is Mode.CLOUD_ONLY:
            if self.compare and is_typed("compare"):
                raise ConfigError("--compare measures cloud-only beside another --mode; leave one of them out")
            # What is left was configured for other modes.
            object.__setattr__(self, "choice", AS_BUNDLED)
            object.__setattr__(self, "compare", False)
            object.__setattr__(self, "patience_ms", None)

    def _refuse_idle(self) -> None:
        """Raises ConfigError for typed options that would have no effect."""
        if self.offline_ok and self.mode is not Mode.STREAM and is_typed("offline_ok"):
            raise ConfigError("--offline-ok needs a draft that streams; leave out --mode, or --offline-ok")
        if self.offline_ok and self.compare and is_typed("compare"):
            raise ConfigError("--compare measures the cloud, and --offline-ok does without; leave one of them out")
        if self.grammar is not None:
            refuse_idle("the grammar says where the text ends", given(self, "ignore_eos"))
        if self.docs is None:
            refuse_idle("without --docs there are no passages", given(self, "docs_tokens"))
        self._refuse_idle_acceptance()
        if self.rule.needs_evidence and self.mode is Mode.STREAM:
            raise ConfigError(
                f"--rule {self.rule.value} judges a block at a time; add --mode stop-and-wait, or leave out --rule"
            )
        if self.mode is Mode.CLOUD_ONLY:
            refuse_idle("nothing drafts with --mode cloud-only", given(self, "rule", *DRAFTS))
        if self.mode is Mode.STOP_AND_WAIT:
            refuse_idle("--mode stop-and-wait sends one path and waits for its answer", given(self, *TREE))
        self._refuse_idle_drafting()
