"""From names to parts: what the command line, the demo and a server need to make an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from outrider.edge.agent import AgentOptions, StreamAgent
from outrider.edge.depth import CostModelDepth, DepthController, FixedDepth, ThresholdDepth
from outrider.edge.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.endpoints import Endpoints
from outrider.edge.estimates import Estimates
from outrider.edge.results import DrafterKind, GenerationRequest, GenerationResult, Mode, OnTokens
from outrider.edge.stop_and_wait import StopAndWaitAgent
from outrider.models.bundle import Bundle
from outrider.models.errors import BundleError, ConfigError
from outrider.models.runtimes import open_sequence_runtime
from outrider.models.runtimes.base import RuntimeOptions


class Agent(Protocol):
    """What every mode offers: one text at a time, on one event loop."""

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> GenerationResult:
        """Generates one text; `on_tokens` is called with each commit's tokens as they arrive."""
        ...


def make_depth(name: str, estimates: Estimates) -> DepthController:
    """ "auto" (the cost model), "threshold", or a number of tokens, 0 to 32. Raises ConfigError for anything else."""
    if name == "auto":
        return CostModelDepth(estimates)
    if name == "threshold":
        return ThresholdDepth()
    if name.isdecimal():
        return FixedDepth(int(name))
    raise ConfigError(f"depth is {name!r}; expected auto, threshold or a number, 0 to 32")


def make_agent(
    mode: Mode,
    endpoints: Endpoints,
    drafter: Drafter | None,
    depth: str = "auto",
    options: AgentOptions | None = None,
) -> Agent:
    """An agent with estimates of its own, which it keeps from one text to the next."""
    estimates = Estimates()
    if mode is Mode.CLOUD_ONLY or drafter is None:
        return StreamAgent(endpoints)
    if mode is Mode.STOP_AND_WAIT:
        return StopAndWaitAgent(endpoints, drafter, make_depth(depth, estimates), estimates)
    return StreamAgent(endpoints, drafter, make_depth(depth, estimates), estimates, options)


def open_draft_bundle(path: str | Path) -> Bundle:
    """Opens and verifies a bundle. Raises BundleError when it is damaged or not a draft."""
    bundle = Bundle.open(path)
    if bundle.manifest.role != "draft":
        raise BundleError(f"{path} is a {bundle.manifest.role} bundle; expected a draft, as outrider-export writes it")
    return bundle


def open_drafter(bundle: Bundle, kind: DrafterKind = DrafterKind.MODEL, num_threads: int = 0) -> Drafter | None:
    """Loads what drafts; None for no draft. The caller closes it. Raises as `open_sequence_runtime` does."""
    if kind is DrafterKind.NONE:
        return None
    if kind is DrafterKind.NGRAM:
        return NgramDrafter()
    options = RuntimeOptions(device=bundle.manifest.device.upper(), num_threads=num_threads)
    return ModelDrafter(open_sequence_runtime(bundle.manifest.runtime, bundle.model_file, options))
