"""Runs one machine as two: the cloud as a process on its own core, a network with a chosen round trip, the agent here.

For `outrider demo` and for the measurements in `bench/`. It imports neither cloud nor export: the cloud is started as
its users start it, and bundles are given by their paths.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice, Placement
from outrider.edge.drafting.depth import CostModelDepth
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.cores import CorePlan, Cores, plan_cores, running_on
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import Agent, make_agent, open_draft_bundle, open_drafter
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import AgentOptions
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.models.bundle.bundle import Bundle
from outrider.models.client.client import VerifierClient
from outrider.models.text.tokenizer import Tokenizer

CLOUD_ONLY = "cloud_only"
STOP_AND_WAIT = "stop_and_wait"
STREAM = "stream"

ALIKE = ("--no-share-prefixes",)
"""Options of a cloud whose modes are compared by time: else the first to run a prompt computes it for the others."""

ALONE = (*ALIKE, "--no-lookup")
"""Options of a cloud whose target is alone where the device drafts nothing: else it guesses by prompt lookup."""


@dataclass(frozen=True, slots=True)
class Lab:
    """An open laboratory. url: the cloud's own, without the network in between.

    choice, placement: the draft that was asked for, and the one that runs.
    """

    url: str
    cores: CorePlan
    target: Bundle
    draft: Bundle
    tokenizer: Tokenizer
    drafter: Drafter
    choice: DraftChoice
    placement: Placement

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's token ids."""
        return tuple(self.tokenizer.encode(text))


@contextmanager
def open_lab(
    target: Path,
    draft: Path,
    choice: DraftChoice = AS_BUNDLED,
    cloud_options: Sequence[str] = ALIKE,
    cloud_python: str = sys.executable,
    num_cores: int = 1,
) -> Iterator[Lab]:
    """Starts the cloud and opens the draft; this thread stays on the agent's core until the end.

    cloud_options: more arguments of `outrider-cloud serve`. cloud_python: the interpreter that runs it. num_cores:
    of each side. Raises BundleError, ConfigError, RuntimeUnavailable.
    """
    cores = plan_cores(num_cores)
    target_bundle, draft_bundle = Bundle.open(target), open_draft_bundle(draft)
    tokenizer = target_bundle.tokenizer()
    with ExitStack() as stack:
        url = stack.enter_context(cloud_process(target, cores.cloud, cloud_options, cloud_python))
        stack.enter_context(running_on(cores.agent))
        opened = open_drafter(draft_bundle, choice, num_threads=1, target=tokenizer)
        stack.enter_context(closing(opened.drafter))
        yield Lab(url, cores, target_bundle, draft_bundle, tokenizer, opened.drafter, choice, opened.placement)


def cloud_process(
    target: Path,
    cores: Cores,
    options: Sequence[str] = (),
    python: str = sys.executable,
    *,
    key: str | None = None,
    on_end: Callable[[str], None] | None = None,
) -> AbstractContextManager[str]:
    """`outrider-cloud serve` on a free loopback port with one thread; gives its URL. python: runs it.

    key: what it asks its clients for; None: nothing. on_end: as `child_process` calls it. Without --recent among the
    options it keeps no texts: modes that run on the same prompt would help each other.
    """
    serve = [
        "-m",
        "outrider.cloud.server",
        "serve",
        str(target),
        "--port",
        "0",
        "--threads",
        "1",
        "--drain-s",
        "0",
        "--no-recent",
    ]
    return child_process(
        [*serve, *options],
        ready_prefix="OUTRIDER_READY ",
        cores=cores,
        python=python,
        secrets={"OUTRIDER_API_KEYS": key} if key is not None else None,
        on_end=on_end,
    )


@contextmanager
def network(url: str, rtt_ms: float, cores: Cores) -> Iterator[str]:
    """The URL by which `url` is reached over a round trip of `rtt_ms`; `url` itself for 0."""
    if rtt_ms == 0.0:
        yield url
        return
    arguments = ["-m", "outrider.edge.lab.proxy", "--target", urlsplit(url).netloc, "--rtt-ms", str(rtt_ms)]
    # A process of its own, because a thread would wait for this one's interpreter lock, and that is no network's delay.
    with child_process(arguments, ready_prefix="http", cores=cores) as rest:
        yield "http" + rest


@asynccontextmanager
async def connected(
    url: str, cores: CorePlan, rtt_ms: float = 0.0, *, is_far: bool = False
) -> AsyncIterator[Endpoints]:
    """The cloud at `url`, a round trip of `rtt_ms` away. is_far: a core each stands for two machines, so the device
    takes no turns.
    """
    with network(url, rtt_ms, cores.agent) as url:
        async with VerifierClient(url) as client:
            client.is_local &= not is_far or cores.agent is None
            yield Endpoints([client])


def three_modes(endpoints: Endpoints, drafter: Drafter, options: AgentOptions | None = None) -> dict[str, Agent]:
    """Cloud-only, stop-and-wait and stream, each with estimates of its own. options: of the stream agent."""
    waiting = Estimates()
    return {
        CLOUD_ONLY: make_agent(Mode.CLOUD_ONLY, endpoints, None),
        STOP_AND_WAIT: StopAndWaitAgent(endpoints, drafter, CostModelDepth(waiting), waiting),
        STREAM: make_agent(Mode.STREAM, endpoints, drafter, options=options),
    }


Key = TypeVar("Key", bound=Hashable)


async def interleave(
    modes: Mapping[Key, Agent],
    requests: Sequence[GenerationRequest],
    on_result: Callable[[Key, GenerationResult], None] = lambda name, result: None,
    has_time: Callable[[], bool] = lambda: True,
) -> dict[Key, list[GenerationResult]]:
    """Every mode on the first request, then every mode on the second, ...: what changes on the machine hits all.

    The order is reversed from one request to the next, so that no mode is always the first. has_time: asked before each
    request but the first; False leaves out the rest.
    """
    results: dict[Key, list[GenerationResult]] = {name: [] for name in modes}
    order = list(modes)
    for index, request in enumerate(requests):
        if index and not has_time():
            break
        for name in order:
            result = await modes[name].generate(request)
            results[name].append(result)
            on_result(name, result)
        order.reverse()
    return results
