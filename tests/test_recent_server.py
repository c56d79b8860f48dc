"""Tests that a server keeps texts, finds them for equal requests, and keeps apart what is of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from tests.redis_server import redis_server
from tests.redis_store import store_at
from tests.requests import flat_request
from tests.serving import FakeServer, bearer, run_session, serve_fake, target_tokens
from tests.waiting import wait_until

from outrider.cloud.api.recent_texts import RecentTexts
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.recent.store import MemoryStore, PromptDigest, RecentStore
from outrider.cloud.seam import GenerateRequest
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent
from outrider.edge.results import GenerationRequest, Mode
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.http.security import KeyRing
from outrider.models.picks.sampling import SamplingParams

GREEDY = SamplingParams()
ALICE, BOB = "alice-has-this-key", "bob-has-another-key"


@contextmanager
def serving(recent: RecentStore | None, *keys: str) -> Iterator[tuple[FakeServer, httpx.Client]]:
    """A server that keeps recent texts, and a client."""
    config = EngineConfig(policy=Policy.VERIFY)  # times of this machine decide nothing
    with (
        closing(recent) if recent is not None else nullcontext(),
        serve_fake(ServerSettings(keys=KeyRing(keys)), recent=recent, config=config) as server,
        httpx.Client(base_url=server.url, timeout=30.0) as client,
    ):
        yield server, client


def session(client: httpx.Client, *, key: str | None = None, no_store: bool = False, **body: object) -> SimpleNamespace:
    """Runs a session: its passes, its tokens, and how many of them were looked up."""
    headers = bearer(key) if key else {}
    client.headers.update(headers | {"Cache-Control": "max-age=0, No-Store" if no_store else "max-age=0"})
    done = run_session(client, {"prompt": [5, 17, 99], "max_tokens": 40, "ignore_eos": True} | body)
    passes, looked_up = done.end.usage.target_passes, done.end.usage.looked_up_tokens
    return SimpleNamespace(passes=passes, looked_up=looked_up, tokens=done.tokens, name=done.end.prefix_hash)


def kept(server: FakeServer, num: int) -> None:
    """Waits until the server has kept so many texts: it does so behind an answer's end."""
    store = server.core.recent
    assert store is not None
    wait_until(lambda: store.stats().counts.stored == num)


def test_a_repeated_session_is_drafted_from_its_earlier_text() -> None:
    """Within one owner; `Cache-Control: no-store` neither uses nor keeps a text."""
    expected = target_tokens([5, 17, 99], 40)
    with serving(MemoryStore(), ALICE, BOB) as (server, client):
        assert session(client, key=ALICE, no_store=True).tokens == expected
        first = session(client, key=ALICE)
        kept(server, 1)
        again, bobs = session(client, key=ALICE), session(client, key=BOB)
        fresh = session(client, key=ALICE, no_store=True)
        assert first.tokens == again.tokens == bobs.tokens == fresh.tokens == expected
        assert first.passes == bobs.passes == fresh.passes == 40
        assert again.passes <= 5 and again.looked_up == 40 - again.passes
        kept(server, 3)
        shown = client.get("/metrics").text
        assert all(f"outrider_recent_{line}" in shown for line in ("hits_total 1.0", "misses_total 2.0", "up 1.0"))
        assert "outrider_recent_texts 2.0" in shown


def test_a_salt_divides_what_is_kept_of_texts() -> None:
    """Another salt of the same key sees no earlier text, cannot go on with a prefix, and pushes nothing out."""
    salted: dict[str, Any] = {"cache_salt": "one", "keep_prefix": True}
    with serving(MemoryStore()) as (server, client):
        asks: dict[str, dict[str, Any]] = {
            "sessions": {"prompt": [5], "max_tokens": 1},
            "verify": {"items": [{"prefix": [5]}]},
        }
        for (path, asked_for), (length, status) in product(asks.items(), ((64, 200), (65, 400))):
            assert client.post(f"/v1/{path}", json=asked_for | {"cache_salt": "x" * length}).status_code == status
        done = session(client, **salted)
        kept(server, 1)
        item = {"prefix": [7], "prefix_hash": done.name}
        others: list[dict[str, Any]] = [{}, {"cache_salt": "two"}]
        for other in others:
            assert session(client, **other).looked_up == 0
            turn = {"prompt": [7], "max_tokens": 4, "prefix_hash": done.name, **other}
            refused = client.post("/v1/verify", json={"items": [item], **other}).json()["results"][0]
            for answer in (client.post("/v1/sessions", json=turn).json(), refused):
                assert answer["error"]["code"] == "prefix_not_held"
        kept(server, 3)
        assert session(client, **salted).looked_up > 30
        (taken,) = client.post("/v1/verify", json={"items": [item], "cache_salt": "one"}).json()["results"]
        assert taken["tokens"] == target_tokens([5, 17, 99, *done.tokens, 7], 1)
        again = {"prompt": [*taken["tokens"], 9], "prefix_hash": taken["prefix_hash"], "cache_salt": "one"}
        assert session(client, **again, max_tokens=4).tokens


def test_another_prompt_and_other_sampling_find_their_own() -> None:
    """Another seed uses the earlier text as a hint; another prompt none. All texts are the target's own."""
    hot: dict[str, Any] = {"temperature": 0.8, "seed": 3}
    with serving(MemoryStore()) as (server, client):
        session(client, **hot)
        kept(server, 1)
        for sampling in (hot, hot | {"seed": 4}, {"temperature": 0.0}):
            assert session(client, **sampling).tokens == target_tokens([5, 17, 99], 40, SamplingParams(**sampling))
        assert session(client, prompt=[5, 17, 98]).looked_up == 0


def test_completions_share_the_texts_of_sessions() -> None:
    """The prompt's ids are what counts. A shorter answer does not replace what is known."""
    with serving(MemoryStore()) as (server, client):
        session(client)
        kept(server, 1)
        body = {"prompt": [[5, 17, 99], [5, 17, 99]], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 8
        kept(server, 3)
        assert session(client).passes <= 5


def test_a_turn_that_continues_a_kept_prefix_is_found_by_its_whole_prompt() -> None:
    """The first time by the prefix's hash, the next time by all tokens: one place."""
    with serving(MemoryStore()) as (server, client):
        first = session(client, max_tokens=8, keep_prefix=True)
        kept(server, 1)
        turn = session(client, prompt=[7, 8], prefix_hash=first.name)
        kept(server, 2)
        again = session(client, prompt=[5, 17, 99, *first.tokens, 7, 8])
        assert again.tokens == turn.tokens and turn.passes == 40 and again.passes <= 5


def asked(owner: bytes, salt: bytes = b"") -> GenerateRequest:
    return flat_request((1, 2, 3), GREEDY, 1, owner=owner, salt=salt)


def test_no_hash_that_may_be_sent_names_a_prefix_of_another_salt() -> None:
    """Not even one computed from the name under which it is kept: that is longer than a field may be."""
    askers = [asked(b"a", salt).asker for salt in (b"one", b"two", b"")]
    found = {asker.name_of("f" * 64) for asker in askers}
    assert len(found) == len({asker.client for asker in askers}) == 3 and {len(name) for name in found} == {64, 65}


def test_an_owner_has_a_bounded_number_of_known_prefixes() -> None:
    """However many it leaves, another owner's are still known."""
    recall, digest = RecentTexts(MemoryStore(), "t"), PromptDigest("t", b"alice")
    recall.note_prefix(asked(b"bob"), "his", digest)
    for owner, index in product(range(40), range(300)):
        recall.note_prefix(asked(bytes([owner])), str(index), digest)
    known = recall._prefixes
    assert len(known) == 4096 and known.get(b"bob", "his") is digest
    assert sum(known.get(bytes([39]), str(index)) is not None for index in range(300)) <= 256


def test_a_session_that_the_client_leaves_is_kept_as_far_as_it_came() -> None:
    """A broken connection is when a text is asked for again."""
    with serving(MemoryStore()) as (server, client):
        body = {"prompt": [5, 17, 99], "max_tokens": 3000, "ignore_eos": True}
        with client.stream("POST", "/v1/sessions", json=body) as response:
            assert len(list(islice(response.iter_lines(), 40))) == 40
        kept(server, 1)
        assert session(client).passes < 40


def test_texts_in_redis_survive_the_server(tmp_path: Path) -> None:
    """Another replica drafts from them; with Redis dead, sessions are as before."""
    place = tmp_path / "redis"
    with redis_server(place) as process:
        with store_at(f"unix://{place}") as store, serving(store) as (server, client):
            session(client)
            kept(server, 1)
        with store_at(f"unix://{place}") as store, serving(store) as (server, client):
            assert session(client).passes <= 5
            kept(server, 1)
            process.kill()
            process.wait()
            assert session(client).tokens == target_tokens([5, 17, 99], 40)
            wait_until(lambda: "outrider_recent_up 0.0" in client.get("/metrics").text)
            assert session(client).passes == 40


def test_without_a_store_nothing_is_kept() -> None:
    """And /metrics shows nothing of it."""
    with serving(None) as (_, client):
        assert session(client).passes == session(client).passes == 40
        assert "outrider_recent" not in client.get("/metrics").text


async def test_a_device_can_ask_for_a_text_from_nothing() -> None:
    """With its client's option, or for one text: the page and `run --compare` do. Other texts say what they had."""
    request = GenerationRequest(prompt=(5, 17, 99), params=GREEDY, max_tokens=12, ignore_eos=True)

    async def num_recent(url: str, *, by_client: bool = False, by_text: bool = False) -> int:
        async with VerifierClient(url, ClientOptions(no_store=by_client)) as client:
            one = client.for_one_text(no_store=by_text)
            return (await make_agent(Mode.CLOUD_ONLY, Endpoints([one]), None).generate(request)).num_recent

    with serving(MemoryStore()) as (server, client):
        await num_recent(server.url, by_client=True)
        await num_recent(server.url, by_text=True)
        assert await num_recent(server.url) == 0
        kept(server, 1)
        assert "outrider_recent_misses_total 1.0" in client.get("/metrics").text
        assert await num_recent(server.url, by_client=True) == 0 and await num_recent(server.url) == 12
