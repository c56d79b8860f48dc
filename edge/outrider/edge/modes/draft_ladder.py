"""Lists where given drafts may run, and makes the ladder of them: the best first, n-gram lookup last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

from outrider.edge.devices.discovery import FoundRuntime, ModelRuntime, find_runtime
from outrider.edge.devices.placement import DraftChoice, Placement, place_draft
from outrider.edge.drafting.drafter import Drafter, NgramDrafter
from outrider.edge.drafting.ladder import LadderDrafter, Rung
from outrider.edge.modes.assemble import OpenDraft, OpenModel, open_draft_model
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Device
from outrider.models.errors import BundleError, ConfigError, OutriderError, RuntimeUnavailable
from outrider.models.text.tokenizer import Tokenizer

LOOKUP_WORDS: Final = "n-gram lookup"
DEVICE_ORDER: Final[tuple[Device, ...]] = ("npu", "gpu", "cpu")
"""Where a draft goes when its device fails."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft and a place where it may run. choice: opens it there."""

    bundle: Bundle
    choice: DraftChoice
    placement: Placement

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.bundle.manifest.name} ({self.placement.words})"


@dataclass(frozen=True, slots=True)
class LazyModel:
    """A model that is loaded when it is needed. words: what it is, for people."""

    words: str
    open: Callable[[], OpenModel]

    def drafter(self) -> Drafter:
        """Loads it for one text at a time."""
        return self.open().drafter()


def candidates_of(
    bundles: Sequence[Bundle],
    choice: DraftChoice,
    find: Callable[[ModelRuntime], FoundRuntime] = find_runtime,
    *,
    is_mapped: bool = False,
) -> list[Candidate]:
    """Every place where one of these drafts may run: the chosen device, or the bundle's own, first.

    A draft runs on the other devices of its runtime too, where its code allows it. is_mapped: the target's tokenizer is
    known, so theirs may differ. Raises ConfigError for drafts of different tokenizers, and, where none may run as
    chosen, what `place_draft` raises for the first.
    """
    if not is_mapped and len({bundle.manifest.tokenizer_fingerprint for bundle in bundles}) > 1:
        names = ", ".join(bundle.manifest.name for bundle in bundles)
        raise ConfigError(f"the drafts {names} have different tokenizers; give --draft bundles made for one target")
    found: list[Candidate] = []
    reasons: list[OutriderError] = []
    find = cache(find)
    for bundle in bundles:
        try:
            found.append(Candidate(bundle, choice, place_draft(bundle.manifest, choice)))
        except (ConfigError, RuntimeUnavailable, BundleError) as error:
            reasons.append(error)
            if len(bundles) == 1:
                raise
            if choice != DraftChoice():
                continue  # it may not run as asked, so nowhere
        if choice.runtime == "ngram" or choice.emulate_npu or choice.provider:
            continue
        runtime: ModelRuntime = "openvino" if bundle.manifest.runtime == "openvino" else "onnxruntime"
        try:
            here = find(runtime)
        except RuntimeUnavailable:
            continue
        for device in DEVICE_ORDER:
            is_known = any(each.bundle is bundle and each.placement.device == device for each in found)
            if is_known or not here.has(device):
                continue
            other = replace(choice, device=device)
            with suppress(ConfigError, RuntimeUnavailable, BundleError):
                found.append(Candidate(bundle, other, place_draft(bundle.manifest, other, here)))
    if not found:
        raise reasons[0]
    return found


def lazy_model(
    candidate: Candidate,
    num_threads: int = 0,
    num_sequences: int = 1,
    max_positions: int = 0,
    target: Tokenizer | None = None,
) -> LazyModel:
    """The candidate's model, not yet loaded. target: as in `open_draft_model`."""
    how = (num_threads, num_sequences, max_positions, target)
    return LazyModel(candidate.words, partial(open_draft_model, candidate.bundle, candidate.choice, *how))


def open_first(
    models: Sequence[LazyModel], on_step: Callable[[str], None] = lambda words: None, *, is_asked: bool
) -> tuple[OpenModel, list[LazyModel]]:
    """The first model that opens, how it is loaded anew, and those after it.

    is_asked: the user named the device, so the first must open. Raises what the last one raises where none does.
    """
    for index, lazy in enumerate(models):
        try:
            return lazy.open(), list(models[index:])
        except OutriderError as error:
            if is_asked or index + 1 == len(models):
                raise
            on_step(f"{lazy.words} does not open: {error}")
    raise AssertionError("no model is given")


def open_ladder(
    models: Sequence[LazyModel],
    on_step: Callable[[str], None] = lambda words: None,
    *,
    is_asked: bool = True,
    is_looked_up: bool = True,
) -> OpenDraft:
    """What drafts one text at a time, and steps down when it fails; the caller closes it. Raises as `open_first`."""
    model, models = open_first(models, on_step, is_asked=is_asked)
    first = model.drafter()
    if model.runtime is None:
        return OpenDraft(first, model.placement)
    rungs = [Rung(model.placement.words, models[0].drafter)]
    rungs += [Rung(each.words, each.drafter) for each in models[1:]]
    if is_looked_up:
        rungs.append(Rung(LOOKUP_WORDS, NgramDrafter))
    return OpenDraft(LadderDrafter(rungs, on_step, first), model.placement)
