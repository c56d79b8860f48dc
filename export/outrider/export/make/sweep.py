"""Exports a draft in every way for a device, measures all against one target, and keeps the best.

All are built and checked beside the destination and judged on the same texts; then one is renamed into place. A way
that fails on this machine does not stop the sweep: it is listed with its reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.export.check.advice import require_runtime
from outrider.export.disk import telling_of_full_disks
from outrider.export.make.build import place_files
from outrider.export.make.pair import (
    DEFAULT_JUDGING,
    DEFAULT_OPTIONS,
    Judging,
    PairOptions,
    judge,
    map_tokens,
    read_pair,
    write_texts,
)
from outrider.export.make.pipeline import StagedExport, stage_export, stage_store
from outrider.export.progress import Progress, StageEvent, silent
from outrider.export.recipes import RECIPES, ExportOptions, runtimes_for
from outrider.export.report.card_html import PageWriter
from outrider.export.report.comparison import Comparison, NotMade, compare
from outrider.export.source.family_facts import runtime_obstacle
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import DiskFull, ExportError, OutriderError


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep. kept: the drafts that were not recommended, by label, if they were kept."""

    comparison: Comparison
    draft: Bundle
    target: Bundle
    kept: Mapping[str, Bundle]


def recipes_for(options: ExportOptions) -> tuple[ExportOptions, ...]:
    """Every draft that `options` allows: all runtimes and precisions of its device, unless it names one."""
    runtimes = runtimes_for("draft", options.device) if options.runtime is None else (options.resolved_runtime,)
    return tuple(
        replace(options, runtime=runtime, precision=precision)
        for runtime in runtimes
        for precision in RECIPES["draft", options.device, runtime]
        if options.precision in (None, precision)
    )


def sweep_pair(
    draft: str | Path,
    target: str | Path,
    out: str | Path,
    *,
    options: PairOptions = DEFAULT_OPTIONS,
    judging: Judging = DEFAULT_JUDGING,
    keeps_all: bool = False,
    page: PageWriter | None = None,
    progress: Progress = silent,
) -> Swept:
    """Exports the target, and the draft in every way that fits its device; the recommended one goes to `out`/draft.

    A draft's precision or runtime in `options` narrows the sweep. page: as for `export_pair`. keeps_all: the other
    drafts go to `out`/sweep. Raises as `export_pair`; ExportError also if no draft could be made, with the reason of
    each.
    """
    root, store = Path(out), stage_store()
    draft_source, target_source, ids = read_pair(draft, target, root, options, judging, page)
    recipes = {recipe.label: recipe for recipe in recipes_for(options.draft)}
    facts = draft_source.shape.facts
    if all(runtime_obstacle(facts, each.resolved_runtime, each.device) for each in recipes.values()):
        require_runtime(next(iter(recipes.values())), facts, draft_source.name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(telling_of_full_disks(root, default_cache_dir()))
        # Opened before the work, so that an occupied destination fails first.
        writers = {
            name: stack.enter_context(
                BundleWriter(root / "sweep" / name.replace(" ", "-"), overwrite=options.draft.overwrite)
            )
            for name in (recipes if keeps_all else ())
        }
        staged_target = stack.enter_context(
            stage_export(target_source, root / "target", options.target, progress, store)
        )
        progress(StageEvent("target", "measure"))
        texts = write_texts(staged_target.writer.directory, options.target, target_source, ids)
        mapped = map_tokens(draft_source, target_source, texts, is_forced=judging.is_forced)
        times = judging.times_of(staged_target.manifest)
        made: dict[str, StagedExport] = {}
        not_made: list[NotMade] = []
        for name, recipe in recipes.items():

            def told(event: StageEvent, name: str = name) -> None:
                progress(StageEvent(name, event.stage) if event.bundle == "draft" else event)

            try:
                with contextlib.ExitStack() as attempt:
                    staged = attempt.enter_context(stage_export(draft_source, root / "draft", recipe, told, store))
                    told(StageEvent("draft", "measure"))
                    judge(staged, texts, len(ids), times, target_source, mapped, is_forced=True)
                    stack.push(attempt.pop_all())
                made[name] = staged
            except DiskFull:
                raise  # not about this draft: the others would not fit either
            except OutriderError as error:
                not_made.append(NotMade(name, str(error)))
        if not made:
            reasons = "; ".join(f"{skipped.label}: {skipped.reason}" for skipped in not_made)
            raise ExportError(f"no draft could be exported. {reasons}")
        manifests = [staged.manifest for staged in made.values()]
        found = compare(manifests, judging.round_trips_ms, not_made, is_forced=judging.is_forced)
        progress(StageEvent("pair", "write"))
        if page is not None:
            stack.enter_context(page)
        swept = _put_in_place(found, made, staged_target, writers, page)
        store.release()
        if page is not None:
            page.commit()
    return swept


def _put_in_place(
    found: Comparison,
    made: Mapping[str, StagedExport],
    target: StagedExport,
    writers: Mapping[str, BundleWriter],
    page: PageWriter | None,
) -> Swept:
    """Commits the recommended draft, the target and the drafts with a writer; writes the page without committing it."""
    best = made[found.recommended]
    others = {name: staged for name, staged in made.items() if name in writers and staged is not best}
    for name, staged in others.items():
        place_files(staged.writer.directory, writers[name].directory)
        writers[name].seal(staged.manifest)
    for staged in (target, best):  # all before any is renamed: a full disk replaces nothing
        staged.writer.seal(staged.manifest)
    if page is not None:
        page.write([row.manifest for row in found.rows], target.manifest, found)
    kept = {name: writers[name].commit(staged.manifest) for name, staged in others.items()}
    target_bundle = target.commit()
    return Swept(found, best.commit(), target_bundle, kept)
