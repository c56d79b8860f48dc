"""Makes agents and drafters from names, bundles and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice, Placement, opened_as, place_draft
from outrider.edge.drafting.calibration import MAX_WIDTH
from outrider.edge.drafting.depth import (
    MAX_DEPTH,
    CostModelDepth,
    DepthController,
    Effort,
    FixedDepth,
)
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.price import BYTES_PER_TOKEN
from outrider.edge.drafting.scheduler import DraftScheduler
from outrider.edge.drafting.worker import TreeLimits
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import AgentOptions, StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, OnTokens
from outrider.models.bundle.bundle import Bundle
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import BundleError, ConfigError
from outrider.models.runtimes import open_sequence_runtime, sequence_kind
from outrider.models.runtimes.base import RuntimeOptions, SequenceRuntime
from outrider.models.runtimes.mapped_sequence import mapped
from outrider.models.runtimes.ngram import QuotedText
from outrider.models.text.tokenizer import Tokenizer


class Agent(Protocol):
    """What every mode offers: one text at a time, on one event loop."""

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> GenerationResult:
        """Generates one text; `on_tokens` is called with each commit's tokens as they arrive."""


def make_depth(name: str, estimates: Estimates, effort: Effort = Effort.NORMAL) -> DepthController:
    """ "auto" (the cost model), or a number of tokens, 0 to 64. Raises ConfigError for anything else."""
    if name == "auto":
        return CostModelDepth(estimates, effort)
    if name.isdecimal():
        return FixedDepth(int(name))
    raise ConfigError(f"depth is {name!r}; expected auto or a number, 0 to {MAX_DEPTH}")


def make_options(
    width: str = "auto",
    effort: Effort = Effort.NORMAL,
    bytes_per_token: float = BYTES_PER_TOKEN,
    is_looked_up: bool = True,
) -> AgentOptions:
    """Options of a stream agent. width: "auto", or guesses per token, 1 to 8. Raises ConfigError for anything else."""
    is_number = width.isascii() and width.isdecimal() and 1 <= int(width) <= MAX_WIDTH
    if width != "auto" and not is_number:
        raise ConfigError(f"width is {width!r}; expected auto or a number, 1 to {MAX_WIDTH}")
    limits = TreeLimits() if width == "auto" else TreeLimits(width=int(width))
    return AgentOptions(limits, bytes_per_token, effort=effort, is_looked_up=is_looked_up)


def eased(options: AgentOptions) -> AgentOptions:
    """The same with half the work: low effort, half the nodes, half the bytes."""
    tree = replace(options.tree, max_nodes=max(1, options.tree.max_nodes // 2))
    return replace(options, tree=tree, bytes_per_token=options.bytes_per_token / 2.0, effort=Effort.LOW)


def make_agent(
    mode: Mode,
    endpoints: Endpoints,
    drafter: Drafter | None,
    depth: str = "auto",
    options: AgentOptions | None = None,
    scheduler: DraftScheduler | None = None,
    estimates: Estimates | None = None,
    quoted: Sequence[QuotedText] = (),
) -> Agent:
    """An agent, which keeps its estimates from one text to the next.

    Stop-and-wait sends paths, so of the options only effort and terms concern it. scheduler: its thread drafts, for
    stream mode; None: one of its own. quoted: texts that its text may quote; lookup copies from them. The rules
    rejection and tolerance are for stop-and-wait. Raises ConfigError there for a draft without a model.
    """
    estimates, options = estimates or Estimates(), options or AgentOptions()
    terms = options.terms
    if mode is Mode.CLOUD_ONLY or drafter is None:
        return StreamAgent(endpoints)
    if terms.rule.needs_evidence:
        if isinstance(drafter, NgramDrafter):
            raise ConfigError(f"the rule {terms.rule.value} needs a draft with a model; lookup has no probabilities")
        assert mode is Mode.STOP_AND_WAIT, "sessions are coupled or greedy"
    if mode is Mode.STOP_AND_WAIT:
        controller = make_depth(depth, estimates, options.effort)
        return StopAndWaitAgent(endpoints, drafter, controller, estimates, terms=terms)
    if options.is_looked_up and (options.tree.width > 1 or isinstance(drafter, NgramDrafter)):
        drafter = drafter.with_lookup(quoted)
    controller = make_depth(depth, estimates, options.effort)
    return StreamAgent(endpoints, drafter, controller, estimates, options, scheduler=scheduler)


def open_draft_bundle(path: str | Path) -> Bundle:
    """Opens and verifies a bundle. Raises BundleError when it is damaged or not a draft."""
    bundle = Bundle.open(path)
    if bundle.manifest.role != "draft":
        raise BundleError(f"{path} is a {bundle.manifest.role} bundle; expected a draft, as outrider-export writes it")
    return bundle


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """A drafter, and where it runs. Close the drafter."""

    drafter: Drafter
    placement: Placement


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A loaded draft model, and where it runs; None where n-gram lookup drafts. num_ids: as for ModelDrafter."""

    runtime: SequenceRuntime | None
    num_ids: int | None
    placement: Placement

    def drafter(self) -> Drafter:
        """What drafts one text at a time with it."""
        return NgramDrafter() if self.runtime is None else ModelDrafter(self.runtime, self.num_ids)


def open_drafter(
    bundle: Bundle, choice: DraftChoice = AS_BUNDLED, num_threads: int = 0, target: Tokenizer | None = None
) -> OpenDraft:
    """Loads what drafts one text at a time; the caller closes it. target, and raises: as `open_draft_model`."""
    model = open_draft_model(bundle, choice, num_threads, target=target)
    return OpenDraft(model.drafter(), model.placement)


def open_draft_model(
    bundle: Bundle,
    choice: DraftChoice = AS_BUNDLED,
    num_threads: int = 0,
    num_sequences: int = 1,
    max_positions: int = 0,
    target: Tokenizer | None = None,
) -> OpenModel:
    """Loads a draft model; the caller closes the runtime.

    num_sequences: texts that it may hold, where its runtime can hold several. max_positions: longest of them; 0: the
    model's own. target: the target's tokenizer, where the draft may have another; None: it has the same.

    Compiled models are kept in the user's cache where compiling takes long: not for the CPU. Raises as `place_draft`
    and `open_sequence_runtime` do.
    """
    manifest = bundle.manifest
    placement = place_draft(manifest, choice)
    if placement.runtime == "ngram":
        return OpenModel(None, None, placement)
    compiled = default_cache_dir() / "compiled" / manifest.digest[:16]
    options = RuntimeOptions(
        device=placement.open_on,
        num_threads=num_threads,
        cache_dir=None if placement.open_on == "CPU" else str(compiled),
        max_positions=max_positions,
        num_sequences=num_sequences,
        static_shapes=manifest.static_shapes,
        emulate_npu=placement.is_emulated,
    )
    kind = sequence_kind(manifest.runtime, manifest.device)
    runtime = open_sequence_runtime(kind, bundle.model_file, options)
    provider = getattr(runtime, "provider", placement.open_on)
    opened = opened_as(placement, manifest, provider, runtime.limits.max_positions)
    if target is None or target.fingerprint == manifest.tokenizer_fingerprint:
        return OpenModel(runtime, manifest.architecture.tokenizer_size, opened)
    # Mapped, a longer text is begun again at its later half: the draft's positions are no bound.
    return OpenModel(mapped(runtime, target, bundle.tokenizer()), target.size, replace(opened, max_positions=None))
