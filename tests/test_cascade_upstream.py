"""Tests what a mid-size verifier sends to the target's and takes from it: parameters, keys, other clients' work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.cascades import LENGTH, PROMPT, SETTINGS, VOCAB, Cascade, asking, cascade
from tests.engine_harness import Collector
from tests.requests import flat_request
from tests.serving import (
    EOS_ID,
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
from outrider.cloud.upstream import cascade_text
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
    answers = [httpx.post(url + "/v1/verify", json={"items": items}).json() for url in (usual.big.url, usual.mid.url)]
    for answer in answers:
        answer["results"][0].pop("prefix_hash", None)
        answer.pop("model")
    assert answers[0]["results"][0] == answers[1]["results"][0]
    assert answers[1]["results"][0]["tokens"] == truth[:4] and answers[1]["results"][0]["accepted"] == 3
    assert answers[1]["results"][1]["error"]["code"] == "empty_prompt"


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
    assert code_of(usual.client.post("/v1/completions", json=body)) == (502, "upstream_refused")
    assert usual.engine.counts.losses == losses + 2


@pytest.mark.parametrize(("drawn", "factor"), [(0.0, 0.5), (1.0, 1.5)])
def test_pauses_vary_and_double_until_some_tokens_have_come(
    usual: Cascade, drawn: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a device's: a target that restarts is not asked by all texts at the same moment."""
    pauses, nums = list[float](), [1, 1, 7, 8, 1]

    class Noting:
        """`asyncio`, whose pauses pass at once."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)

    async def cut(text: CascadedText) -> None:
        """A session upstream that brings so many tokens and is lost; the last one asks for a pause."""
        text.confirmed.extend([5] * nums.pop(0))
        lost = EndpointLost("cut")
        lost.retry_after_s = 0.0 if nums else 8.0
        if not nums:
            text._has_ended = True
        raise lost

    monkeypatch.setattr(cascade_text, "asyncio", Noting())
    monkeypatch.setattr(cascade_text, "random", SimpleNamespace(random=lambda: drawn))
    monkeypatch.setattr(CascadedText, "_run_session", cut)
    facts = fetch_facts(usual.big.url, None)
    upstream = Upstream(None, facts, b"secret", UpstreamRetry(), CascadeCounts())  # type: ignore[arg-type]
    request = flat_request(tuple(PROMPT), SETTINGS[1], 99)
    run(CascadedText(request, Collector(), usual.engine, upstream, lambda act: None, lambda: None)._generate())
    expected = [0.05 * factor, 0.1 * factor, 0.2 * factor, 0.05 * factor, 8.0 * (1.0 + drawn / 4.0)]
    assert pauses == pytest.approx(expected)


async def test_a_key_never_crosses_a_network_in_clear() -> None:
    """As the device's: over http only on this machine."""

    async def make(url: str, key: str | None) -> None:
        await UpstreamClient.to(url, key).aclose()

    with pytest.raises(ConfigError, match="https"):
        await make("http://verifier.example:8000", "secret")
    for url, key in (
        ("http://127.0.0.1:1", "secret"),
        ("https://verifier.example", "secret"),
        ("http://v.example", None),
    ):
        await make(url, key)


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
