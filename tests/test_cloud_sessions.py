"""Tests sessions over real HTTP: streams, drafts, ends, and what a disconnected client frees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.engine_harness import Clock
from tests.pending_drafts import line_message
from tests.raw_client import Raw, post
from tests.serving import (
    EOS_ID,
    JSON,
    PROMPT,
    FakeServer,
    OpenSession,
    StepGate,
    code_of,
    open_session,
    run_session,
    serve_fake,
    target_tokens,
)

from outrider.cloud.api.draft_posts import MAX_TREE_BYTES
from outrider.cloud.api.state import Core, ServerSettings
from outrider.cloud.engine import EngineConfig, Policy
from outrider.models.http.sse import EventStream
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.fields import MAX_STOP_IDS
from outrider.models.wire.protocol import TREES_SINCE, Commit
from outrider.models.wire.tree_draft import ROOT, TREE_MEDIA_TYPE, TreeDraft


def body(**changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True} | changes


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "top_k": 40}]
)
def test_a_session_streams_the_targets_tokens(client: httpx.Client, params: dict[str, Any]) -> None:
    """The committed tokens equal those of the target alone, greedy or sampled."""
    result = run_session(client, body(**params))
    assert result.tokens == target_tokens(PROMPT, 24, SamplingParams(**params))
    assert (result.open.model, result.end.reason) == ("fake", "length")
    assert (result.end.usage.prompt_tokens, result.end.usage.completion_tokens) == (len(PROMPT), 24)


def test_a_stop_id_ends_the_session(client: httpx.Client) -> None:
    """A session ends after its first stop id, which is committed."""
    expected = target_tokens(PROMPT, 24)
    result = run_session(client, body(stop_ids=[expected[6]], ignore_eos=False))
    assert (result.tokens, result.end.reason) == (expected[: expected.index(expected[6]) + 1], "stop")
    engine, most = SimpleNamespace(limits=SimpleNamespace(vocab_size=5000)), list(range(1, MAX_STOP_IDS + 1))
    core: Any = SimpleNamespace(model=SimpleNamespace(eos_ids=frozenset({0})), engine=engine)
    assert Core.stop_set(core, most, False) == {0, *most}, "the bound is on the client's own"


def test_the_models_own_end_token_stops_unless_ignored(client: httpx.Client) -> None:
    """The end token is a stop id unless `ignore_eos` is set."""
    prompts = ([seed % 300, seed // 300 + 1] for seed in range(4000))
    prompt = next(each for each in prompts if EOS_ID in target_tokens(each, 6))
    whole = target_tokens(prompt, 6)
    other = next(token for token in range(1, 300) if token not in whole)
    num_until_end = whole.index(EOS_ID) + 1
    # Other stop ids are added to it; what a request names ends it, the model's own end or not.
    for ignores, named, reason, count in (
        (False, [], "stop", num_until_end),
        (True, [], "length", 6),
        (False, [other], "stop", num_until_end),
        (True, [other], "length", 6),
        (True, [EOS_ID], "stop", num_until_end),
    ):
        told = run_session(client, body(prompt=prompt, max_tokens=6, ignore_eos=ignores, stop_ids=named))
        assert (told.end.reason, told.tokens) == (reason, whole[:count])
        assert told.open.stop_ids == sorted({*named, *([] if ignores else [EOS_ID])})
        item = {"prefix": prompt, "draft": whole[:5], "stop_ids": named, "ignore_eos": ignores}
        (result,) = client.post("/v1/verify", json={"items": [item]}).json()["results"]
        assert result["tokens"] == whole[:count]
        asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "stop_token_ids": named, "ignore_eos": ignores}
        assert client.post("/v1/completions", json=asked).json()["choices"][0]["finish_reason"] == reason


def test_the_context_ends_a_session(client: httpx.Client, server: FakeServer) -> None:
    """A session that reaches the model's maximum length ends with the reason "context"."""
    result = run_session(client, body(prompt=[7] * (server.core.engine.limits.max_positions - 5), max_tokens=100))
    assert (result.end.reason, len(result.tokens)) == ("context", 5)


@pytest.mark.parametrize("is_correct", [True, False])
def test_drafts_change_the_passes_and_never_the_tokens(is_correct: bool) -> None:
    """Correct drafts are accepted, wrong ones are not; the stream is the same."""
    expected = target_tokens(PROMPT, 24)
    guess = expected[:12] if is_correct else [(token + 1) % 300 for token in expected[:12]]
    with (
        serve_fake(gate=StepGate(), config=EngineConfig(policy=Policy.VERIFY)) as server,
        httpx.Client(base_url=server.url) as client,
        open_session(client, body(patience_ms=0)) as session,
    ):
        answer = client.post(session.drafts, json={"base": 0, "paths": [guess]})
        server.gate.open()
        text = session.rest()
    assert (answer.status_code, answer.content, text.tokens) == (204, b"", expected)
    assert (text.end.usage.accepted_prediction_tokens > 0) is is_correct
    assert text.end.usage.target_passes < 24 or not is_correct


@pytest.mark.parametrize("media_type", [TREE_MEDIA_TYPE, "Application/VND.outrider.tree; v=2"])
def test_a_tree_is_a_draft(media_type: str) -> None:
    """Its likeliest path is wrong, an alternative right: the text is the target's in fewer passes. Bad bytes: 400."""
    expected = target_tokens(PROMPT, 24)
    with (
        serve_fake(gate=StepGate(), config=EngineConfig(policy=Policy.VERIFY)) as server,
        httpx.Client(base_url=server.url) as client,
        open_session(client, body(patience_ms=0)) as session,
    ):
        assert session.opened.protocol >= TREES_SINCE
        url, headers = session.drafts, {"content-type": media_type}
        tree = TreeDraft(0, 7, [(expected[0] + 1) % 300, *expected[:12]], [ROOT, ROOT, *range(8, 19)], [14, *[13] * 12])
        answer = client.post(url, content=tree.encode(), headers=headers)
        assert (answer.status_code, answer.content) == (204, b"")
        for content, kind, status, code in (
            (b"", media_type, 400, "invalid_request"),
            (TreeDraft(1, 0, [5], [ROOT], [0]).encode(), media_type, 400, "draft_ahead"),
            (TreeDraft(0, 0, [300], [ROOT], [0]).encode(), media_type, 400, "token_out_of_range"),
            (tree.encode(), "application/json", 400, "malformed_json"),
            (tree.encode(), "application/octet-stream", 415, "unsupported_media_type"),
            (bytes(MAX_TREE_BYTES + 1), media_type, 413, "body_too_large"),
        ):
            assert code_of(client.post(url, content=content, headers={"content-type": kind})) == (status, code)
        server.gate.open()
        text = session.rest()
    assert text.tokens == expected
    assert text.end.usage.accepted_prediction_tokens > 0 and text.end.usage.target_passes < 24


@contextmanager
def session_of_three_tokens() -> Iterator[tuple[FakeServer, httpx.Client, OpenSession, list[int]]]:
    """A session that has committed three tokens, the last ones until its gate opens; and these tokens."""
    with (
        serve_fake(gate=StepGate()) as server,
        httpx.Client(base_url=server.url) as client,
        open_session(client, body(patience_ms=0)) as session,
    ):
        server.gate.allow(3)
        seen: list[int] = []
        while len(seen) < 3:
            seen += session.commit().tokens
        yield server, client, session, seen


def test_refused_drafts_do_not_change_the_session() -> None:
    """Drafts that are ahead of the commits or outside the vocabulary: each has its error; the text continues."""
    expected = target_tokens(PROMPT, 24)
    with session_of_three_tokens() as (server, client, session, seen):
        for draft, code in (
            (b'{"base":50,"paths":[[1]]}', "draft_ahead"),
            (b'{"base":3,"paths":[[300]]}', "token_out_of_range"),
            (b'{"base":3,"paths":[[-1]]}', "invalid_parameter"),
            (b'{"base":3,"paths":[]}', "invalid_parameter"),
            (b'{"base":3,"paths":[[%s1]]}' % (b"1," * 64), "invalid_parameter"),
            (b'{"base":3,"paths":[[1]],"epoch":1}', "invalid_parameter"),
            (b'{"base":3,', "malformed_json"),
        ):
            assert code_of(client.post(session.drafts, content=draft, headers=JSON)) == (400, code), draft
        server.gate.open()
        assert seen + session.rest().tokens == expected


def test_drafts_that_come_too_late_are_answered_as_any_other() -> None:
    """Whatever the commits contradict or have is dropped: the text is the same, and nothing is pending."""
    expected = target_tokens(PROMPT, 24)
    with session_of_three_tokens() as (server, client, session, seen):
        wrong = [(expected[0] + 1) % 300, *expected[1:5]]
        num_before = server.core.engine.stats().totals.draft_nodes
        trees = [line_message(0, 0, wrong), TreeDraft(0, 5, expected[5:7], [4, 5], [15, 15])]
        answers = [client.post(session.drafts, json={"base": 0, "paths": [wrong, expected[:2]]})]
        tree_type = {"content-type": TREE_MEDIA_TYPE}
        answers += [client.post(session.drafts, content=tree.encode(), headers=tree_type) for tree in trees]
        assert [(answer.status_code, answer.content) for answer in answers] == [(204, b"")] * 3
        server.gate.open()
        assert seen + session.rest().tokens == expected
        assert server.core.engine.stats().totals.draft_nodes == num_before


def test_delete_ends_a_session() -> None:
    """DELETE answers 204, the stream ends with "cancelled"; afterwards the session is unknown."""
    with (
        serve_fake(gate=StepGate()) as server,
        httpx.Client(base_url=server.url) as client,
        open_session(client, body(max_tokens=4000)) as session,
    ):
        server.gate.allow(2)
        assert client.delete(session.path).status_code == 204
        server.gate.open()
        assert session.rest().end.reason == "cancelled"
        assert client.delete(session.path).json()["error"]["code"] == "unknown_session"
        server.wait_until(server.is_empty)


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/v1/sessions", b'{"prompt":[1,2],"max_tokens":4000,"ignore_eos":true}'),
        ("/v1/completions", b'{"prompt":"a","max_tokens":4000,"ignore_eos":true}'),
        ("/v1/completions", b'{"prompt":["a","b"],"max_tokens":4000,"ignore_eos":true,"stream":true}'),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"ignore_eos":true,"stream":true}'),
        # A prompt of several chunks, so that cancelling saves steps.
        ("/v1/verify", b'{"items":[{"prefix":[%s]}]}' % b",".join([b"9"] * 1000)),
    ],
)
def test_a_disconnected_client_frees_its_sequences(path: str, request_body: bytes) -> None:
    """When the connection closes, sequences end, blocks and slots are free, and the server goes on serving."""
    with serve_fake(gate=StepGate()) as server, httpx.Client(base_url=server.url) as client:
        with Raw(server) as raw:
            raw.send(post(path, request_body))
            server.wait_until(lambda: server.core.engine.stats().running > 0)
            assert not server.is_empty()
        server.wait_until(lambda: not server.server.server_state.tasks)
        server.gate.open()
        server.wait_until(server.is_empty)
        assert server.core.engine.stats().totals.committed < 10
        assert run_session(client, body()).tokens == target_tokens(PROMPT, 24)


def test_comments_keep_an_idle_stream_open() -> None:
    """The server sends comments while nothing is committed; readers skip them."""
    with (
        serve_fake(ServerSettings(keep_alive_s=0.01), gate=StepGate()) as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v1/sessions", json=body()) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith('data: {"type":"open"')
        assert next(line for line in lines if line) == ":"
        server.gate.open()
        commits = [Commit.model_validate_json(line.removeprefix("data: ")) for line in lines if '"base"' in line]
    assert [token for commit in commits for token in commit.tokens] == target_tokens(PROMPT, 24)


async def test_a_stream_is_silent_for_one_interval_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval begins with the last write, not with the last look at the clock."""
    clock, delays, pokes = Clock(), list[float](), list[float]()
    reader: Any = SimpleNamespace(poke=lambda: pokes.append(clock.now))
    chunks: Any = None  # none is read
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
    stream = EventStream(chunks, reader, lambda: None, keep_alive_s=5.0)
    monkeypatch.setattr(stream, "_arm", delays.append)
    for at_s, act in ((104.0, stream._written), (105.0, stream._tick), (109.0, stream._tick)):
        clock.now = at_s
        act()
    monkeypatch.undo()
    assert delays == [4.0, 5.0] and pokes == [109.0]


def test_a_failing_model_ends_its_session_only() -> None:
    """NaN logits end the session with an error that reveals no internals; others continue."""
    from tests.fake_runtime import FakeBatchRuntime

    runtime = FakeBatchRuntime(vocab_size=300, fail_on_token=299)
    with serve_fake(runtime=runtime) as server, httpx.Client(base_url=server.url) as client:
        end = run_session(client, body(prompt=[1, 299])).end
        assert end.error is not None
        assert (end.reason, end.error.code, end.error.type) == ("error", "model_fault", "server_error")
        answer = client.post("/v1/completions", json={"prompt": [1, 299]})
        assert code_of(answer) == (500, "model_fault") and "position" not in answer.text
        assert 299 not in target_tokens(PROMPT, 24)
        assert run_session(client, body()).tokens == target_tokens(PROMPT, 24)
        server.wait_until(server.is_empty)


def test_concurrent_sessions_get_their_own_texts(server: FakeServer, client: httpx.Client) -> None:
    """Also when they share steps."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = [[n + 1, 2 * n + 1, 40] for n in range(12)]
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda prompt: run_session(client, body(prompt=prompt)), prompts))
    assert [result.tokens for result in results] == [target_tokens(prompt, 24) for prompt in prompts]
    server.wait_until(server.is_empty)
