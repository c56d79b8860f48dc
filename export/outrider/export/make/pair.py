"""Exports a draft and its target together, and judges the draft by how often the target accepts its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.export.check.acceptance import Continuation, continue_prompts, measure_ranks, summarize
from outrider.export.check.runner import model_file, open_draft, open_target
from outrider.export.check.source_logits import prompts_for
from outrider.export.make.pipeline import StagedExport, require_ready, stage_export, stage_store
from outrider.export.progress import Progress, StageEvent, silent
from outrider.export.recipes import ExportOptions
from outrider.export.report.card import TargetTimes, require_acceptance
from outrider.export.report.card_html import PageWriter
from outrider.export.source.model_source import REFERENCE_ROOT, SourceModel, read_source
from outrider.export.source.prompts import Ids, encode_prompts
from outrider.models.bundle.bundle import Bundle
from outrider.models.errors import ConfigError, ExportError
from outrider.models.text.tokenizer import require_same_tokenizer


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


def export_pair(
    draft: str | Path,
    target: str | Path,
    out: str | Path,
    *,
    draft_options: ExportOptions | None = None,
    target_options: ExportOptions | None = None,
    prompts: Sequence[Any] | None = None,
    step_ms: float | None = None,
    extra_ms: float | None = None,
    is_chat: bool = False,
    is_forced: bool = False,
    page: PageWriter | None = None,
    progress: Progress = silent,
) -> tuple[Bundle, Bundle]:
    """Exports both to `out`/draft and `out`/target; acceptance and what follows from it go into the draft's manifest.

    prompts: texts or lists of chat messages that the draft is judged on; None: built-in ones. is_chat: texts are user
    messages for the target's chat template. step_ms, extra_ms: the target's step where it will run, and what a drafted
    token adds to it; None: as measured here. page: the report card to write beside them.
    Raises TokenizerMismatch before any work if the two do not share one tokenizer, ExportError if the draft is accepted
    too rarely and this is not forced; otherwise what `export_model` and `PageWriter` raise. Nothing is renamed into
    place before both have passed and everything is written.
    """
    draft_options, target_options = pair_options(draft_options, target_options)
    TargetTimes.require_sense(step_ms, extra_ms)
    root = Path(out)
    require_places(root, draft_options, target_options, page)
    draft_source, target_source = read_pair(draft, target, draft_options, target_options)
    ids = encode_judging(target_source, prompts, is_chat=is_chat)
    store = stage_store()
    with (
        stage_export(target_source, root / "target", target_options, progress, store) as staged_target,
        stage_export(draft_source, root / "draft", draft_options, progress, store) as staged_draft,
        page or nullcontext(),
    ):
        progress(StageEvent("pair", "measure"))
        texts = write_texts(staged_target.directory, target_options, target_source, ids)
        times = TargetTimes.resolve(staged_target.manifest.report.timing, step_ms, extra_ms)
        judge(staged_draft, texts, times, target_source, is_forced=is_forced)
        progress(StageEvent("pair", "write"))
        staged_target.seal()  # both before either is renamed: a full disk replaces neither
        staged_draft.seal()
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
    *,
    draft_options: ExportOptions,
    target_options: ExportOptions,
    progress: Progress = silent,
) -> Bundle:
    """Exports a draft to `destination`, judged on a target that was exported from `target_source` with its options.

    Acceptance and what follows from it go into the draft's manifest. Raises as `export_pair` does.
    """
    draft_options, target_options = pair_options(draft_options, target_options)
    require_ready(destination, draft_options)
    draft_model, target_model = read_pair(draft, target_source, draft_options, target_options)
    ids = encode_judging(target_model, None, is_chat=False)
    store = stage_store()
    with stage_export(draft_model, destination, draft_options, progress, store) as staged:
        progress(StageEvent("pair", "measure"))
        texts = write_texts(target.path, target_options, target_model, ids)
        times = TargetTimes.resolve(target.manifest.report.timing, None, None)
        judge(staged, texts, times, target_model, is_forced=False)
        progress(StageEvent("draft", "write"))
        bundle = staged.commit()
    store.release()
    return bundle


def pair_options(draft: ExportOptions | None, target: ExportOptions | None) -> tuple[ExportOptions, ExportOptions]:
    """The options of both, defaults for None. Raises ConfigError if they are for other roles."""
    draft, target = draft or ExportOptions("draft"), target or ExportOptions("target")
    if (draft.role, target.role) != ("draft", "target"):
        raise ConfigError(f"the options are for a {draft.role} and a {target.role}; expected a draft and a target")
    return draft, target


def require_places(
    root: Path, draft_options: ExportOptions, target_options: ExportOptions, page: PageWriter | None
) -> None:
    """Raises what `require_ready` and `PageWriter.check` raise, before any work."""
    require_ready(root / "draft", draft_options)
    require_ready(root / "target", target_options)
    if page is not None:
        page.check()


def read_pair(
    draft: str | Path, target: str | Path, draft_options: ExportOptions, target_options: ExportOptions
) -> tuple[SourceModel, SourceModel]:
    """Both sources. Raises TokenizerMismatch if they do not share one tokenizer, and what `read_source` raises."""
    draft_source = read_source(draft, max_positions=draft_options.max_positions)
    target_source = read_source(target, max_positions=target_options.max_positions)
    require_same_tokenizer(draft_source.tokenizer, target_source.tokenizer)
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
    """The text after these prompts, at every temperature, of the target in `directory`: its drafts are judged on it."""
    with closing(open_target(model_file(directory, options), options)) as runtime:
        return continue_prompts(
            runtime, prompts, num_ids=source.tokenizer.size, stop_ids=source.tokenizer.eos_token_ids
        )


def judge(
    draft: StagedExport,
    texts: Sequence[Continuation],
    times: TargetTimes,
    target: SourceModel,
    *,
    is_forced: bool,
) -> None:
    """Measures the draft on `texts` and adds the result to its report.

    Raises ExportError if it is accepted too rarely and this is not forced.
    """
    with closing(open_draft(draft.model_file, draft.options)) as runtime:
        ranks = measure_ranks(runtime, texts, num_ids=target.tokenizer.size)
    measured = summarize(ranks, target.name)
    if not is_forced:
        require_acceptance(measured, draft.manifest.name)
    draft.add_acceptance(measured, times, ranks)
