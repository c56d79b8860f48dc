"""Generates texts as a device does, against servers of the fake language, and says what they must be.

result = await generate([server.url], asking(), drafter(0.7), mode=Mode.STOP_AND_WAIT)
assert result.tokens == truth(asking())
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime, plain_text
from tests.faulty_posts import FaultRates, FaultyPosts
from tests.faulty_proxy import FaultyProxy, ProxyOptions
from tests.serving import FakeServer, fake_tokenizer
from tests.waiting import HANG_S

from outrider.cloud.engine import EngineConfig, Policy
from outrider.edge.drafting.depth import CostModelDepth, DepthController
from outrider.edge.drafting.drafter import Drafter, ModelDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.worker import TreeLimits
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.link.sender import Posts
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import AgentOptions, StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, TokenBatch
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointLost
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import OutriderError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.protocol import DraftRequest, SessionOpen
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE, TreeDraft, decode_tree

VOCAB = fake_tokenizer().size
SAMPLED = SamplingParams(0.8, seed=11)
MODES = (Mode.STREAM, Mode.STOP_AND_WAIT)
SURE = EngineConfig(policy=Policy.VERIFY, looks_up=False)
"""Verifies what a device sends and nothing else, whatever the times of this machine are."""
SOON = RetryPolicy(max_failures=2, max_outage_s=0.0, max_loading_s=0.0, first_pause_s=0.0)
"""Tries once more, at once."""


class Clock:
    """Seconds that pass only in pauses, which are noted, and as a test says."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Passes at once."""
        self.pauses.append(seconds)
        self.now += seconds


def truth(request: GenerationRequest, vocab_size: int = VOCAB) -> tuple[int, ...]:
    """Target-only text."""
    stop_ids = request.stop_ids or ()
    return tuple(
        plain_text(request.prompt, request.max_tokens, request.params, vocab_size=vocab_size, stop_ids=stop_ids)
    )


def whole(prompt: Sequence[int], params: SamplingParams = SAMPLED, max_tokens: int = 48) -> GenerationRequest:
    """A request that ends only by its length."""
    return GenerationRequest(tuple(prompt), params, max_tokens, stop_ids=frozenset(), ignore_eos=True)


def asking(seed: int = 0, params: SamplingParams = SAMPLED, max_tokens: int = 48) -> GenerationRequest:
    """A request that ends only by its length. seed: of its prompt."""
    return whole([1 + (seed * 31 + i * 7) % (VOCAB - 1) for i in range(5 + seed)], params, max_tokens)


def drafter(agreement: float = 0.7, on_step: Callable[[Sequence[int]], None] | None = None) -> ModelDrafter:
    """A draft that agrees with the target this often."""
    return ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, agreement=agreement, on_step=on_step))


def is_at_rest(server: FakeServer) -> bool:
    """Nothing runs or waits, and every block is free except those of parked prefixes (of /v1/verify)."""
    stats = server.core.engine.stats()
    return len(server.core.sessions) == stats.running == stats.queued == 0 and (
        stats.parked > 0 or stats.free_blocks == stats.num_blocks
    )


async def no_pause(_: float) -> None:
    """Retries without pause."""


async def generate(
    clouds: Sequence[str | VerifierClient],
    request: GenerationRequest,
    draft: Drafter | None = None,
    *,
    mode: Mode = Mode.STREAM,
    depth: DepthController | None = None,
    estimates: Estimates | None = None,
    options: ClientOptions | None = None,
    retry: RetryPolicy | None = None,
    sleep: Callable[[float], Awaitable[None]] = no_pause,
    clock: Callable[[], float] = time.monotonic,
    on_trouble: Callable[[str], None] = lambda words: None,
    on_tokens: Callable[[TokenBatch], None] | None = None,
    wrap: Callable[[VerifierClient], Posts] | None = None,
    width: int = 4,
    jitter: Callable[[], float] = lambda: 0.5,
) -> GenerationResult:
    """One text from the first cloud that works, given by its URL or a client, which is closed. width: of the tree.
    jitter: 0.5 changes no pause.
    """
    estimates = estimates or Estimates()
    depth = depth or CostModelDepth(estimates)
    clients = [VerifierClient(each, options) if isinstance(each, str) else each for each in clouds]
    async with AsyncExitStack() as stack:
        for client in clients:
            stack.push_async_callback(client.aclose)
        endpoints = Endpoints(clients, retry, sleep, clock, on_trouble, jitter=jitter)
        tree = AgentOptions(tree=TreeLimits(width=width))
        agent: StopAndWaitAgent | StreamAgent = StreamAgent(endpoints, draft, depth, estimates, tree, wrap_posts=wrap)
        if mode is Mode.STOP_AND_WAIT:
            agent = StopAndWaitAgent(endpoints, draft, depth, estimates)
        return await agent.generate(request, on_tokens)


def scripted_client(answer: Callable[[httpx.Request], httpx.Response], url: str = "http://scripted") -> VerifierClient:
    """Of a server that is a function, behind httpx's transport interface."""
    return VerifierClient(url, transport=httpx.MockTransport(answer))


class Passing(httpx.AsyncHTTPTransport):
    """Passes requests on, as `change` leaves them; what it answers comes in the server's place."""

    def __init__(self, change: Callable[[httpx.Request], httpx.Response | None]) -> None:
        super().__init__()
        self._change = change

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self._change(request) or await super().handle_async_request(request)


class Older(VerifierClient):
    """Reads what a server of an older protocol would say. protocol: set it."""

    protocol = 1

    async def _events(self, *arguments: Any) -> Any:
        async for event in super()._events(*arguments):
            yield event.model_copy(update={"protocol": self.protocol}) if isinstance(event, SessionOpen) else event


def slow(step_s: float) -> FakeBatchRuntime:
    """A target whose steps take time."""
    return FakeBatchRuntime(vocab_size=VOCAB, on_step=lambda _: time.sleep(step_s))


class Posting:
    """Posts by a function."""

    def __init__(self, post: Callable[[str, DraftMessage], Coroutine[Any, Any, None]]) -> None:
        self.post_drafts = post


class Pacing:
    """Passes drafts on to faulty posts, and lets the server run one step per attempted message.

    num_sure: so many messages are waited for however busy the machine is; for later ones a step waits for `longest_s`.
    """

    def __init__(self, rates: FaultRates | None = None, longest_s: float = 0.05, num_sure: int = 0) -> None:
        self.tried, self.failed = threading.Event(), list[OutriderError]()
        self._rates, self._longest_s, self._num_left = rates or FaultRates(), longest_s, num_sure

    def wrap(self, client: VerifierClient) -> Posts:
        faulty = FaultyPosts(client, self._rates, seed=5)

        async def post(session: str, message: DraftMessage) -> None:
            self.tried.set()
            try:
                await faulty.post_drafts(session, message)
            except OutriderError as e:
                if "unknown_session" not in str(e):  # else the text has ended meanwhile
                    self.failed.append(e)
                raise

        return Posting(post)

    def runtime(self) -> FakeBatchRuntime:
        """A target whose steps wait for the next message."""
        return FakeBatchRuntime(vocab_size=VOCAB, on_step=self._step)

    def _step(self, _: object) -> None:
        self.tried.wait(HANG_S if self._num_left > 0 else self._longest_s)  # the last steps have no draft
        self.tried.clear()
        self._num_left -= 1


class Spying:
    """Passes drafts on, keeps them, and loses the first ones. on_post: called before each."""

    def __init__(self, num_lost: int = 0, on_post: Callable[[], None] = lambda: None) -> None:
        self.trees, self.paths = list[TreeDraft](), list[DraftRequest]()
        self._num_lost, self._on_post = num_lost, on_post

    def wrap(self, client: VerifierClient) -> Posts:
        async def post(session: str, message: DraftMessage) -> None:
            self._on_post()
            if message.media_type == TREE_MEDIA_TYPE:
                self.trees.append(decode_tree(message.body))
            else:
                self.paths.append(DraftRequest.model_validate_json(message.body))
            if self._num_lost > 0:
                self._num_lost -= 1
                raise EndpointLost("the first messages are lost")
            await client.post_drafts(session, message)

        return Posting(post)


def proxy_to(url: str, options: ProxyOptions | None = None, listen_port: int = 0) -> FaultyProxy:
    """A faulty network in front of a server."""
    address = httpx.URL(url)
    assert address.port is not None
    return FaultyProxy(address.host, address.port, options, listen_port)


def free_port() -> int:
    """A port where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def nowhere() -> str:
    """An address where nothing listens."""
    return f"http://127.0.0.1:{free_port()}"
