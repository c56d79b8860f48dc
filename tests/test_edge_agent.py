"""Tests the invariant: whatever the draft, the network or the failures, the agent's tokens are the target's own.

A real verifier on a loopback port speaks the fake language; the truth is that language, token by token.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
from tests.agents import (
    MODES,
    SAMPLED,
    SURE,
    VOCAB,
    Older,
    Pacing,
    Passing,
    Posting,
    Spying,
    asking,
    drafter,
    generate,
    is_at_rest,
    proxy_to,
    slow,
    truth,
)
from tests.always_wrong import AlwaysWrongDrafter, WrappedDrafter
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.faulty_posts import FaultRates
from tests.faulty_proxy import ProxyOptions
from tests.serving import EOS_ID, FakeServer, serve_fake
from tests.waiting import HANG_S, run

from outrider.cloud.api.state import ServerSettings
from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import RetryPolicy
from outrider.edge.modes.assemble import make_depth
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, Source, TokenBatch
from outrider.models.client import long_request
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import ModelFault, RequestError, TokenizerMismatch
from outrider.models.http.security import KeyRing
from outrider.models.picks.sampling import SamplingParams


def exact(
    clouds: Sequence[str | VerifierClient], request: GenerationRequest, *given: Any, **more: Any
) -> GenerationResult:
    """Generates the text, which is the target's."""
    result = run(generate(clouds, request, *given, **more))
    assert result.tokens == truth(request)
    return result


SETTINGS = [SamplingParams(), SAMPLED, SamplingParams(0.8, top_p=0.9, top_k=40, seed=12)]


@pytest.mark.parametrize("params", SETTINGS, ids=["greedy", "sampled", "truncated"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("agreement", [0.7, 1.0, None, "wrong"])
def test_the_text_is_the_targets_whatever_the_draft(
    server: FakeServer, params: SamplingParams, mode: Mode, agreement: float | str | None
) -> None:
    """Good, perfect, absent and always-wrong drafts give the same tokens in both modes."""
    draft: Drafter | None = drafter(agreement) if isinstance(agreement, float) else None
    if agreement == "wrong":
        draft = AlwaysWrongDrafter(drafter(1.0), VOCAB)
    result = exact([server.url], asking(params=params), draft, mode=mode)
    assert result.finish_reason == "length" and result.draft_error is None
    server.wait_until(lambda: is_at_rest(server))


@pytest.mark.parametrize("depth", [0, 1, 8, 64])
def test_the_text_does_not_depend_on_the_depth(server: FakeServer, depth: int) -> None:
    """Depth 0 sends nothing."""
    result = exact([server.url], asking(seed=1), drafter(0.8), depth=FixedDepth(depth))
    assert depth or result.num_posts == result.num_drafted == 0


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
def test_lost_doubled_late_and_reordered_drafts_change_nothing(
    monkeypatch: pytest.MonkeyPatch, rates: str, width: int
) -> None:
    """Drafts are only hints, of a path and of a tree."""
    # On a busy machine an acknowledgement may take longer than the device waits: that fault is none of the rates'.
    monkeypatch.setattr(long_request, "LEAST_WAIT_S", HANG_S)
    request, pacing = asking(seed=2, max_tokens=40), Pacing(RATES[rates], num_sure=8)
    with serve_fake(runtime=pacing.runtime()) as server:
        result = exact([server.url], request, drafter(0.8), depth=FixedDepth(4), wrap=pacing.wrap, width=width)
    assert result.num_posts > 4 and result.num_sent > 4 and sum(result.hits.values()) > 0
    assert bool(pacing.failed) == (RATES[rates].drop > 0.0) and len(pacing.failed) <= result.num_failed_posts
    assert result.num_failed_posts < result.num_posts or rates == "all dropped"


@pytest.mark.parametrize("depth", ["auto", "6"])
@pytest.mark.parametrize("kind", ["model", "n-gram", "mixed", "wrong", "wrong lookup"])
def test_the_text_is_the_targets_whatever_the_tree_is_made_of(kind: str, depth: str) -> None:
    """Four guesses of each token, from a model, from the text before, from both, and all of them wrong."""
    request = replace(asking(seed=1, max_tokens=40), prompt=(5, 6, 7) * 4)
    pacing = Pacing(None, 0.05 if kind in ("model", "mixed") else 0.005)  # the others send seldom
    drafts: dict[str, Drafter] = {
        "model": drafter(0.8),
        "n-gram": NgramDrafter(),
        "mixed": drafter(0.8).with_lookup(),
        "wrong": AlwaysWrongDrafter(drafter(1.0), VOCAB),
        "wrong lookup": AlwaysWrongDrafter(drafter(1.0).with_lookup(), VOCAB),
    }
    # The target seldom picks none of the draft's eight best.
    least, most = {"model": (11, 40), "mixed": (11, 40), "n-gram": (0, 40)}.get(kind, (0, 2))
    with serve_fake(runtime=pacing.runtime()) as server:
        controller = make_depth(depth, estimates := Estimates())
        result = exact(
            [server.url], request, drafts[kind], depth=controller, estimates=estimates, wrap=pacing.wrap, width=4
        )
    assert result.draft_error is None and least <= sum(result.hits.values()) <= most


def test_the_text_goes_on_after_a_lost_message() -> None:
    """Later messages reach the target, which accepts what they carry."""
    pacing, request = Pacing(), asking(seed=3, max_tokens=40)
    spy = Spying(1, pacing.tried.set)
    with serve_fake(runtime=pacing.runtime(), config=SURE) as server:
        result = exact([server.url], request, drafter(1.0), depth=FixedDepth(8), wrap=spy.wrap, width=2)
    assert result.num_failed_posts >= 1 and result.num_accepted > 5
    assert all(after.first == draft.first + len(draft.tokens) for draft, after in pairwise(spy.trees))


def test_a_server_that_refuses_drafts_is_not_asked_again_and_again() -> None:
    """What was refused goes out with the next message, and not in a loop of its own."""

    async def refuse(session: str, message: DraftMessage) -> None:
        raise RequestError("draft_budget", "too many drafts", status=429)

    request = asking(seed=3, max_tokens=30)
    with serve_fake(runtime=slow(0.003)) as server:
        result = exact([server.url], request, drafter(0.8), depth=FixedDepth(4), wrap=lambda client: Posting(refuse))
    # At most one after each commit, when a run of the draft ends, and when guesses waited long in it.
    assert result.num_accepted == 0 < result.num_failed_posts == result.num_posts <= 8 * result.num_passes


@pytest.mark.parametrize("width", [1, 4])
def test_a_new_agent_sends_paths_to_an_old_server(width: int) -> None:
    """One whose `open` says protocol 1; and a server of today accepts the old form."""
    spy, pacing, request = Spying(), Pacing(), asking(seed=4, max_tokens=40)
    with serve_fake(runtime=pacing.runtime(), config=SURE) as server:
        draft = drafter(0.9, lambda _: pacing.tried.set())
        result = exact([Older(server.url)], request, draft, depth=FixedDepth(6), wrap=spy.wrap, width=width)
    assert result.num_failed_posts <= 2 and result.num_accepted > 5  # those came after the text's end
    assert not spy.trees and len(spy.paths) > 4
    assert all(len(path.paths) == 1 and 0 < len(path.paths[0]) <= 6 for path in spy.paths)
    texts = [[*result.tokens[: path.base], *path.paths[0]] for path in spy.paths]
    # A new alternative is no new path.
    assert not [text for before, text in pairwise(texts) if before[: len(text)] == text]


@pytest.mark.parametrize("kind", [VerifierClient, Older])
def test_a_draft_that_an_older_server_calls_stale_is_no_error(kind: type[VerifierClient]) -> None:
    """Newer commits are on their way: the text goes on, and the draft counts as delivered."""
    wishes: list[str | None] = []

    def stale(request: httpx.Request) -> httpx.Response | None:
        if not request.url.path.endswith("/drafts"):
            return None
        wishes.append(request.headers.get("prefer"))
        return httpx.Response(409)

    request = asking(seed=3, max_tokens=30)
    with serve_fake(runtime=slow(0.003)) as server:
        # With two connections: no long request.
        client = kind(server.url, ClientOptions(max_connections=2), transport=Passing(stale))
        result = exact([client], request, drafter(0.8), depth=FixedDepth(4))
    assert result.num_failed_posts == 0 < result.num_posts and set(wishes) == {"return=minimal"}  # no words


def test_accepted_tokens_are_told_from_the_targets_own() -> None:
    """With a perfect draft that is always in time most tokens are the draft's; the counts add up."""
    pacing, request, seen = Pacing(), asking(seed=3), list[TokenBatch]()
    draft = drafter(1.0, lambda _: pacing.tried.set())
    # The server's own guesses, where the device has sent nothing, may be wrong.
    with serve_fake(runtime=pacing.runtime(), config=SURE) as server:
        result = exact([server.url], request, draft, depth=FixedDepth(8), on_tokens=seen.append)
    assert result.tokens == tuple(token for batch in seen for token in batch.tokens)
    assert result.sources.count(Source.DRAFT) == result.num_accepted == sum(batch.num_accepted for batch in seen) > 0
    assert result.acceptance_rate == 1.0 and result.num_passes == len(seen) < len(result.tokens)
    assert list(result.arrival_s) == sorted(result.arrival_s)


def test_a_stop_token_ends_the_text(server: FakeServer) -> None:
    """As soon as the target commits it, in both modes."""
    request = asking(seed=4, max_tokens=200)
    request = replace(request, stop_ids=frozenset({truth(request)[20]}))
    for mode in MODES:
        result = exact([server.url], request, drafter(0.9), mode=mode)
        assert result.finish_reason == "stop" and len(result.tokens) <= 21


def test_the_models_own_end_is_left_to_the_server(server: FakeServer) -> None:
    """stop_ids None: the text ends at the model's end token, which the agent does not have to know."""
    request = GenerationRequest((5, 6), SamplingParams(1.5, seed=3), 2000)
    result = run(generate([server.url], request, drafter(0.9)))
    assert result.finish_reason == "stop" and result.tokens[-1] == EOS_ID
    assert result.tokens == truth(replace(request, stop_ids=frozenset({EOS_ID})))


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_session_goes_on_as_if_nothing_had_happened(server: FakeServer, mode: Mode) -> None:
    """Connections are cut while they open, and in the middle of lines; each time the text goes on."""
    with proxy_to(server.url) as proxy:
        proxy.cut_after(b"data: " if mode is Mode.STREAM else b"tokens", *range(1, 9))
        result = exact([proxy.url], asking(seed=5, max_tokens=60), drafter(), mode=mode)
        server.wait_until(lambda: is_at_rest(server))
        assert proxy.num_cuts > 1 and (mode is not Mode.STREAM or result.num_sessions > 2)


def test_chunks_that_cut_their_connection_at_random_change_nothing() -> None:
    """Four in ten of the server's chunks are lost with their connection."""
    # Steps that take time: without it a fast machine sends the whole text in a chunk or two, and none of these is lost.
    with serve_fake(runtime=slow(0.003)) as server:
        with proxy_to(server.url, ProxyOptions(cut_chance=0.4, seed=1)) as proxy:
            result = exact([proxy.url], asking(seed=6), drafter(), retry=RetryPolicy(max_failures=500))
        assert result.num_sessions > 1
        server.wait_until(lambda: is_at_rest(server))


@pytest.mark.parametrize("mode", MODES)
def test_the_next_endpoint_takes_over_when_the_first_is_gone(mode: Mode) -> None:
    """The first server stops in the middle; the second continues from the committed tokens."""
    seen = list[int]()
    with serve_fake() as second, ExitStack() as first:
        server = first.enter_context(serve_fake())
        proxy = first.enter_context(proxy_to(server.url))

        def stop_the_first(batch: TokenBatch) -> None:
            seen.extend(batch.tokens)
            if len(seen) >= 15:
                first.close()

        exact([proxy.url, second.url], asking(seed=7), drafter(), mode=mode, on_tokens=stop_the_first)


@pytest.mark.parametrize("mode", MODES)
def test_what_the_server_refuses_is_not_tried_again(server: FakeServer, mode: Mode) -> None:
    """The errors for a token id outside the vocabulary and a foreign tokenizer keep the server's message."""
    with pytest.raises(RequestError, match="token id", check=lambda error: error.code == "token_out_of_range"):
        run(generate([server.url], replace(asking(), prompt=(VOCAB,)), None, mode=mode))
    with pytest.raises(TokenizerMismatch, match="Use a draft made for this target"):
        run(generate([server.url], replace(asking(), tokenizer="f" * 64), None, mode=mode))
    server.wait_until(lambda: is_at_rest(server))


def test_a_key_opens_the_server() -> None:
    """Every message carries the key; without it the server refuses."""
    key, request = "a-long-enough-secret-key", asking(seed=8)
    with serve_fake(ServerSettings(keys=KeyRing([key]))) as server:
        exact([server.url], request, drafter(), options=ClientOptions(api_key=key))
        for other, words in (
            (None, r"^The verifier at \S+ requires an API key: set OUTRIDER_API_KEY\.$"),
            ("another-long-secret-key", r"does not accept this API key: correct OUTRIDER_API_KEY\.$"),
        ):
            with pytest.raises(RequestError, match=words, check=lambda error: error.status == 401):
                run(generate([server.url], request, drafter(), options=ClientOptions(api_key=other)))


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
@pytest.mark.parametrize("mode", MODES)
def test_a_draft_that_breaks_costs_only_the_draft(caplog: pytest.LogCaptureFixture, mode: Mode, num_good: int) -> None:
    """The text continues without it, a warning is logged and the result has the reason."""
    # Steps of 10 ms: else the text may be over before the draft has made that many calls.
    with serve_fake(runtime=slow(0.01)) as server:
        draft = FailingDrafter(drafter(), num_good)
        result = exact([server.url], asking(seed=9), draft, depth=FixedDepth(8), mode=mode)
    assert result.draft_error == "ModelFault: the draft's logits are not finite"
    assert caplog.text.count("drafting failed") == 1


@pytest.mark.parametrize("mode", MODES)
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


async def test_a_cancelled_generation_frees_the_server(server: FakeServer) -> None:
    """Cancelling the task closes the stream, and frees the sequence and its blocks."""
    seen, request = asyncio.Event(), asking(max_tokens=3000)
    text = generate([server.url], request, drafter(), depth=FixedDepth(4), on_tokens=lambda _: seen.set())
    task = asyncio.create_task(text)
    await seen.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.wait_until(lambda: is_at_rest(server))
    server.wait_until(lambda: not any(each.name.startswith("outrider-draft") for each in threading.enumerate()))


@pytest.mark.parametrize("mode", [Mode.CLOUD_ONLY, Mode.STOP_AND_WAIT])
def test_bytes_are_counted_as_they_cross(server: FakeServer, mode: Mode) -> None:
    """Bodies and headers add up to the bytes at a counting proxy, except for the framing of chunks.

    Not in stream mode, whose last drafts may still be in flight when the text ends.
    """
    with proxy_to(server.url) as proxy:
        draft = drafter() if mode is Mode.STOP_AND_WAIT else None
        result = exact([proxy.url], asking(seed=11), draft, mode=mode)
        wire = result.wire
        assert proxy.bytes_up == wire.body_up + wire.headers_up
        assert 0 <= proxy.bytes_down - wire.body_down - wire.headers_down <= 10 * (result.num_passes + 3)
