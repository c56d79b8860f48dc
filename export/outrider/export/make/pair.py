"""Exports a draft and its target together, and judges the draft by how often the target accepts its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.export.check.acceptance import (
    NEW_TOKENS,
    Continuation,
    blocks_needed,
    continue_prompts,
    measure_ranks,
    nothing_fits,
    summarize,
)
from outrider.export.check.advice import require_runtime
from outrider.export.check.runner import model_file, open_draft, open_target
from outrider.export.check.source_logits import prompts_for
from outrider.export.check.token_mapping import measure_mapping
from outrider.export.make.pipeline import StagedExport, require_ready, stage_export, stage_store
from outrider.export.progress import Progress, StageEvent, silent
from outrider.export.recipes import ExportOptions
from outrider.export.report.card import JUDGED_AT, TargetTimes, forecast_for, require_acceptance, require_text_kept
from outrider.export.report.card_html import PageWriter
from outrider.export.source.model_source import REFERENCE_ROOT, SourceModel, read_source
from outrider.export.source.prompts import Ids, encode_prompts
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Manifest, Role, TokenMapping
from outrider.models.bundle.reference_export import REFERENCE
from outrider.models.bundle.speed_up import Setting
from outrider.models.errors import ConfigError, ExportError
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions
from outrider.models.runtimes.mapped_sequence import MappedSequence
from outrider.models.text.tokenizer import require_same_tokenizer
from outrider.models.text.vocabulary_map import VocabularyMap

DEFAULT_RTT_MS: Final = 50.0


@dataclass(frozen=True, slots=True)
class PairPaths:
    """The directories of a pair's two models."""

    draft: Path
    target: Path


def reference_directories() -> PairPaths:
    """The bundled pair's Hugging Face directories. Raises ExportError if this installation lacks them."""
    if REFERENCE_ROOT is None or not (REFERENCE_ROOT / "target" / "config.json").is_file():
        raise ExportError('the reference pair is not installed; run: pip install "outrider[export]"')
    return PairPaths(REFERENCE_ROOT / "draft", REFERENCE_ROOT / "target")


@dataclass(frozen=True, slots=True)
class PairOptions:
    """How both models are exported. Raises ConfigError where the options are for other roles."""

    draft: ExportOptions
    target: ExportOptions

    def __post_init__(self) -> None:
        roles = (self.draft.role, self.target.role)
        if roles != ("draft", "target"):
            raise ConfigError(f"the options are for a {roles[0]} and a {roles[1]}; expected a draft and a target")


@dataclass(frozen=True, slots=True)
class Judging:
    """By what a draft is judged.

    prompts: texts or lists of chat messages; None: built-in ones. is_chat: texts are user messages for the target's
    chat template. step_ms, extra_ms: the target's step where it will run, and what a drafted token adds to it; None: as
    measured here. round_trips_ms: a sweep compares its drafts on the average over these. is_forced: a draft that is
    accepted too rarely is written too. Raises ConfigError for times that no target or network has.
    """

    prompts: Sequence[Any] | None = None
    is_chat: bool = False
    step_ms: float | None = None
    extra_ms: float | None = None
    round_trips_ms: tuple[float, ...] = (DEFAULT_RTT_MS,)
    is_forced: bool = False
    same_tokenizer: bool = False

    def __post_init__(self) -> None:
        if not self.round_trips_ms:
            raise ConfigError("a sweep compares drafts at round trips and none was given; give at least one")
        for rtt_ms in self.round_trips_ms:
            Setting(0.0, 0.0, 1.0 if self.step_ms is None else self.step_ms, self.extra_ms or 0.0, rtt_ms)

    def times_of(self, target: Manifest) -> TargetTimes:
        """The times of a step of this target."""
        return TargetTimes.resolve(target.report.timing, self.step_ms, self.extra_ms)


DEFAULT_OPTIONS: Final = PairOptions(ExportOptions("draft"), ExportOptions("target"))
DEFAULT_JUDGING: Final = Judging()


@dataclass(frozen=True, slots=True)
class Mapped:
    """The map from a draft's tokens to the ids of a target with another tokenizer, and what was measured of it."""

    mapping: VocabularyMap
    measured: TokenMapping


def named_source(model: str, role: Role) -> str | Path:
    """What to read for a model that a user names: the bundled pair's directory for REFERENCE, else the name itself."""
    if model != REFERENCE:
        return model
    return reference_directories().draft if role == "draft" else reference_directories().target


def export_pair(
    draft: str | Path,
    target: str | Path,
    out: str | Path,
    *,
    options: PairOptions = DEFAULT_OPTIONS,
    judging: Judging = DEFAULT_JUDGING,
    page: PageWriter | None = None,
    progress: Progress = silent,
) -> tuple[Bundle, Bundle]:
    """Exports both to `out`/draft and `out`/target; acceptance and what follows from it go into the draft's manifest.

    page: the report card to write beside them.
    Raises TokenizerMismatch before any work if `judging` asks for one tokenizer and the two have different ones,
    ExportError if the draft is accepted too rarely, or cannot write the target's text, and this is not forced;
    otherwise what `export_model` and `PageWriter` raise. Nothing is renamed into place before both have passed and
    everything is written.
    """
    root = Path(out)
    draft_source, target_source, ids = read_pair(draft, target, root, options, judging, page)
    require_runtime(options.draft, draft_source.shape.facts, draft_source.name)
    store = stage_store()
    with (
        stage_export(target_source, root / "target", options.target, progress, store) as staged_target,
        stage_export(draft_source, root / "draft", options.draft, progress, store) as staged_draft,
        page or nullcontext(),
    ):
        progress(StageEvent("pair", "measure"))
        texts = write_texts(staged_target.writer.directory, options.target, target_source, ids)
        mapped = map_tokens(draft_source, target_source, texts, is_forced=judging.is_forced)
        times = judging.times_of(staged_target.manifest)
        judge(staged_draft, texts, len(ids), times, target_source, mapped, is_forced=judging.is_forced)
        progress(StageEvent("pair", "write"))
        staged_target.writer.seal(staged_target.manifest)  # both before either is renamed: a full disk replaces neither
        staged_draft.writer.seal(staged_draft.manifest)
        if page is not None:
            page.write([staged_draft.manifest], staged_target.manifest)
        target_bundle = staged_target.commit()
        draft_bundle = staged_draft.commit()
        store.release()
        if page is not None:
            page.commit()
    return draft_bundle, target_bundle


def export_draft_for(
    target: Bundle,
    target_source: str | Path,
    draft: str | Path,
    destination: str | Path,
    options: PairOptions,
    progress: Progress = silent,
) -> Bundle:
    """Exports a draft to `destination`, judged on a target that was exported from `target_source` with its options.

    Acceptance and what follows from it go into the draft's manifest. Raises as `export_pair` does, and
    TokenizerMismatch if the two do not share one tokenizer.
    """
    require_ready(destination, options.draft)
    draft_model, target_model = _read_sources(draft, target_source, options)
    require_same_tokenizer(draft_model.tokenizer, target_model.tokenizer)
    ids = encode_judging(target_model, None, is_chat=False)
    store = stage_store()
    with stage_export(draft_model, destination, options.draft, progress, store) as staged:
        progress(StageEvent("pair", "measure"))
        texts = write_texts(target.path, options.target, target_model, ids)
        times = DEFAULT_JUDGING.times_of(target.manifest)
        judge(staged, texts, len(ids), times, target_model, None, is_forced=False)
        progress(StageEvent("draft", "write"))
        bundle = staged.commit()
    store.release()
    return bundle


def read_pair(
    draft: str | Path,
    target: str | Path,
    root: Path,
    options: PairOptions,
    judging: Judging,
    page: PageWriter | None,
) -> tuple[SourceModel, SourceModel, list[Ids]]:
    """Both sources, and the prompts that drafts are judged on, as token ids.

    Raises before any work what `require_ready`, `PageWriter.check`, `read_source`, `require_runtime` for the target
    and `encode_judging` raise, and TokenizerMismatch if `judging` asks for one tokenizer and there are two.
    """
    require_ready(root / "draft", options.draft)
    require_ready(root / "target", options.target)
    if page is not None:
        page.check()
    draft_source, target_source = _read_sources(draft, target, options)
    require_runtime(options.target, target_source.shape.facts, target_source.name)
    if judging.same_tokenizer:
        require_same_tokenizer(draft_source.tokenizer, target_source.tokenizer)
    return draft_source, target_source, encode_judging(target_source, judging.prompts, is_chat=judging.is_chat)


def _read_sources(draft: str | Path, target: str | Path, options: PairOptions) -> tuple[SourceModel, SourceModel]:
    draft_source = read_source(draft, max_positions=options.draft.max_positions)
    target_source = read_source(target, max_positions=options.target.max_positions)
    return draft_source, target_source


def encode_judging(target: SourceModel, prompts: Sequence[Any] | None, *, is_chat: bool) -> list[Ids]:
    """Token ids of the prompts that drafts are judged on: texts or lists of chat messages; None: built-in texts.

    is_chat: texts too go through the target's chat template. Raises TokenizerError if it has none, ConfigError for
    built-in texts with `is_chat`, ExportError for an empty prompt.
    """
    if is_chat and not prompts:
        raise ConfigError("the built-in prompts are not chat messages; give your own with --prompts")
    ids = encode_prompts(prompts or prompts_for(target), target.tokenizer, is_chat=is_chat)
    if empty := [number for number, prompt in enumerate(ids, start=1) if not prompt]:
        raise ExportError(
            f"{len(empty)} of {len(ids)} prompts are empty, the first is number {empty[0]}; leave them out"
        )
    return ids


def write_texts(
    directory: Path, options: ExportOptions, source: SourceModel, prompts: Sequence[Sequence[int]]
) -> tuple[Continuation, ...]:
    """The text after these prompts, at every temperature, of the target in `directory`: its drafts are judged on it.

    Prompts that its positions do not hold with the new tokens are left out. Raises ExportError if all are.
    """
    path = model_file(directory, options)

    def write(runtime: BatchRuntime) -> tuple[Continuation, ...]:
        return continue_prompts(
            runtime, prompts, num_ids=source.tokenizer.size, stop_ids=source.tokenizer.eos_token_ids
        )

    with closing(open_target(path, options)) as usual:
        needed, held = blocks_needed(usual, prompts), usual.num_blocks
        if needed <= held:
            return write(usual)
    # A block takes no more than its share of the usual cache.
    share = -(-RuntimeOptions().kv_cache_bytes // held)
    with closing(open_target(path, options, kv_cache_bytes=needed * share)) as larger:
        return write(larger)


def map_tokens(
    draft: SourceModel, target: SourceModel, texts: Sequence[Continuation], *, is_forced: bool
) -> Mapped | None:
    """How the draft's tokens write the target's ids, measured on `texts`; None where both have one tokenizer.

    Raises ExportError if the draft cannot write such text and this is not forced.
    """
    ours, theirs = draft.tokenizer, target.tokenizer
    if ours.fingerprint == theirs.fingerprint:
        return None
    mapping = VocabularyMap(theirs, ours)
    measured = measure_mapping(mapping, theirs, ours, [text.text for text in texts])
    if not is_forced:
        require_text_kept(measured, draft.name, target.name)
    return Mapped(mapping, measured)


def judge(
    draft: StagedExport,
    texts: Sequence[Continuation],
    num_prompts: int,
    times: TargetTimes,
    target: SourceModel,
    mapped: Mapped | None,
    *,
    is_forced: bool,
) -> None:
    """Measures the draft on `texts` and adds the result to its report, with the predicted speed-up with this target.

    num_prompts: that were given; the report says how many were too long, at the temperature that lost most. mapped: as
    `map_tokens` gives it. Raises ExportError if no text fits at the temperature that decides, and if the draft is
    accepted too rarely and this is not forced.
    """
    runtime = open_draft(model_file(draft.writer.directory, draft.options), draft.options)
    rows_per_id = 1.0
    with closing(runtime if mapped is None else MappedSequence(runtime, mapped.mapping)) as sequence:
        ranks = measure_ranks(sequence, texts, num_ids=target.tokenizer.size)
        if JUDGED_AT not in ranks:
            raise nothing_fits(sequence.limits.max_positions, NEW_TOKENS)
        if isinstance(sequence, MappedSequence):
            rows_per_id = sequence.rows_per_id
    measured = summarize(ranks, target.name)
    if not is_forced:
        require_acceptance(measured, draft.manifest.name)
    report = draft.manifest.report
    timing = report.timing
    if timing is not None:
        forecast = forecast_for(measured, timing.token_ms * rows_per_id, times, ranks.get(JUDGED_AT))
        timing = timing.model_copy(update={"forecast": forecast})
    found: dict[str, Any] = {
        "acceptance": measured,
        "mapping": mapped.measured if mapped is not None else None,
        "timing": timing,
    }
    temperatures = {text.params.temperature for text in texts}
    measured_each = [len(ranks[each].texts) if each in ranks else 0 for each in temperatures]
    if left_out := num_prompts - min(measured_each):
        note = (
            f"acceptance is without {left_out} of the {num_prompts} prompts: with {NEW_TOKENS} new tokens they are "
            "longer than the sequences of draft or target"
        )
        found["notes"] = (*report.notes, note)
    draft.manifest = draft.manifest.model_copy(update={"report": report.model_copy(update=found)})
