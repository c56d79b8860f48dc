"""Tests what a mid-size verifier sends to the target's and takes from it: parameters, keys, other clients' work."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from tests.cascades import LENGTH, PROMPT, SETTINGS, VOCAB, Cascade, asking, cascade
from tests.engine_harness import Collector
from tests.requests import flat_request
from tests.serving import (
    EOS_ID,
    bearer,
    code_of,
    fake_tokenizer,
    open_session,
    run_session,
    serve_fake,
    target_tokens,
)
from tests.waiting import run

from outrider.cloud.api import stream
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.seam import Asker, DraftHints, GenerateRequest, PickOptions
from outrider.cloud.server.cascade import cascade_model, fetch_facts, upstream_key
from outrider.cloud.upstream.cascade_text import CascadedText
from outrider.cloud.upstream.engine import CascadeEngine
from outrider.cloud.upstream.upstream import (
    CascadeCounts,
    Upstream,
    UpstreamClient,
    UpstreamRetry,
    upstream_url,
    wire_item,
    wire_request,
)
from outrider.models.client.errors import EndpointLost
from outrider.models.errors import ConfigError, RequestError, TokenizerMismatch
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.http.security import KeyRing
from outrider.models.processors.options import ProcessorOptions
from outrider.models.wire.protocol import Commit, TokenLogprob

KEY = "a-key-of-the-cascade-upstream"


def test_verify_is_one_pass_of_the_target(usual: Cascade) -> None:
    """/v1/verify answers as the target's own server."""
    truth = target_tokens(PROMPT, 6)
    items = [{"prefix": PROMPT, "draft": [*truth[:3], (truth[3] + 1) % VOCAB]}, {"prefix": [], "draft": [1]}]
    (big, _), (mid, empty) = (
        httpx.post(url + "/v1/verify", json={"items": items}).json()["results"]
        for url in (usual.big.url, usual.mid.url)
    )
    for result in (big, mid):
        result.pop("prefix_hash", None)
    assert big == mid and (mid["tokens"], mid["accepted"]) == (truth[:4], 3)
    assert empty["error"]["code"] == "empty_prompt"


def test_a_held_prefix_is_asked_for_again(usual: Cascade) -> None:
    """A cascade parks nothing; the device sends the tokens."""
    assert code_of(usual.client.post("/v1/sessions", json=asking(prefix_hash="ab" * 32))) == (409, "prefix_not_held")


def test_the_target_is_named_and_the_mid_beside_it(usual: Cascade) -> None:
    """/v1/model has the target's facts; the tokenizer that the mid-size verifier shares is that of its own bundle,
    listed under the target's name and identity.
    """
    big, mid = (httpx.get(url + "/v1/model").json() for url in (usual.big.url, usual.mid.url))
    assert mid.pop("mid") == "mid" and big.pop("mid") is None and big == mid
    big, mid = (httpx.get(url + "/v1/tokenizer").json() for url in (usual.big.url, usual.mid.url))
    assert big == mid and mid["model"] == "big"


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
    with open_session(usual.client, asking(max_tokens=3000)) as session:
        session.commit()
    usual.mid.wait_until(usual.mid.is_empty)
    usual.big.wait_until(lambda: usual.big.core.engine.stats().running == len(usual.big.core.sessions) == 0)


def test_owners_share_no_prompt_cache_upstream() -> None:
    """Two of the mid-size verifier's keys are one key upstream, and still two to its prompt cache."""
    first, second = "first-key-of-a-client", "second-key-of-a-client"
    body = asking(prompt=[1 + i % 200 for i in range(120)], max_tokens=8)
    with cascade(1.0, settings=ServerSettings(keys=KeyRing([first, second]))) as running:
        ends = [run_session(running.client, body, bearer(key)).end for key in (first, second, first)]
    assert [end.usage.cached_prompt_tokens > 0 for end in ends] == [False, False, True]


def test_the_upstream_key_is_sent_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the environment, from which it goes."""
    monkeypatch.setenv("OUTRIDER_UPSTREAM_KEY", KEY)
    assert upstream_key() == KEY and upstream_key() is None
    with cascade(big_settings=ServerSettings(keys=KeyRing([KEY])), key=KEY) as running:
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
    for change, kind, message in (
        ({"tokenizer": "0" * 64}, TokenizerMismatch, "same family"),
        ({"mid": "small"}, ConfigError, "cascade itself"),
    ):
        with pytest.raises(kind, match=message):
            cascade_model(usual.mid.core.model, facts.model_copy(update=change), None)
    with pytest.raises(ConfigError, match="start it first"):
        fetch_facts("http://127.0.0.1:9", None)


@pytest.fixture(scope="module")
def upstream(usual: Cascade) -> Upstream:
    """What texts share of the target's verifier, without a client of it."""
    return Upstream(None, fetch_facts(usual.big.url, None), b"secret", UpstreamRetry(), CascadeCounts())  # type: ignore[arg-type]


def text_of(usual: Cascade, upstream: Upstream, sink: Collector, **asked: Any) -> CascadedText:
    """A text of up to 99 tokens."""
    request = flat_request(tuple(PROMPT), SETTINGS[1], 99, **asked)
    return CascadedText(request, sink, usual.engine, upstream, lambda act: None, lambda: None)


def test_every_parameter_of_a_text_goes_upstream(upstream: Upstream) -> None:
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
    wired, salt = wire_request(request, [7], upstream), upstream.cache_salt(request.asker.client)
    assert (wired.prompt, wired.max_tokens, wired.sampling()) == ([*PROMPT, 7], 8, SETTINGS[2])
    assert wired.cache_salt == salt != upstream.cache_salt(replace(request.asker, salt=b"other").client)
    assert (wired.presence_penalty, wired.generated, wired.logprobs) == (0.5, 3, 3)
    assert wired.grammar is not None and wired.grammar.kind == "choice"
    item = wire_item(request, upstream.facts)
    assert (item.generated, item.grammar) == (2, wired.grammar)
    two_ends = upstream.facts.model_copy(update={"eos_token_ids": [EOS_ID, 9]})
    for own, stop_ids, expected in (
        (upstream.facts, {EOS_ID}, ([], False)),  # upstream adds it
        (upstream.facts, {EOS_ID, 7}, ([7], False)),
        (upstream.facts, {7}, ([7], True)),
        (two_ends, {9}, ([9], True)),  # asked for by its id, beside ignore_eos
    ):
        item = wire_item(replace(request, stop_ids=frozenset(stop_ids), pick=replace(request.pick, grammar=None)), own)
        assert (item.stop_ids, item.ignore_eos) == expected


def test_logprobs_that_nobody_asked_for_are_left_out(usual: Cascade, upstream: Upstream) -> None:
    """The client of the upstream verifier checks those that it asked for."""
    commit = Commit(base=0, tokens=[5], logprobs=[TokenLogprob(logprob=-1.0, top=[(1 << 24, -1.0)])])
    for num_logprobs, expected in ((None, 0), (1, 1)):
        sink = Collector()
        text_of(usual, upstream, sink, num_logprobs=num_logprobs)._on_commit(commit)
        assert sink.tokens == [5] and len(sink.commits[0].logprobs) == expected


def test_an_upstream_without_logprobs_is_an_error(usual: Cascade, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first commit, which does not count as sent: no text ends as if it were whole, nothing is tried again."""
    monkeypatch.setattr(stream, "_logprobs", lambda event: "")
    losses = usual.engine.counts.losses
    found = run_session(usual.client, asking(logprobs=2))
    assert found.tokens == [] and found.end.reason == "error" and found.end.error is not None
    assert found.end.error.code == "upstream_refused" and "protocol_broken" in found.end.error.message
    body = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 2}
    assert code_of(usual.client.post("/v1/completions", json=body)) == (502, "upstream_refused")
    assert usual.engine.counts.losses == losses + 2


@pytest.mark.parametrize(("drawn", "factor"), [(0.0, 0.5), (1.0, 1.5)])
def test_pauses_vary_and_double_until_some_tokens_have_come(
    usual: Cascade, upstream: Upstream, drawn: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a device's: a target that restarts is not asked by all texts at the same moment."""
    sleep, nums = AsyncMock(), [1, 1, 7, 8, 1]

    async def cut(text: CascadedText) -> None:
        """A session upstream that brings so many tokens and is lost; the last one asks for a pause."""
        text.confirmed.extend([5] * nums.pop(0))
        lost = EndpointLost("cut")
        lost.retry_after_s = 0.0 if nums else 8.0
        if not nums:
            text._has_ended = True
        raise lost

    monkeypatch.setattr(
        "outrider.cloud.upstream.cascade_text.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    )
    monkeypatch.setattr("outrider.cloud.upstream.cascade_text.random", SimpleNamespace(random=lambda: drawn))
    monkeypatch.setattr(CascadedText, "_run_session", cut)
    run(text_of(usual, upstream, Collector())._generate())
    expected = [0.05 * factor, 0.1 * factor, 0.2 * factor, 0.05 * factor, 8.0 * (1.0 + drawn / 4.0)]
    assert [call.args[0] for call in sleep.call_args_list] == pytest.approx(expected)


async def test_a_key_never_crosses_a_network_in_clear() -> None:
    """As the device's: over http only on this machine."""
    allowed = (("http://127.0.0.1:1", "secret"), ("https://verifier.example", "secret"), ("http://v.example", None))
    for url, key in allowed:
        await UpstreamClient.to(url, key).aclose()
    with pytest.raises(ConfigError, match="https"):
        UpstreamClient.to("http://verifier.example:8000", "secret")


def test_a_mid_that_refuses_a_request_leaves_the_text_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vocabulary may end before the target's."""
    error = RequestError("token_out_of_range", "logit_bias has an id beyond the mid-size verifier's vocabulary")
    with cascade(0.8) as running, monkeypatch.context() as patch:
        patch.setattr(running.engine._mid, "submit", Mock(side_effect=error))
        assert run_session(running.client, asking()).tokens == target_tokens(PROMPT, LENGTH, SETTINGS[1])


def test_a_second_stop_lets_the_first_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the loop's thread closes what is open, nothing stops its loop again."""
    with serve_fake(name="big") as big, serve_fake(name="mid", upstream=big.url) as mid:
        engine = mid.core.engine
        assert isinstance(engine, CascadeEngine)
        post = Mock(side_effect=engine._post)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_thread", Mock())
            patch.setattr(engine, "_post", post)
            engine.stop()
            engine.stop()
        post.assert_called_once_with(engine._end_all)
