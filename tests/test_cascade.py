"""A cascade's text is the target's own, whatever the mid-size verifier commits first, and whatever fails.

Two real verifiers on loopback ports speak the fake language; the mid-size verifier agrees with the
target as often as asked. A device before them drafts after provisional tokens, and shows confirmed ones only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from tests.agents import drafter
from tests.cascades import LENGTH, PROMPT, SETTINGS, VOCAB, Cascade, asking, cascade
from tests.fake_runtime import FakeSequenceRuntime
from tests.local_endpoint import documents_of, serve_local
from tests.serving import (
    StepGate,
    code_of,
    open_session,
    run_session,
    target_tokens,
)

from outrider.cloud.engine.config import TreeForm
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.upstream.mid import DeviceDrafts
from outrider.cloud.upstream.upstream import (
    UpstreamRetry,
)
from outrider.edge.drafting.calibration import PROVISIONAL_RANK
from outrider.edge.drafting.depth import CostModelDepth
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.tree import GuessTree
from outrider.edge.drafting.worker import TreeLimits
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stream import AgentOptions, StreamAgent
from outrider.edge.results import GenerationRequest
from outrider.models.client.checks import SessionCheck
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import ProtocolBroken
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.protocol import Commit, ErrorBody, SessionEnd, SessionEvent, SessionOpen, SessionRequest
from outrider.models.wire.tree_draft import ROOT, TREE_MEDIA_TYPE, TreeDraft

SOON = UpstreamRetry(max_failures=2, max_outage_s=0.0, first_pause_s=0.001, max_pause_s=0.001)


def run_behind_the_mid(running: Cascade, params: SamplingParams) -> tuple[list[int], SessionEnd]:
    """A session's tokens and end. The target steps when the mid-size verifier is ahead, however busy the machine is."""
    tokens: list[int] = []
    with open_session(running.client, asking(params)) as session:

        def is_ahead() -> bool:
            return len(tokens) >= LENGTH - 2 or any(text.mid.ahead for text in list(running.engine._texts.values()))

        while len(tokens) < LENGTH:
            running.mid.wait_until(is_ahead)
            running.big.gate.allow(1)
            tokens += session.commit().tokens
        return tokens, session.rest().end


@pytest.mark.parametrize(
    ("agreement", "form"),
    [(0.0, TreeForm.LINE), (0.8, TreeForm.LINE), (0.8, TreeForm.TREE), (1.0, TreeForm.LINE)],
)
def test_the_text_is_the_targets(agreement: float, form: TreeForm) -> None:
    """Whatever the mid-size verifier commits, the tokens are those of the target alone."""
    with cascade(agreement, form=form, big_gate=StepGate()) as running:
        num_passes = 0
        for params in SETTINGS:
            tokens, end = run_behind_the_mid(running, params)
            assert tokens == target_tokens(PROMPT, LENGTH, params)
            assert (end.reason, end.usage.completion_tokens) == ("length", LENGTH)
            num_passes += end.usage.target_passes
        counts = running.engine.counts
        assert counts.passes == num_passes and (counts.void > 0) == (agreement < 1.0)


def test_an_engine_that_cannot_rewind_is_cancelled_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's: the text is the same."""
    monkeypatch.setattr(EngineThread, "rewind", lambda *_: False)
    with cascade(0.8, big_gate=StepGate()) as running:
        tokens, _ = run_behind_the_mid(running, SETTINGS[1])
        assert tokens == target_tokens(PROMPT, LENGTH, SETTINGS[1])
        assert running.engine.counts.returns > 0


def test_what_the_mid_commits_saves_passes_of_the_target() -> None:
    """The target verifies what the mid-size verifier committed, several tokens a pass."""
    with cascade(1.0, big_gate=StepGate()) as running, open_session(running.client, asking()) as session:
        most = num_tokens = 0
        while most < 4:  # the target runs step by step, the mid-size verifier as it likes
            ahead = min(LENGTH - 8, num_tokens + 12)
            running.mid.wait_until(lambda ahead=ahead: running.engine.counts.provisional >= ahead)  # type: ignore[misc]
            running.mid.wait_until(lambda: all(not text._posts for text in list(running.engine._texts.values())))
            running.big.gate.allow(1)
            commit = session.commit()
            most, num_tokens = max(most, commit.accepted), num_tokens + len(commit.tokens)
        running.big.gate.open()


def test_provisional_tokens_are_marked_and_then_confirmed_or_replaced() -> None:
    """A session that asks gets them before the target has seen them; every token is committed at last."""
    with cascade(0.8, big_gate=StepGate()) as running:
        with open_session(running.client, asking(provisional=True)) as session:
            opened = session.opened
            assert (opened.mid, opened.model, opened.target) == ("mid", "big", running.big.core.model.target)
            first = session.commit()  # the target has not run a step
            assert first.provisional and first.base == 0 and first.tokens
            running.big.gate.open()
            text: list[int] = []
            shown = list(first.tokens)
            num_replaced = 0
            for event in session.rest().commits:
                if event.provisional:
                    assert len(text) <= event.base <= len(text) + len(shown)
                    shown[event.base - len(text) :] = event.tokens
                else:
                    assert event.base == len(text)
                    text += event.tokens
                    agreed = shown[: len(event.tokens)] == list(event.tokens[: len(shown)])
                    num_replaced += not agreed
                    shown = shown[len(event.tokens) :] if agreed else []
        assert text == target_tokens(PROMPT, LENGTH, SETTINGS[1])
        assert num_replaced > 0 and running.engine.counts.void > 0


def test_a_session_that_does_not_ask_gets_no_provisional_token(usual: Cascade) -> None:
    """Withheld by default: an older device sees a verifier as it knows one. Nothing is parked: nobody could name it."""
    before = usual.engine.counts.provisional
    session = run_session(usual.client, asking(keep_prefix=True))  # checks that every commit follows the last
    assert usual.engine.counts.provisional > before
    assert not any(commit.provisional for commit in session.commits)
    usual.mid.wait_until(usual.mid.is_empty)
    assert usual.engine.stats().parked == 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_completions_only_give_confirmed_text(usual: Cascade, is_streamed: bool) -> None:
    """The OpenAI-compatible endpoint answers as the target's own."""
    body = {"model": "big", "prompt": PROMPT, "max_tokens": 24, "seed": 3, "temperature": 0.8, "stream": is_streamed}
    urls = (usual.big.url, usual.mid.url)
    texts = [documents_of(httpx.post(url + "/v1/completions", json=body, timeout=30.0))[1] for url in urls]
    assert texts[0] == texts[1] != ""


def test_a_devices_drafts_reach_the_mid() -> None:
    """Paths and trees count from the confirmed text; the mid-size verifier verifies them.

    It agrees with the target and gets 30 tokens: how many a step verifies follows measured times.
    """
    truth = target_tokens(PROMPT, LENGTH, SETTINGS[1])
    with (
        cascade(1.0, mid_gate=StepGate(), big_gate=StepGate()) as running,
        open_session(running.client, asking()) as session,
    ):
        where, as_tree = session.drafts, {"content-type": TREE_MEDIA_TYPE}
        tree = TreeDraft(0, 0, truth[:30], [ROOT, *range(29)], [15] * 30)
        far = TreeDraft(LENGTH, 30, [1], [ROOT], [15])
        with httpx.Client(base_url=running.mid.url) as device:
            assert device.post(where, json={"base": 0, "paths": [truth[:3]]}).status_code == 204
            assert device.post(where, content=tree.encode(), headers=as_tree).status_code == 204
            assert code_of(device.post(where, json={"base": LENGTH, "paths": [[1]]})) == (400, "draft_ahead")
            assert code_of(device.post(where, content=far.encode(), headers=as_tree)) == (400, "draft_ahead")
        running.mid.gate.open()
        running.mid.wait_until(lambda: running.engine.stats().totals.accepted >= 5)  # more than the path alone has
        running.big.gate.open()
        assert session.rest().tokens == truth


def test_paths_that_come_too_late_do_not_take_the_place_of_newer_ones() -> None:
    """The next sequence of the mid-size verifier drafts the newest that are of use."""
    truth = target_tokens(PROMPT, LENGTH, SETTINGS[1])
    with (
        cascade(0.8, mid_gate=StepGate(), big_gate=StepGate()) as running,
        open_session(running.client, asking()) as session,
    ):
        running.big.gate.allow(1)
        seen = session.commit().tokens
        base = len(seen)
        (text,) = running.engine._texts.values()
        for at, path in ((base, truth[base : base + 6]), (0, [(truth[0] + 1) % VOCAB, *truth[1:9]]), (0, truth[:base])):
            assert running.client.post(session.drafts, json={"base": at, "paths": [path]}).status_code == 204
        running.mid.gate.open()
        running.big.gate.open()
        assert [*seen, *session.rest().tokens] == truth
        assert text.mid._drafts._paths == (base, [truth[base : base + 6]])


def test_nodes_that_still_follow_the_text_go_to_the_next_sequence() -> None:
    """After the mid-size verifier has gone back: under their numbers, by the new sequence's base; the others do not."""
    drafts = DeviceDrafts()
    drafts.begin(0, lambda position: -1)
    text = [10, 11, 12, 13, 14]
    # 0 to 3 guess 10 11 99 5; 4 and 5 hang on node 1 with 12 13; 6 goes on from there, 7 is an alternative to it.
    sent = [
        TreeDraft(0, 0, [10, 11, 99, 5], [ROOT, 0, 1, 2], [15] * 4),
        TreeDraft(2, 4, [12, 13, 14, 70], [1, 4, 5, 5], [9] * 4),
    ]
    assert [each for message in sent for each in drafts.add(message)] == sent
    drafts.add_paths(1, [[11, 12, 13, 7], [11, 50, 13, 8]])
    trees, paths = drafts.begin(4, text.__getitem__)
    assert trees == [TreeDraft(0, 6, [14, 70], [ROOT, ROOT], [9] * 2)] and paths == [[7]]
    later = TreeDraft(4, 8, [20, 21], [6, 3], [9] * 2)  # below 6, and below a node that contradicts the text
    assert drafts.add(later) == [TreeDraft(0, 8, [20], [6], [9])]
    assert drafts.add(TreeDraft(5, 10, [30], [ROOT], [9])) == [TreeDraft(1, 10, [30], [ROOT], [9])]


def test_a_lost_upstream_ends_a_text_with_an_error_and_confirms_nothing_more() -> None:
    """What the mid-size verifier alone has committed is never text: the end has `upstream_lost`."""
    with cascade(1.0, big_gate=StepGate(), retry=SOON) as running:
        with open_session(running.client, asking()) as session:
            running.big.gate.allow(1)
            running.mid.wait_until(lambda: running.engine.counts.provisional >= 8)
            running.big.server.begin_drain(0.0)
            running.big.gate.open()
            text = session.rest()
        assert text.end.error is not None and (text.end.reason, text.end.error.code) == ("error", "upstream_lost")
        assert len(text.tokens) < LENGTH and text.tokens == target_tokens(PROMPT, len(text.tokens), SETTINGS[1])
        running.mid.wait_until(running.mid.is_empty)
        body = {"items": [{"prefix": PROMPT, "draft": [1]}]}
        assert running.client.post("/v1/verify", json=body).json()["error"]["code"] == "upstream_lost"


@pytest.mark.parametrize(("is_fault", "code", "losses"), [(True, "model_fault", 2), (False, "upstream_refused", 0)])
def test_an_error_of_the_targets_ends_a_text_and_is_named(
    is_fault: bool, code: str, losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal at once. A fault of its model after one more try: the same text may fail on it each time."""
    events, refusal = VerifierClient._events, ErrorBody(code="grammar_too_complex", message="no")

    async def refusing(*arguments: Any) -> AsyncGenerator[SessionEvent, None]:
        async for event in events(*arguments):
            is_end = isinstance(event, SessionEnd)
            yield event.model_copy(update={"reason": "error", "error": refusal}) if is_end else event

    if not is_fault:
        monkeypatch.setattr(VerifierClient, "_events", refusing)
    with cascade(1.0, retry=UpstreamRetry(max_failures=6, max_outage_s=0.0, first_pause_s=0.0)) as running:
        running.big.runtime._fail_on_token = PROMPT[-1] if is_fault else None
        text = run_session(running.client, asking(max_tokens=4))
        error = text.end.error
        assert error is not None and (error.code, running.engine.counts.losses) == (code, losses)
        if not is_fault:
            assert text.tokens == target_tokens(PROMPT, 4, SETTINGS[1]) and "grammar_too_complex" in error.message


def test_a_session_that_upstream_cuts_goes_on_with_another() -> None:
    """The prompt and what is confirmed open the next one; the text is the same."""
    with cascade(0.8, big_gate=StepGate()) as running:
        with open_session(running.client, asking(max_tokens=160)) as session:
            running.big.gate.allow(1)
            text: list[int] = []
            num_cut = 0
            for event in session.events:
                if isinstance(event, Commit):
                    text += event.tokens
                    if num_cut < 3 and len(text) > 40 * (num_cut + 1):
                        num_cut += 1
                        for each in list(running.big.core.sessions.values()):
                            running.big.core.engine.cancel(each.sequence_id)
                        running.big.gate.allow(1)  # the engine sees the end between two steps
                        running.mid.wait_until(lambda least=num_cut: running.engine.counts.losses >= least)  # type: ignore[misc]
                    running.big.gate.allow(1)
        assert isinstance(event, SessionEnd) and event.reason == "length"
        assert text == target_tokens(PROMPT, 160, SETTINGS[1]) and running.engine.counts.losses >= 1


def test_a_stop_id_ends_the_text_where_the_target_has_it(usual: Cascade) -> None:
    """The mid-size verifier's own stop ends nothing."""
    truth = target_tokens(PROMPT, LENGTH, SETTINGS[1])
    session = run_session(usual.client, asking(stop_ids=[truth[20]]))
    assert session.tokens == truth[: truth.index(truth[20]) + 1] and session.end.reason == "stop"


# -- a device before a cascade -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4])
def test_a_device_shows_only_confirmed_tokens_and_its_text_is_the_targets(width: int) -> None:
    """The first text learns that the server is a cascade, the next ones ask for provisional tokens."""

    async def show_all(url: str) -> None:
        estimates, options = Estimates(), AgentOptions(tree=TreeLimits(width=width))
        async with VerifierClient(url) as client:
            agent = StreamAgent(Endpoints([client]), drafter(), CostModelDepth(estimates), estimates, options)
            for params in SETTINGS:
                shown: list[int] = []
                request = GenerationRequest(tuple(PROMPT), params, LENGTH, ignore_eos=True)
                result = await agent.generate(request, lambda batch, shown=shown: shown.extend(batch.tokens))  # type: ignore[misc]
                assert list(result.tokens) == target_tokens(PROMPT, LENGTH, params) == shown
                assert result.draft_error is None and agent.with_mid == {url}
                assert PROVISIONAL_RANK not in result.hits  # the device guessed none of these

    with cascade(0.8) as running:
        asyncio.run(show_all(running.mid.url))


@pytest.mark.parametrize("is_cascade", [True, False])
def test_the_first_text_of_an_endpoint_asks_for_provisional_tokens(
    usual: Cascade, is_cascade: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its texts has an agent of its own, which knows from GET /v1/model what the server is."""
    url, open_session, asked = (usual.mid if is_cascade else usual.big).url, VerifierClient.open_session, list[bool]()

    def noted(client: VerifierClient, request: SessionRequest, target: str | None = None) -> Any:
        if client.url == url:
            asked.append(request.provisional)
        return open_session(client, request, target)

    monkeypatch.setattr(VerifierClient, "open_session", noted)
    with serve_local(url, runtime=FakeSequenceRuntime(vocab_size=VOCAB)) as local:
        for _ in range(2):
            local.post({"prompt": "ab", "max_tokens": 3})
    assert asked == [is_cascade] * 2


def test_provisional_tokens_that_nobody_asked_for_break_the_protocol() -> None:
    """So does one that comes before the known text, or none at all."""
    opened, asked = SessionOpen(session="s", model="m", vocab_size=100), SessionRequest(prompt=[1], max_tokens=10)
    check = SessionCheck("http://x", asked.model_copy(update={"provisional": True}))
    for event in (opened, Commit(base=0, tokens=[1, 2], provisional=True), Commit(base=0, tokens=[1])):
        check(event)
    check(Commit(base=1, tokens=[2, 3], provisional=True))
    plain = SessionCheck("http://x", asked)
    plain(opened)
    for checked, base, tokens, message in (
        (check, 0, [4], None),
        (check, 1, [], None),
        (check, 2, [100], "0 to 99"),
        (plain, 0, [1], "only where"),
    ):
        with pytest.raises(ProtocolBroken, match=message):
            checked(Commit(base=base, tokens=tokens, provisional=True))


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
