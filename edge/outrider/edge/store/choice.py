"""Chooses among the drafts that a server offers, by what this machine has.

A draft runs in the runtime that it was checked in, on its kind of device, so only drafts whose runtime is installed
and sees that device come into question. Nothing has been measured on this machine: acceptance decides where it differs
clearly, then the device, then the size, because a draft step reads all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, cast, get_args

from outrider.edge.devices.discovery import RUNTIME_NAMES, FoundRuntime, ModelRuntime, find_runtime, install_advice
from outrider.models.bundle.manifest import Device, Precision
from outrider.models.errors import BundleError, RuntimeUnavailable
from outrider.models.wire.offered import OfferedDraft

ALIKE: Final = 0.05
"""Acceptance rates that differ by less count as equal: cards have errors, and quantizations differ by little."""
DEVICE_ORDER: Final = ("gpu", "cpu", "npu")
"""Where acceptance is alike. An NPU last: whether it is faster than the processor beside it must be measured."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asks for; None leaves it to `choose`.

    name: takes that draft, even if this machine cannot run it. same_tokenizer: only drafts with the target's.
    """

    device: Device | None = None
    runtime: ModelRuntime | None = None
    precision: Precision | None = None
    name: str | None = None
    same_tokenizer: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft, and why it is left out; None: it comes into question. runs_here: why it does not run here, or None."""

    draft: OfferedDraft
    why_not: str | None
    runs_not: str | None


@dataclass(frozen=True, slots=True)
class OfferChoice:
    """The draft to take, and why, in words. note: a warning for the user."""

    draft: OfferedDraft
    why: str
    note: str | None = None


def judge(
    drafts: Sequence[OfferedDraft],
    wishes: Wishes,
    find: Callable[[ModelRuntime], FoundRuntime] = find_runtime,
) -> list[Judged]:
    """Each draft with the reason against it, in the server's order."""
    find = cache(find)

    def runs_not(draft: OfferedDraft) -> str | None:
        runtime, device = cast(ModelRuntime, draft.runtime), cast(Device, draft.device)
        if runtime not in RUNTIME_NAMES or device not in get_args(Device):
            return f"this version knows no drafts for {draft.runtime} on {draft.device}"
        try:
            here = find(runtime)
        except RuntimeUnavailable as error:
            return str(error)
        if here.version is None:
            return f"{RUNTIME_NAMES[runtime]} is {install_advice(runtime)}"
        if not here.has(device):
            return f"{RUNTIME_NAMES[runtime]} sees no {device.upper()} here"
        return None

    def judged(draft: OfferedDraft) -> Judged:
        asked = (("name", wishes.name), ("device", wishes.device), ("runtime", wishes.runtime))
        for what, wish in (*asked, ("precision", wishes.precision)):
            if wish is not None and getattr(draft, what) != wish:
                return Judged(draft, f"its {what} is {getattr(draft, what)}, --{what} asks for {wish}", None)
        if wishes.same_tokenizer and draft.tokenizer is not None:
            return Judged(draft, "it has another tokenizer than the target, and --same-tokenizer is given", None)
        reason = runs_not(draft)
        return Judged(draft, None if wishes.name is not None else reason, reason)

    return [judged(draft) for draft in drafts]


def choose(judged: Sequence[Judged], server: str) -> OfferChoice:
    """The best of those without a reason against them. Raises BundleError where there is none.

    server: its address, for the message.
    """
    if not judged:
        raise BundleError(
            f"the server at {server} has no drafts for its target; start it with --drafts DIR, or export a draft with "
            "`outrider-export draft MODEL`"
        )
    fitting = [each for each in judged if each.why_not is None]
    if not fitting:
        reasons = "; ".join(f"{each.draft.name}: {each.why_not}" for each in judged)
        if len(judged) == 1:
            raise BundleError(f"the only draft at {server} does not fit ({reasons}). `outrider pull --list` shows it")
        raise BundleError(
            f"none of the {len(judged)} drafts at {server} fits ({reasons}). `outrider pull --list` shows them all"
        )
    rates = [each.draft.acceptance for each in fitting if each.draft.acceptance is not None]
    floor = max(rates, default=0.0) - ALIKE
    best = sorted((each for each in fitting if (each.draft.acceptance or 0.0) >= floor), key=_order)
    first = best[0]
    note = f"{first.draft.name} does not run on this machine: {first.runs_not}" if first.runs_not else None
    return OfferChoice(first.draft, _why([each.draft for each in best], len(fitting), len(judged)), note)


def _order(each: Judged) -> tuple[bool, int, int, float, str]:
    draft = each.draft
    device = DEVICE_ORDER.index(draft.device) if draft.device in DEVICE_ORDER else len(DEVICE_ORDER)
    # A draft of the target's tokenizer needs fewer calls for a token.
    return draft.tokenizer is not None, device, draft.size_bytes, -(draft.acceptance or 0.0), draft.name


def _why(best: Sequence[OfferedDraft], num_fitting: int, num_offered: int) -> str:
    if num_offered == 1:
        return "the only draft here"
    if num_fitting == 1:
        return f"the only one of {num_offered} that fits"
    among = f"of {num_fitting} that fit"
    if len(best) == 1:
        return f"the highest acceptance {among}"
    first, second = best[:2]
    if (first.tokenizer is None) != (second.tokenizer is None):
        return f"{among}, it has the target's tokenizer"
    alike = "acceptance is alike" if first.acceptance is not None else "no acceptance is known"
    if first.device != second.device:
        return f"{among}, {alike}, and the {first.device.upper()} comes before the {second.device.upper()}"
    return f"{among}, {alike}, and it is the smallest for the {first.device.upper()}"
