"""Tests the invariant: whatever the draft, the network or the failures, the agent's tokens are the target's own.

A real verifier on a loopback port speaks the fake language; the truth is that language, token by token.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
from tests.always_wrong import AlwaysWrongDrafter, WrappedDrafter
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.faulty_posts import FaultRates, FaultyPosts
from tests.faulty_proxy import FaultyProxy, ProxyOptions
from tests.serving import EOS_ID, FakeServer, fake_tokenizer, serve_fake

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig, Policy
from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.depth import CostModelDepth, DepthController, FixedDepth, ThresholdDepth
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.worker import TreeLimits
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.link.sender import Posts
from outrider.edge.modes.assemble import make_depth
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import AgentOptions, StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, Source, TokenBatch
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointLost
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import CloudError, ModelFault, OutriderError, RequestError, TokenizerMismatch
from outrider.models.http.security import KeyRing
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.wire.protocol import DraftRequest, SessionOpen
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE, TreeDraft, decode_tree

VOCAB = fake_tokenizer().size
SETTINGS = [SamplingParams(), SamplingParams(0.8, seed=11), SamplingParams(0.8, top_p=0.9, top_k=40, seed=12)]


SURE = EngineConfig(policy=Policy.VERIFY, looks_up=False)
"""Verifies what a device sends and nothing else, whatever the times of this machine are."""


def truth(request: GenerationRequest, vocab_size: int = VOCAB) -> tuple[int, ...]:
    """Target-only text by the plainest loop."""
    runtime, tokens = FakeSequenceRuntime(vocab_size=vocab_size), list(request.prompt)
    logits = runtime.extend(tokens)
    while len(tokens) < len(request.prompt) + request.max_tokens:
        tokens.append(pick(logits, request.params, len(tokens)))
        if tokens[-1] in (request.stop_ids or ()):
            break
        logits = runtime.extend(tokens[-1:])
    return tuple(tokens[len(request.prompt) :])


def asking(seed: int = 0, params: SamplingParams = SETTINGS[1], max_tokens: int = 48) -> GenerationRequest:
    """A request that ends only by its length."""
    prompt = tuple(1 + (seed * 31 + i * 7) % (VOCAB - 1) for i in range(5 + seed))
    return GenerationRequest(prompt, params, max_tokens, stop_ids=frozenset(), ignore_eos=True)


def drafter(agreement: float = 0.7, on_step: Callable[[Sequence[int]], None] | None = None) -> ModelDrafter:
    """A draft that agrees with the target this often."""
    return ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, agreement=agreement, on_step=on_step))


def is_at_rest(server: FakeServer) -> bool:
    """Nothing runs or waits, and every block is free except those of parked prefixes (of /v1/verify)."""
    stats = server.core.engine.stats()
    return len(server.core.sessions) == stats.running == stats.queued == 0 and (
        stats.parked > 0 or stats.free_blocks == stats.num_blocks
    )


def run(scenario: Coroutine[Any, Any, GenerationResult]) -> GenerationResult:
    """Runs on its own event loop, with a limit that only a hang reaches."""
    return asyncio.run(asyncio.wait_for(scenario, 60.0))


async def no_pause(_: float) -> None:
    """Retries without pause."""


async def generate(
    urls: Sequence[str],
    request: GenerationRequest,
    draft: Drafter | None,
    *,
    depth: DepthController | None = None,
    mode: Mode = Mode.STREAM,
    estimates: Estimates | None = None,
    wrap: Callable[[VerifierClient], Posts] | None = None,
    on_tokens: Callable[[TokenBatch], None] | None = None,
    retry: RetryPolicy | None = None,
    options: ClientOptions | None = None,
    width: int = 4,
) -> GenerationResult:
    """One text from the first URL that works. width: of the tree."""
    estimates = estimates or Estimates()
    depth = depth or CostModelDepth(estimates)
    clients = [VerifierClient(url, options) for url in urls]
    endpoints = Endpoints(clients, retry, sleep=no_pause)
    try:
        if mode is Mode.STOP_AND_WAIT:
            return await StopAndWaitAgent(endpoints, draft, depth, estimates).generate(request, on_tokens)
        tree = AgentOptions(tree=TreeLimits(width=width))
        agent = StreamAgent(endpoints, draft, depth, estimates, tree, wrap_posts=wrap)
        return await agent.generate(request, on_tokens)
    finally:
        for client in clients:
            await client.aclose()


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """One verifier for the tests that only read from it."""
    with serve_fake() as running:
        yield running


@pytest.mark.parametrize("params", SETTINGS, ids=["greedy", "sampled", "truncated"])
@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.STOP_AND_WAIT])
@pytest.mark.parametrize("agreement", [0.7, 1.0, None, "wrong"])
def test_the_text_is_the_targets_whatever_the_draft(
    server: FakeServer, params: SamplingParams, mode: Mode, agreement: float | str | None
) -> None:
    """Good, perfect, absent and always-wrong drafts give the same tokens in both modes."""
    request = asking(params=params)
    draft: Drafter | None = drafter(agreement) if isinstance(agreement, float) else None
    if agreement == "wrong":
        draft = AlwaysWrongDrafter(drafter(1.0), VOCAB)
    result = run(generate([server.url], request, draft, mode=mode))
    assert result.tokens == truth(request)
    assert result.finish_reason == "length" and result.draft_error is None
    server.wait_until(lambda: is_at_rest(server))


@pytest.mark.parametrize("depth", [FixedDepth(0), FixedDepth(1), FixedDepth(8), FixedDepth(64), ThresholdDepth()])
def test_the_text_does_not_depend_on_the_depth(server: FakeServer, depth: DepthController) -> None:
    """Nor on the controller; depth 0 sends nothing."""
    request = asking(seed=1)
    result = run(generate([server.url], request, drafter(0.8), depth=depth))
    assert result.tokens == truth(request)
    if depth.plan().depth == 0:
        assert result.num_posts == result.num_drafted == 0


def test_stream_and_its_plain_twin_agree(server: FakeServer) -> None:
    """Token by token, over several prompts on one agent each, whose estimates and draft cache carry over."""

    async def both() -> list[tuple[GenerationResult, GenerationResult]]:
        async with VerifierClient(server.url) as client:
            endpoints, estimates = Endpoints([client]), Estimates()
            stream = StreamAgent(endpoints, drafter(), CostModelDepth(estimates), estimates)
            plain = StopAndWaitAgent(endpoints, drafter(), FixedDepth(4), Estimates())
            return [(await stream.generate(asking(i)), await plain.generate(asking(i))) for i in range(4)]

    for i, (stream, plain) in enumerate(asyncio.run(both())):
        assert stream.tokens == plain.tokens == truth(asking(i))


class Pacing:
    """Passes drafts on to faulty posts, and lets the server run one step per attempted message."""

    def __init__(self, rates: FaultRates, longest_s: float = 0.05) -> None:
        self.tried = threading.Event()
        self._longest_s = longest_s
        self._rates = rates
        self.failed: list[OutriderError] = []

    def wrap(self, client: VerifierClient) -> Posts:
        faulty = FaultyPosts(client, self._rates, seed=5)
        tried, failed = self.tried, self.failed

        class Paced:
            async def post_drafts(self, session: str, message: DraftMessage) -> None:
                tried.set()
                try:
                    await faulty.post_drafts(session, message)
                except OutriderError as e:
                    if "unknown_session" not in str(e):  # else the text has ended meanwhile
                        failed.append(e)
                    raise

        return Paced()

    def step(self, _: object) -> None:
        self.tried.wait(self._longest_s)  # the last steps have no draft
        self.tried.clear()


RATES = {
    "no fault": FaultRates(),
    "dropped": FaultRates(drop=0.5),
    "all dropped": FaultRates(drop=1.0),
    "doubled": FaultRates(duplicate=0.5),
    "doubled and late": FaultRates(duplicate=0.5, delay=0.5, max_delay_s=0.01),
    "everything": FaultRates(0.3, 0.3, 0.5, 0.01),
}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_lost_doubled_late_and_reordered_drafts_change_nothing(rates: str, width: int) -> None:
    """Drafts are only hints, of a path and of a tree."""
    request, pacing = asking(seed=2, max_tokens=40), Pacing(RATES[rates])
    with serve_fake(runtime=FakeBatchRuntime(vocab_size=VOCAB, on_step=pacing.step)) as server:
        result = run(generate([server.url], request, drafter(0.8), depth=FixedDepth(4), wrap=pacing.wrap, width=width))
    assert result.tokens == truth(request)
    assert result.num_posts > 4 and result.num_sent > 4
    assert bool(pacing.failed) == (RATES[rates].drop > 0.0) and len(pacing.failed) <= result.num_failed_posts
    assert result.num_failed_posts < result.num_posts or rates == "all dropped"
    assert sum(result.hits.values()) > 0


@pytest.mark.parametrize("depth", ["auto", "threshold", "6"])
@pytest.mark.parametrize("kind", ["model", "n-gram", "mixed", "wrong", "wrong lookup"])
def test_the_text_is_the_targets_whatever_the_tree_is_made_of(kind: str, depth: str) -> None:
    """Four guesses of each token, from a model, from the text before, from both, and all of them wrong."""
    request = replace(asking(seed=1, max_tokens=40), prompt=(5, 6, 7) * 4)
    pacing = Pacing(FaultRates(), 0.05 if kind in ("model", "mixed") else 0.005)  # the others send seldom
    drafts: dict[str, Drafter] = {
        "model": drafter(0.8),
        "n-gram": NgramDrafter(),
        "mixed": drafter(0.8).with_lookup(),
        "wrong": AlwaysWrongDrafter(drafter(1.0), VOCAB),
        "wrong lookup": AlwaysWrongDrafter(drafter(1.0).with_lookup(), VOCAB),
    }
    with serve_fake(runtime=FakeBatchRuntime(vocab_size=VOCAB, on_step=pacing.step)) as server:
        controller = make_depth(depth, estimates := Estimates())
        result = run(
            generate(
                [server.url], request, drafts[kind], depth=controller, estimates=estimates, wrap=pacing.wrap, width=4
            )
        )
    assert result.tokens == truth(request) and result.draft_error is None
    if kind.startswith("wrong"):
        assert sum(result.hits.values()) <= 2  # the target seldom picks none of the draft's eight best
    elif kind in ("model", "mixed"):
        assert sum(result.hits.values()) > 10


class Spying:
    """Passes drafts on, keeps them, and loses the first ones."""

    def __init__(self, num_lost: int = 0) -> None:
        self.trees: list[TreeDraft] = []
        self.paths: list[DraftRequest] = []
        self._num_lost = num_lost

    def wrap(self, client: VerifierClient) -> Posts:
        spy = self

        class Spied:
            async def post_drafts(self, session: str, message: DraftMessage) -> None:
                if message.media_type == TREE_MEDIA_TYPE:
                    spy.trees.append(decode_tree(message.body))
                else:
                    spy.paths.append(DraftRequest.model_validate_json(message.body))
                if spy._num_lost > 0:
                    spy._num_lost -= 1
                    raise EndpointLost("the first messages are lost")
                await client.post_drafts(session, message)

        return Spied()


def test_the_text_goes_on_after_a_lost_message() -> None:
    """Later messages reach the target, which accepts what they carry."""
    spy, pacing, request = Spying(num_lost=1), Pacing(FaultRates()), asking(seed=3, max_tokens=40)
    with serve_fake(runtime=FakeBatchRuntime(vocab_size=VOCAB, on_step=pacing.step), config=SURE) as server:
        result = run(
            generate(
                [server.url],
                request,
                drafter(1.0),
                depth=FixedDepth(8),
                wrap=lambda client: Both(pacing.tried, spy.wrap(client)),
                width=2,
            )
        )
    assert result.tokens == truth(request)
    assert result.num_failed_posts >= 1 and result.num_accepted > 5
    for draft, after in pairwise(spy.trees):
        assert after.first == draft.first + len(draft.tokens)


class Both:
    """Says that a message was tried, and passes it on."""

    def __init__(self, tried: threading.Event, posts: Posts) -> None:
        self._tried, self._posts = tried, posts

    async def post_drafts(self, session: str, message: DraftMessage) -> None:
        self._tried.set()
        await self._posts.post_drafts(session, message)


def test_a_server_that_refuses_drafts_is_not_asked_again_and_again() -> None:
    """What was refused goes out with the next message, and not in a loop of its own."""

    class Refusing:
        async def post_drafts(self, session: str, message: DraftMessage) -> None:
            raise RequestError("draft_budget", "too many drafts", status=429)

    request = asking(seed=3, max_tokens=30)
    with serve_fake(runtime=FakeBatchRuntime(vocab_size=VOCAB, on_step=lambda _: time.sleep(0.003))) as server:
        result = run(generate([server.url], request, drafter(0.8), depth=FixedDepth(4), wrap=lambda client: Refusing()))
    assert result.tokens == truth(request) and result.num_accepted == 0
    # At most one after each commit, when a run of the draft ends, and when guesses waited long in it.
    assert 0 < result.num_failed_posts == result.num_posts <= 8 * result.num_passes


@pytest.mark.parametrize("width", [1, 4])
def test_a_new_agent_sends_paths_to_an_old_server(width: int) -> None:
    """One whose `open` says protocol 1; and a server of today accepts the old form."""
    spy = Spying()
    request = asking(seed=4, max_tokens=40)
    drafted = threading.Event()

    def wait_for_draft(_: object) -> None:
        drafted.wait(0.05)
        drafted.clear()

    class Old(VerifierClient):
        """Reads what an old server would say."""

        async def _events(self, *arguments: Any) -> Any:
            async for event in super()._events(*arguments):
                is_open = isinstance(event, SessionOpen)
                yield event.model_copy(update={"protocol": 1}) if is_open else event

    with serve_fake(runtime=FakeBatchRuntime(vocab_size=VOCAB, on_step=wait_for_draft), config=SURE) as server:

        async def scenario() -> GenerationResult:
            async with Old(server.url) as client:
                tree = AgentOptions(tree=TreeLimits(width=width))
                draft = drafter(0.9, lambda _: drafted.set())
                agent = StreamAgent(Endpoints([client]), draft, FixedDepth(6), options=tree, wrap_posts=spy.wrap)
                return await agent.generate(request)

        result = run(scenario())
    assert result.tokens == truth(request) and result.num_failed_posts <= 2  # which came after the text's end
    assert not spy.trees and len(spy.paths) > 4
    assert all(len(path.paths) == 1 and 0 < len(path.paths[0]) <= 6 for path in spy.paths)
    texts = [[*result.tokens[: path.base], *path.paths[0]] for path in spy.paths]
    # A new alternative is no new path.
    assert not [text for before, text in pairwise(texts) if before[: len(text)] == text]
    assert result.num_accepted > 5


def test_accepted_tokens_are_told_from_the_targets_own() -> None:
    """With a perfect draft that is always in time most tokens are the draft's; the counts add up."""
    drafted = threading.Event()

    def wait_for_draft(_: object) -> None:
        drafted.wait(0.05)  # gives the draft a chance; the assertions below do not depend on it
        drafted.clear()

    seen: list[TokenBatch] = []
    runtime = FakeBatchRuntime(vocab_size=VOCAB, on_step=wait_for_draft)
    # The server's own guesses, where the device has sent nothing, may be wrong.
    with serve_fake(runtime=runtime, config=SURE) as server:
        request = asking(seed=3)
        result = run(
            generate(
                [server.url], request, drafter(1.0, lambda _: drafted.set()), depth=FixedDepth(8), on_tokens=seen.append
            )
        )
    assert result.tokens == truth(request) == tuple(token for batch in seen for token in batch.tokens)
    assert result.sources.count(Source.DRAFT) == result.num_accepted == sum(batch.num_accepted for batch in seen) > 0
    assert result.acceptance_rate == 1.0
    assert result.num_passes == len(seen) < len(result.tokens)
    assert list(result.arrival_s) == sorted(result.arrival_s)


def test_a_stop_token_ends_the_text(server: FakeServer) -> None:
    """As soon as the target commits it, in both modes."""
    request = replace(asking(seed=4), max_tokens=200)
    stop = truth(request)[20]
    request = replace(request, stop_ids=frozenset({stop}))
    for mode in (Mode.STREAM, Mode.STOP_AND_WAIT):
        result = run(generate([server.url], request, drafter(0.9), mode=mode))
        assert result.tokens == truth(request) and result.finish_reason == "stop"
        assert len(result.tokens) <= 21


def test_the_models_own_end_is_left_to_the_server(server: FakeServer) -> None:
    """stop_ids None: the text ends at the model's end token, which the agent does not have to know."""
    params = SamplingParams(1.5, seed=3)
    request = GenerationRequest((5, 6), params, 2000)
    result = run(generate([server.url], request, drafter(0.9)))
    assert result.finish_reason == "stop" and result.tokens[-1] == EOS_ID
    assert result.tokens == truth(replace(request, stop_ids=frozenset({EOS_ID})))


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.STOP_AND_WAIT])
def test_a_cut_session_goes_on_as_if_nothing_had_happened(mode: Mode) -> None:
    """Connections are cut while they open, and in the middle of lines; each time the text goes on."""
    request = asking(seed=5, max_tokens=60)
    with serve_fake() as server, FaultyProxy(*_address(server.url)) as proxy:
        mark = b"data: " if mode is Mode.STREAM else b"tokens"
        proxy.cut_after(mark, *range(1, 9))
        result = run(generate([proxy.url], request, drafter(), mode=mode))
        server.wait_until(lambda: is_at_rest(server))
        assert proxy.num_cuts > 1 and (mode is not Mode.STREAM or result.num_sessions > 2)
    assert result.tokens == truth(request)


def test_chunks_that_cut_their_connection_at_random_change_nothing() -> None:
    """Four in ten of the server's chunks are lost with their connection."""
    request = asking(seed=6)
    # Steps that take time: without it a fast machine sends the whole text in a chunk or two, and none of these is lost.
    with serve_fake(runtime=FakeBatchRuntime(vocab_size=VOCAB, on_step=lambda _: time.sleep(0.003))) as server:
        with FaultyProxy(*_address(server.url), ProxyOptions(cut_chance=0.4, seed=1)) as proxy:
            result = run(generate([proxy.url], request, drafter(), retry=RetryPolicy(max_failures=500)))
        assert result.tokens == truth(request) and result.num_sessions > 1
        server.wait_until(lambda: is_at_rest(server))


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.STOP_AND_WAIT])
def test_the_next_endpoint_takes_over_when_the_first_is_gone(mode: Mode) -> None:
    """The first server stops in the middle; the second continues from the committed tokens."""
    request = asking(seed=7)
    with serve_fake() as second, ExitStack() as first:
        server = first.enter_context(serve_fake())
        proxy = first.enter_context(FaultyProxy(*_address(server.url)))
        num_seen = 0

        def stop_the_first(batch: TokenBatch) -> None:
            nonlocal num_seen
            num_seen += len(batch.tokens)
            if num_seen >= 15:
                first.close()

        result = run(generate([proxy.url, second.url], request, drafter(), mode=mode, on_tokens=stop_the_first))
    assert result.tokens == truth(request)


def test_without_an_endpoint_the_error_names_what_was_tried() -> None:
    """Bounded retries, then one CloudError."""
    with serve_fake() as server:
        url = server.url
    with pytest.raises(CloudError, match=r"No verifier answers at .* Gave up after 4 attempts.*Connect"):
        run(generate([url], asking(), drafter(), retry=RetryPolicy(max_failures=4, max_loading_s=0.0)))


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.STOP_AND_WAIT])
def test_what_the_server_refuses_is_not_tried_again(server: FakeServer, mode: Mode) -> None:
    """The errors for a token id outside the vocabulary and a foreign tokenizer keep the server's message."""
    with pytest.raises(RequestError, match="token id") as refused:
        run(generate([server.url], replace(asking(), prompt=(VOCAB,)), None, mode=mode))
    assert refused.value.code == "token_out_of_range"
    with pytest.raises(TokenizerMismatch, match="Use a draft made for this target"):
        run(generate([server.url], replace(asking(), tokenizer="f" * 64), None, mode=mode))
    server.wait_until(lambda: is_at_rest(server))


def test_a_key_opens_the_server() -> None:
    """Every message carries the key; without it the server refuses."""
    settings = ServerSettings(keys=KeyRing(["a-long-enough-secret-key"]))
    request = asking(seed=8)
    with serve_fake(settings) as server:
        result = run(
            generate([server.url], request, drafter(), options=ClientOptions(api_key="a-long-enough-secret-key"))
        )
        assert result.tokens == truth(request)
        with pytest.raises(RequestError) as refused:
            run(generate([server.url], request, drafter()))
        assert refused.value.status == 401
        assert str(refused.value) == f"The verifier at {server.url} requires an API key: set OUTRIDER_API_KEY."
        with pytest.raises(RequestError, match=r"does not accept this API key: correct OUTRIDER_API_KEY\.$"):
            run(generate([server.url], request, None, options=ClientOptions(api_key="another-long-secret-key")))


class FailingDrafter(WrappedDrafter):
    """Guesses a few times and then raises."""

    def __init__(self, inner: ModelDrafter, num_good: int) -> None:
        super().__init__(inner)
        self._num_good = num_good

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        self._num_good -= 1
        if self._num_good < 0:
            raise ModelFault("the draft's logits are not finite")
        return self._inner.guess(branches, width)


@pytest.mark.parametrize("num_good", [0, 20])
@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.STOP_AND_WAIT])
def test_a_draft_that_breaks_costs_only_the_draft(caplog: pytest.LogCaptureFixture, mode: Mode, num_good: int) -> None:
    """The text continues without it, a warning is logged and the result has the reason."""
    request = asking(seed=9)
    draft = FailingDrafter(drafter(), num_good)
    # Steps of 10 ms: else the text may be over before the draft has made that many calls.
    slow = FakeBatchRuntime(vocab_size=VOCAB, on_step=lambda batch: time.sleep(0.01))
    with serve_fake(runtime=slow) as server:
        result = run(generate([server.url], request, draft, depth=FixedDepth(8), mode=mode))
    assert result.tokens == truth(request)
    assert result.draft_error == "ModelFault: the draft's logits are not finite"
    assert caplog.text.count("drafting failed") == 1


def test_a_draft_at_its_longest_sequence_leaves_the_rest_to_the_target(server: FakeServer) -> None:
    """A draft model with fewer positions than the target stops proposing; no busy loop, no failure."""
    request = asking(seed=10)
    short = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, max_positions=30))
    result = run(generate([server.url], request, short))
    assert result.tokens == truth(request) and result.draft_error is None


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.STOP_AND_WAIT])
@pytest.mark.parametrize(("draft_size", "target_size"), [(VOCAB, VOCAB + 64), (VOCAB + 64, VOCAB)])
def test_a_pair_that_is_padded_differently_gives_the_targets_text(
    draft_size: int, target_size: int, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft pauses after an id beyond its table, and never sends one beyond the target's."""
    request = asking(seed=12)
    draft = ModelDrafter(FakeSequenceRuntime(vocab_size=draft_size), VOCAB)
    with serve_fake(runtime=FakeBatchRuntime(vocab_size=target_size)) as wide:
        result = run(generate([wide.url], request, draft, mode=mode, depth=FixedDepth(4)))
    expected = truth(request, target_size)
    assert result.tokens == expected and result.draft_error is None and not caplog.records
    assert (max(expected) >= draft_size) == (target_size > draft_size)


def test_a_cancelled_generation_frees_the_server() -> None:
    """Cancelling the task closes the stream, and frees the sequence and its blocks."""
    with serve_fake() as server:

        async def scenario() -> None:
            async with VerifierClient(server.url) as client:
                agent, seen = StreamAgent(Endpoints([client]), drafter(), FixedDepth(4)), asyncio.Event()
                task = asyncio.create_task(agent.generate(asking(max_tokens=3000), lambda _: seen.set()))
                await seen.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        asyncio.run(asyncio.wait_for(scenario(), 60.0))
        server.wait_until(lambda: is_at_rest(server))
        server.wait_until(
            lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("outrider-draft")]
        )


@pytest.mark.parametrize("mode", [Mode.CLOUD_ONLY, Mode.STOP_AND_WAIT])
def test_bytes_are_counted_as_they_cross(server: FakeServer, mode: Mode) -> None:
    """Bodies and headers add up to the bytes at a counting proxy, except for the framing of chunks.

    Not in stream mode, whose last drafts may still be in flight when the text ends.
    """
    with FaultyProxy(*_address(server.url)) as proxy:
        draft = drafter() if mode is Mode.STOP_AND_WAIT else None
        result = run(generate([proxy.url], asking(seed=11), draft, mode=mode))
        wire = result.wire
        assert proxy.bytes_up == wire.body_up + wire.headers_up
        framing = proxy.bytes_down - wire.body_down - wire.headers_down
        assert 0 <= framing <= 10 * (result.num_passes + 3)


def _address(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    assert parsed.port is not None
    return parsed.host, parsed.port
