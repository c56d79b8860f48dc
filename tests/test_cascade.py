"""A cascade's text is the target's own, whatever the mid-size verifier commits first, and whatever fails.

Two real verifiers on loopback ports speak the fake language; the mid-size verifier agrees with the
target as often as asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_harness import Collector
from tests.fake_runtime import FakeBatchRuntime
from tests.requests import flat_request
from tests.serving import (
    EOS_ID,
    FakeServer,
    StepGate,
    fake_tokenizer,
    read_events,
    run_session,
    serve_fake,
    target_tokens,
)

from outrider.cloud.api import stream
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.seam import Asker, DraftHints, GenerateRequest, PickOptions
from outrider.cloud.server.cascade import cascade_model, fetch_facts, upstream_key
from outrider.cloud.upstream.cascade_text import CascadedText
from outrider.cloud.upstream.engine import CascadeEngine
from outrider.cloud.upstream.mid import DeviceDrafts
from outrider.cloud.upstream.upstream import (
    CascadeCounts,
    Upstream,
    UpstreamClient,
    UpstreamRetry,
    upstream_url,
    wire_item,
    wire_request,
)
from outrider.models.errors import ConfigError, RequestError, TokenizerMismatch
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.http.security import KeyRing
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.options import ProcessorOptions
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.wire.protocol import Commit, SessionEnd, SessionOpen, TokenLogprob
from outrider.models.wire.tree_draft import ROOT, TREE_MEDIA_TYPE, TreeDraft

VOCAB = fake_tokenizer().size
PROMPT = [5, 17, 60, 4]
LENGTH = 60
SOON = UpstreamRetry(max_failures=2, max_outage_s=0.0, first_pause_s=0.001, max_pause_s=0.001)
KEY = "a-key-of-the-cascade-upstream"
SETTINGS = [SamplingParams(), SamplingParams(0.8, seed=11), SamplingParams(0.8, top_p=0.9, top_k=40, seed=12)]


class MidRuntime(FakeBatchRuntime):
    """The fake target, but in a share of contexts with other logits."""

    def __init__(self, agreement: float, on_step: Callable[[Sequence[SequenceSlice]], None] | None = None) -> None:
        super().__init__(vocab_size=VOCAB, on_step=on_step)
        self._agreement = agreement

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """One step."""
        rows = super().forward(batch)
        keys = rows[:, 0].view(np.uint32).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        differs = (keys >> np.uint64(40)).astype(np.float64) * 2.0**-24 >= self._agreement
        rows[differs] = rows[differs, ::-1]
        return rows


@dataclass(frozen=True)
class Cascade:
    """Both servers. client: of the mid-size verifier."""

    big: FakeServer
    mid: FakeServer
    client: httpx.Client

    @property
    def engine(self) -> CascadeEngine:
        """The mid-size verifier's."""
        engine = self.mid.core.engine
        assert isinstance(engine, CascadeEngine)
        return engine


@contextmanager
def cascade(
    agreement: float = 0.8,
    *,
    settings: ServerSettings | None = None,
    big_settings: ServerSettings | None = None,
    form: TreeForm = TreeForm.AUTO,
    mid_gate: StepGate | None = None,
    big_gate: StepGate | None = None,
    key: str | None = None,
    retry: UpstreamRetry | None = None,
) -> Iterator[Cascade]:
    """A mid before the target."""
    config = EngineConfig(form=form)
    with (
        serve_fake(big_settings, name="big", config=config, gate=big_gate) as big,
        serve_fake(
            settings,
            name="mid",
            config=config,
            runtime=MidRuntime(agreement, mid_gate),
            gate=mid_gate,
            upstream=big.url,
            upstream_key=key,
            upstream_retry=retry,
        ) as mid,
        httpx.Client(base_url=mid.url, timeout=30.0) as client,
    ):
        yield Cascade(big, mid, client)


def asking(params: SamplingParams = SETTINGS[1], **more: object) -> dict[str, object]:
    """A session's body; it ends only by its length."""
    sampling = {each.name: getattr(params, each.name) for each in fields(params)}
    return {"prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, **sampling, **more}


def run_behind_the_mid(running: Cascade, gate: StepGate, params: SamplingParams) -> tuple[list[int], SessionEnd]:
    """A session's tokens and end. The target steps when the mid-size verifier is ahead, however busy the machine is."""
    tokens: list[int] = []
    with running.client.stream("POST", "/v1/sessions", json=asking(params)) as response:
        events = read_events(response)
        assert isinstance(next(events), SessionOpen)

        def is_ahead() -> bool:
            texts = list(running.engine._texts.values())
            return len(tokens) >= LENGTH - 2 or any(text.mid.ahead for text in texts)

        while len(tokens) < LENGTH:
            running.mid.wait_until(is_ahead)
            gate.allow(1)
            commit = next(events)
            assert isinstance(commit, Commit)
            tokens += commit.tokens
        end = next(events)
    assert isinstance(end, SessionEnd)
    return tokens, end


@pytest.fixture(scope="module")
def usual() -> Iterator[Cascade]:
    """A cascade for the tests that only read from it."""
    with cascade() as running:
        yield running


@pytest.mark.parametrize(
    ("agreement", "form"),
    [(0.0, TreeForm.LINE), (0.8, TreeForm.LINE), (0.8, TreeForm.TREE), (1.0, TreeForm.LINE)],
)
def test_the_text_is_the_targets(agreement: float, form: TreeForm) -> None:
    """Whatever the mid-size verifier commits, the tokens are those of the target alone."""
    gate = StepGate()
    with cascade(agreement, form=form, big_gate=gate) as running:
        num_passes = 0
        for params in SETTINGS:
            tokens, end = run_behind_the_mid(running, gate, params)
            assert tokens == target_tokens(PROMPT, LENGTH, params)
            assert end.reason == "length" and end.usage.completion_tokens == LENGTH
            num_passes += end.usage.target_passes
        counts = running.engine.counts
        assert counts.passes == num_passes
        assert counts.void == 0 if agreement == 1.0 else counts.void > 0


def test_an_engine_that_cannot_rewind_is_cancelled_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's: the text is the same."""
    monkeypatch.setattr(EngineThread, "rewind", lambda *_: False)
    gate = StepGate()
    with cascade(0.8, big_gate=gate) as running:
        tokens, _ = run_behind_the_mid(running, gate, SETTINGS[1])
        assert tokens == target_tokens(PROMPT, LENGTH, SETTINGS[1])
        assert running.engine.counts.returns > 0


def test_what_the_mid_commits_saves_passes_of_the_target() -> None:
    """The target verifies what the mid-size verifier committed, several tokens a pass."""
    gate = StepGate()
    with (
        cascade(1.0, big_gate=gate) as running,
        running.client.stream("POST", "/v1/sessions", json=asking()) as response,
    ):
        events = read_events(response)
        assert isinstance(next(events), SessionOpen)
        most = num_tokens = 0
        while most < 4:  # the target runs step by step, the mid-size verifier as it likes
            ahead = min(LENGTH - 8, num_tokens + 12)
            running.mid.wait_until(lambda ahead=ahead: running.engine.counts.provisional >= ahead)  # type: ignore[misc]
            running.mid.wait_until(lambda: all(not text._posts for text in list(running.engine._texts.values())))
            gate.allow(1)
            commit = next(events)
            assert isinstance(commit, Commit)
            most, num_tokens = max(most, commit.accepted), num_tokens + len(commit.tokens)
        gate.open()


def test_provisional_tokens_are_marked_and_then_confirmed_or_replaced() -> None:
    """A session that asks gets them before the target has seen them; every token is committed at last."""
    gate = StepGate()
    with cascade(0.8, big_gate=gate) as running:
        with running.client.stream("POST", "/v1/sessions", json=asking(provisional=True)) as response:
            events = read_events(response)
            opened = next(events)
            assert isinstance(opened, SessionOpen) and opened.mid == "mid" and opened.model == "big"
            assert opened.target == running.big.core.model.target
            first = next(events)  # the target has not run a step
            assert isinstance(first, Commit) and first.provisional and first.base == 0 and first.tokens
            gate.open()
            text: list[int] = []
            shown = list(first.tokens)
            num_replaced = 0
            for event in events:
                if isinstance(event, SessionEnd):
                    break
                assert isinstance(event, Commit)
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
    """Withheld by default: an older device sees a verifier as it knows one."""
    before = usual.engine.counts.provisional
    session = run_session(usual.client, asking())  # checks that every commit follows the last
    assert usual.engine.counts.provisional > before
    assert not any(commit.provisional for commit in session.commits)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_completions_only_give_confirmed_text(usual: Cascade, is_streamed: bool) -> None:
    """The OpenAI-compatible endpoint answers as the target's own."""
    body = {"model": "big", "prompt": PROMPT, "max_tokens": 24, "seed": 3, "temperature": 0.8, "stream": is_streamed}
    texts = []
    for url in (usual.big.url, usual.mid.url):
        answer = httpx.post(url + "/v1/completions", json=body, timeout=30.0)
        assert answer.status_code == 200
        if is_streamed:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            texts.append("".join(httpx.Response(200, text=line).json()["choices"][0]["text"] for line in lines))
        else:
            texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] == texts[1] != ""


def test_a_devices_drafts_reach_the_mid() -> None:
    """Paths and trees count from the confirmed text; the mid-size verifier verifies them."""
    truth = target_tokens(PROMPT, LENGTH, SETTINGS[1])
    gate, big_gate = StepGate(), StepGate()
    with (
        cascade(0.8, mid_gate=gate, big_gate=big_gate) as running,
        running.client.stream("POST", "/v1/sessions", json=asking()) as response,
    ):
        events = read_events(response)
        opened = next(events)
        assert isinstance(opened, SessionOpen)
        where, as_tree = f"/v1/sessions/{opened.session}/drafts", {"content-type": TREE_MEDIA_TYPE}
        tree = TreeDraft(0, 0, truth[:6], [ROOT, 0, 1, 2, 3, 4], [15] * 6)
        far = TreeDraft(LENGTH, 6, [1], [ROOT], [15])
        with httpx.Client(base_url=running.mid.url) as device:
            assert device.post(where, json={"base": 0, "paths": [truth[:3]]}).status_code == 204
            assert device.post(where, content=tree.encode(), headers=as_tree).status_code == 204
            for answer in (
                device.post(where, json={"base": LENGTH, "paths": [[1]]}),
                device.post(where, content=far.encode(), headers=as_tree),
            ):
                assert answer.status_code == 400 and answer.json()["error"]["code"] == "draft_ahead"
        gate.open()
        running.mid.wait_until(lambda: running.engine.stats().totals.draft_nodes >= 3)
        big_gate.open()
        *commits, end = events
        assert isinstance(end, SessionEnd)
        assert [token for each in commits if isinstance(each, Commit) for token in each.tokens] == truth


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
    gate = StepGate()
    with cascade(1.0, big_gate=gate, retry=SOON) as running:
        with running.client.stream("POST", "/v1/sessions", json=asking()) as response:
            events = read_events(response)
            assert isinstance(next(events), SessionOpen)
            gate.allow(1)
            running.mid.wait_until(lambda: running.engine.counts.provisional >= 8)
            running.big.server.begin_drain(0.0)
            gate.open()
            *commits, end = events
        text = [token for event in commits if isinstance(event, Commit) for token in event.tokens]
        assert isinstance(end, SessionEnd) and end.reason == "error"
        assert end.error is not None and end.error.code == "upstream_lost"
        assert text == target_tokens(PROMPT, len(text), SETTINGS[1]) and len(text) < LENGTH
        running.mid.wait_until(running.mid.is_empty)
        body = {"items": [{"prefix": PROMPT, "draft": [1]}]}
        assert running.client.post("/v1/verify", json=body).json()["error"]["code"] == "upstream_lost"


def test_a_session_that_upstream_cuts_goes_on_with_another() -> None:
    """The prompt and what is confirmed open the next one; the text is the same."""
    gate = StepGate()
    with cascade(0.8, big_gate=gate) as running:
        with running.client.stream("POST", "/v1/sessions", json=asking(max_tokens=160)) as response:
            events = read_events(response)
            assert isinstance(next(events), SessionOpen)
            gate.allow(1)
            text: list[int] = []
            num_cut = 0
            for event in events:
                if isinstance(event, Commit):
                    text += event.tokens
                    if num_cut < 3 and len(text) > 40 * (num_cut + 1):
                        num_cut += 1
                        for session in list(running.big.core.sessions.values()):
                            running.big.core.engine.cancel(session.sequence_id)
                        gate.allow(1)  # the engine sees the end between two steps
                        running.mid.wait_until(lambda least=num_cut: running.engine.counts.losses >= least)  # type: ignore[misc]
                    gate.allow(1)
        assert isinstance(event, SessionEnd) and event.reason == "length"
        assert text == target_tokens(PROMPT, 160, SETTINGS[1])
        assert running.engine.counts.losses >= 1


def test_a_stop_id_ends_the_text_where_the_target_has_it(usual: Cascade) -> None:
    """The mid-size verifier's own stop ends nothing."""
    truth = target_tokens(PROMPT, LENGTH, SETTINGS[1])
    stop = truth[20]
    session = run_session(usual.client, asking(stop_ids=[stop]))
    assert session.tokens == truth[: truth.index(stop) + 1] and session.end.reason == "stop"


def test_verify_is_one_pass_of_the_target(usual: Cascade) -> None:
    """/v1/verify answers as the target's own server."""
    truth = target_tokens(PROMPT, 6)
    items = [{"prefix": PROMPT, "draft": [*truth[:3], (truth[3] + 1) % VOCAB]}, {"prefix": [], "draft": [1]}]
    answers = [httpx.post(url + "/v1/verify", json={"items": items}).json() for url in (usual.big.url, usual.mid.url)]
    for answer in answers:
        answer["results"][0].pop("prefix_hash", None)
        answer.pop("model")
    assert answers[0]["results"][0] == answers[1]["results"][0]
    assert answers[1]["results"][0]["tokens"] == truth[:4] and answers[1]["results"][0]["accepted"] == 3
    assert answers[1]["results"][1]["error"]["code"] == "empty_prompt"


def test_a_held_prefix_is_asked_for_again(usual: Cascade) -> None:
    """A cascade parks nothing; the device sends the tokens."""
    answer = usual.client.post("/v1/sessions", json=asking(prefix_hash="ab" * 32))
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "prefix_not_held"


def test_the_target_is_named_and_the_mid_beside_it(usual: Cascade) -> None:
    """/v1/model has the target's facts."""
    big, mid = (httpx.get(url + "/v1/model").json() for url in (usual.big.url, usual.mid.url))
    assert mid.pop("mid") == "mid" and big.pop("mid") is None
    assert big == mid


def test_metrics_count_what_the_target_said(usual: Cascade) -> None:
    """Provisional tokens are confirmed or contradicted."""
    run_session(usual.client, asking())
    text = usual.client.get("/metrics").text
    value = {
        kind: float(text.split(f'outrider_cascade_tokens_total{{kind="{kind}"}} ')[1].split()[0])
        for kind in ("provisional", "confirmed", "contradicted")
    }
    assert value["provisional"] >= value["confirmed"] + value["contradicted"] > 0.0
    assert "outrider_cascade_returns_total" in text and "outrider_cascade_passes_total" in text


def test_a_client_that_leaves_frees_both_servers(usual: Cascade) -> None:
    """Its sequence here and its session upstream end."""
    with usual.client.stream("POST", "/v1/sessions", json=asking(max_tokens=3000)) as response:
        events = read_events(response)
        assert isinstance(next(events), SessionOpen) and isinstance(next(events), Commit)
    usual.mid.wait_until(usual.mid.is_empty)
    usual.big.wait_until(lambda: usual.big.core.engine.stats().running == len(usual.big.core.sessions) == 0)


def test_owners_share_no_prompt_cache_upstream() -> None:
    """Two of the mid-size verifier's keys are one key upstream, and still two to its prompt cache."""
    ring = KeyRing(["first-key-of-a-client", "second-key-of-a-client"])
    with cascade(1.0, settings=ServerSettings(keys=ring)) as running:
        prompt = [1 + i % 200 for i in range(120)]
        cached = []
        for key in ("first-key-of-a-client", "second-key-of-a-client", "first-key-of-a-client"):
            body = asking(prompt=prompt, max_tokens=8)
            session = run_session(running.client, body, {"authorization": f"Bearer {key}"})
            cached.append(session.end.usage.cached_prompt_tokens)
        assert cached[:2] == [0, 0] and cached[2] > 0


def test_the_upstream_key_is_sent_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the environment, from which it goes."""
    monkeypatch.setenv("OUTRIDER_UPSTREAM_KEY", KEY)
    assert upstream_key() == KEY and upstream_key() is None
    big_settings = ServerSettings(keys=KeyRing([KEY]))
    with cascade(big_settings=big_settings, key=KEY) as running:
        assert run_session(running.client, asking()).tokens == target_tokens(PROMPT, LENGTH, SETTINGS[1])
        with pytest.raises(ConfigError, match="OUTRIDER_UPSTREAM_KEY"):
            fetch_facts(running.big.url, "another-key-than-that")


def test_the_environment_holds_one_key_and_an_address_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error repeats the key."""
    monkeypatch.setenv("OUTRIDER_UPSTREAM_KEY", f"{KEY} {KEY}")
    with pytest.raises(ConfigError, match="is no key") as refused:
        upstream_key()
    assert KEY not in str(refused.value)
    assert upstream_url("big:8000/v1/") == "http://big:8000"
    for wrong in (f"http://user:{KEY}@big:8000", "ftp://big", "http://"):
        with pytest.raises(ConfigError) as refused:
            upstream_url(wrong)
        assert KEY not in str(refused.value)


def test_another_tokenizer_upstream_is_refused(usual: Cascade) -> None:
    """Ids would mean other text."""
    facts = fetch_facts(usual.big.url, None)
    with pytest.raises(TokenizerMismatch, match="same family"):
        cascade_model(usual.mid.core.model, facts.model_copy(update={"tokenizer": "0" * 64}), None)
    with pytest.raises(ConfigError, match="cascade itself"):
        cascade_model(usual.mid.core.model, facts.model_copy(update={"mid": "small"}), None)
    with pytest.raises(ConfigError, match="start it first"):
        fetch_facts("http://127.0.0.1:9", None)


def test_every_parameter_of_a_text_goes_upstream(usual: Cascade) -> None:
    """A new field of a request must be sent upstream, or stand here as one that changes no token."""
    sent = {"prompt", "params", "max_tokens", "stop_ids", "salt", "draft", "once"}
    sent |= {"processors", "num_generated", "num_logprobs", "grammar"}
    refused = {"terms", "evidence", "adapter"}
    no_token = {"patience_ms", "prefix_hash", "lag_ms", "owner", "keep", "priority", "deadline_ms"}
    no_token |= {"recent", "is_repeat", "is_predicted", "stored", "provisional"}
    parts = (GenerateRequest, PickOptions, DraftHints, Asker)
    found = {each.name for part in parts for each in fields(part)} - {"pick", "hints", "asker"}
    assert found == sent | no_token | refused
    compiler = GrammarCompiler(fake_tokenizer(), fake_tokenizer().size, [EOS_ID])
    request = flat_request(
        tuple(PROMPT),
        SETTINGS[2],
        9,
        frozenset({EOS_ID}),
        processors=ProcessorOptions(presence_penalty=0.5),
        num_generated=2,
        num_logprobs=3,
        grammar=compiler.compile(GrammarSpec("choice", '["a", "b"]')),
    )
    facts = fetch_facts(usual.big.url, None)
    upstream = Upstream(None, facts, b"secret", UpstreamRetry(), CascadeCounts())  # type: ignore[arg-type]
    wired = wire_request(request, [7], upstream)
    assert wired.prompt == [*PROMPT, 7] and wired.max_tokens == 8
    assert wired.sampling() == SETTINGS[2] and wired.cache_salt == upstream.cache_salt(request.asker.client)
    assert upstream.cache_salt(request.asker.client) != upstream.cache_salt(
        replace(request.asker, salt=b"other").client
    )
    assert (wired.presence_penalty, wired.generated, wired.logprobs) == (0.5, 3, 3)
    assert wired.grammar is not None and wired.grammar.kind == "choice"
    assert wire_item(request, facts).generated == 2 and wire_item(request, facts).grammar == wired.grammar
    two_ends = facts.model_copy(update={"eos_token_ids": [EOS_ID, 9]})
    for own, stop_ids, expected in (
        (facts, {EOS_ID}, ([], False)),  # upstream adds it
        (facts, {EOS_ID, 7}, ([7], False)),
        (facts, {7}, ([7], True)),
        (two_ends, {9}, ([9], True)),  # asked for by its id, beside ignore_eos
    ):
        item = wire_item(replace(request, stop_ids=frozenset(stop_ids), pick=replace(request.pick, grammar=None)), own)
        assert (item.stop_ids, item.ignore_eos) == expected


def test_logprobs_that_nobody_asked_for_are_left_out(usual: Cascade) -> None:
    """The client of the upstream verifier checks those that it asked for."""
    facts = fetch_facts(usual.big.url, None)
    upstream = Upstream(None, facts, b"secret", UpstreamRetry(), CascadeCounts())  # type: ignore[arg-type]
    commit = Commit(base=0, tokens=[5], logprobs=[TokenLogprob(logprob=-1.0, top=[(1 << 24, -1.0)])])
    for num_logprobs, expected in ((None, 0), (1, 1)):
        sink = Collector()
        request = flat_request(tuple(PROMPT), SETTINGS[1], 1, num_logprobs=num_logprobs)
        CascadedText(request, sink, usual.engine, upstream, lambda act: None, lambda: None)._on_commit(commit)
        assert sink.tokens == [5] and len(sink.commits[0].logprobs) == expected


def test_an_upstream_without_logprobs_is_an_error(usual: Cascade, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first commit, which does not count as sent: no text ends as if it were whole, nothing is tried again."""

    monkeypatch.setattr(stream, "_logprobs", lambda event: "")
    losses = usual.engine.counts.losses
    found = run_session(usual.client, asking(logprobs=2))
    assert found.tokens == [] and found.end.reason == "error" and found.end.error is not None
    assert found.end.error.code == "upstream_refused" and "protocol_broken" in found.end.error.message
    body = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 2}
    answer = usual.client.post("/v1/completions", json=body)
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "upstream_refused"
    assert usual.engine.counts.losses == losses + 2


def test_a_key_never_crosses_a_network_in_clear() -> None:
    """As the device's: over http only on this machine."""

    async def make(url: str, key: str | None) -> None:
        await UpstreamClient.to(url, key).aclose()

    with pytest.raises(ConfigError, match="https"):
        asyncio.run(make("http://verifier.example:8000", "secret"))
    for url, key in (
        ("http://127.0.0.1:1", "secret"),
        ("https://verifier.example", "secret"),
        ("http://v.example", None),
    ):
        asyncio.run(make(url, key))


def test_a_mid_that_refuses_a_request_leaves_the_text_to_the_target() -> None:
    """Its vocabulary may end before the target's."""
    with cascade(0.8) as running:
        mid = running.engine._mid

        def refuse(*_: object) -> int:
            raise RequestError("token_out_of_range", "logit_bias has an id beyond the mid-size verifier's vocabulary")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mid, "submit", refuse)
            found = run_session(running.client, asking())
        assert found.tokens == target_tokens(PROMPT, LENGTH, SETTINGS[1])


def test_a_second_stop_lets_the_first_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the loop's thread closes what is open, nothing stops its loop again."""
    with serve_fake(name="big") as big, serve_fake(name="mid", upstream=big.url) as mid:
        engine, posted = mid.core.engine, list[object]()
        assert isinstance(engine, CascadeEngine)
        post = engine._post

        def noted(act: Callable[[], None]) -> None:
            posted.append(act)
            post(act)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_thread", SimpleNamespace(is_alive=lambda: True, join=lambda timeout_s: None))
            patch.setattr(engine, "_post", noted)
            engine.stop()
            engine.stop()
        assert posted == [engine._end_all]
