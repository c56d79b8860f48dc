"""A device before a cascade: it drafts after provisional tokens, and shows confirmed ones only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager

import httpx
import pytest
from tests.agents import asking, truth
from tests.cascades import VOCAB, Cascade, cascade
from tests.fake_runtime import FakeSequenceRuntime
from tests.local_endpoint import serve_local
from tests.serving import FakeServer
from tests.test_edge_agent import SETTINGS

from outrider.edge.drafting.depth import CostModelDepth
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.tree import GuessTree
from outrider.edge.drafting.worker import TreeLimits
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stream import AgentOptions, StreamAgent
from outrider.edge.results import GenerationResult, TokenBatch
from outrider.models.client.checks import SessionCheck
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import ProtocolBroken
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.protocol import Commit, SessionEvent, SessionOpen, SessionRequest


async def generate(url: str, params: list[SamplingParams], width: int) -> list[tuple[GenerationResult, list[int]]]:
    """Texts of one agent, each with the tokens that it showed."""
    estimates = Estimates()
    draft = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, agreement=0.7))
    found = []
    async with VerifierClient(url) as client:
        options = AgentOptions(tree=TreeLimits(width=width))
        agent = StreamAgent(Endpoints([client]), draft, CostModelDepth(estimates), estimates, options)
        for each in params:
            shown: list[int] = []

            def show(batch: TokenBatch, shown: list[int] = shown) -> None:
                shown.extend(batch.tokens)

            found.append((await agent.generate(asking(params=each), show), shown))
            assert agent.with_mid == {url}
    return found


@pytest.mark.parametrize("width", [1, 4])
def test_the_text_is_the_targets_and_only_confirmed_tokens_are_shown(width: int) -> None:
    """The first text learns that the server is a cascade, the next ones ask for provisional tokens."""
    with cascade(0.8) as running:
        for params, (result, shown) in zip(
            SETTINGS, asyncio.run(generate(running.mid.url, SETTINGS, width)), strict=True
        ):
            assert result.tokens == truth(asking(params=params)) == tuple(shown)
            assert result.draft_error is None


@pytest.mark.parametrize("is_cascade", [True, False])
def test_the_first_text_of_an_endpoint_asks_for_provisional_tokens(
    is_cascade: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its texts has an agent of its own, which knows from GET /v1/model what the server is."""
    asked: dict[str, list[bool]] = {}
    open_session = VerifierClient.open_session

    def noted(
        client: VerifierClient, request: SessionRequest, target: str | None = None
    ) -> AbstractAsyncContextManager[AsyncGenerator[SessionEvent, None]]:
        asked.setdefault(client.url, []).append(request.provisional)
        return open_session(client, request, target)

    def endpoint(running: Cascade) -> FakeServer:
        return running.mid if is_cascade else running.big

    monkeypatch.setattr(VerifierClient, "open_session", noted)
    draft = FakeSequenceRuntime(vocab_size=VOCAB)
    with cascade() as running, serve_local(endpoint(running).url, runtime=draft) as local:
        for _ in range(2):
            answer = httpx.post(f"{local.url}/v1/completions", json={"prompt": "ab", "max_tokens": 3}, timeout=30.0)
            assert answer.status_code == 200, answer.text
        assert asked[endpoint(running).url] == [is_cascade] * 2


def test_provisional_tokens_that_nobody_asked_for_break_the_protocol() -> None:
    """So does one that comes before the known text, or none at all."""
    opened = SessionOpen(session="s", model="m", vocab_size=100)
    asked = SessionRequest(prompt=[1], max_tokens=10)
    check = SessionCheck("http://x", asked.model_copy(update={"provisional": True}))
    for event in (opened, Commit(base=0, tokens=[1, 2], provisional=True), Commit(base=0, tokens=[1])):
        check(event)
    check(Commit(base=1, tokens=[2, 3], provisional=True))
    for wrong in (Commit(base=0, tokens=[4], provisional=True), Commit(base=1, tokens=[], provisional=True)):
        with pytest.raises(ProtocolBroken):
            check(wrong)
    with pytest.raises(ProtocolBroken, match="0 to 99"):
        check(Commit(base=2, tokens=[100], provisional=True))
    plain = SessionCheck("http://x", asked)
    plain(opened)
    with pytest.raises(ProtocolBroken, match="only where"):
        plain(Commit(base=0, tokens=[1], provisional=True))


def test_only_the_last_provisional_token_waits_to_be_expanded() -> None:
    """The draft goes on from the provisional text; a commit moves the root along, and drops what it contradicts."""
    tree = GuessTree(lambda cell: 0.5)
    tree.add_trunk([7, 8, 9])
    (tip,) = tree.take_best(4, 0.5, 8)
    assert tip.path() == [7, 8, 9]
    tree.expand(tip, [])
    tree.add_trunk([7, 8, 9, 10])
    (tip,) = tree.take_best(4, 0.5, 8)
    assert tip.path() == [7, 8, 9, 10]
    assert [node.token for node in tree.take_unsent(0.9, 8)] == [7, 8, 9, 10]
    tree.advance(7)
    tree.advance(5)
    tree.replant()
    assert tree.num_nodes == 0 and [node.path() for node in tree.take_best(4, 0.5, 8)] == [[]]
