"""Tests drafting from an earlier text after the same prompt: few passes where it repeats, and never another text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, plain
from tests.redis_server import redis_server
from tests.requests import flat_request
from tests.serving import FakeServer, fake_tokenizer, run_session, serve_fake, target_tokens
from tests.waiting import wait_until

from outrider.cloud.api.recent_texts import RecentTexts
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.pending.lookup import MAX_TOKENS, RecentTextSource, kind_after
from outrider.cloud.pending.node_chances import NodeChances
from outrider.cloud.pending.trie import EARLIER_KINDS, PREDICTED_KINDS, REPEATED
from outrider.cloud.recent.redis_store import RedisStore
from outrider.cloud.recent.store import MemoryStore, PromptDigest, RecentStore
from outrider.cloud.seam import DraftHints, GenerateRequest
from outrider.cloud.vllm.book import Book
from outrider.cloud.vllm.terms import Terms, terms_of
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent
from outrider.edge.results import GenerationRequest, Mode
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.http.security import KeyRing
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.tree_draft import CHANCES, TreeDraft

GREEDY = SamplingParams()
PROMPT = (1, 2, 3)
ALICE, BOB = "alice-has-this-key", "bob-has-another-key"


# -- where a text is in an earlier one ---------------------------------------------------------------------------------


def test_an_earlier_text_is_followed_position_by_position() -> None:
    """From the first token on; one that the same request got is a repetition until it is left."""
    committed: list[int] = []
    repeated = RecentTextSource([5, 6, 7, 8], committed, is_repeat=True)
    assert repeated.propose(3) == ([5, 6, 7], [REPEATED] * 3)
    committed += [5, 6]
    assert repeated.propose(9) == ([7, 8], [REPEATED] * 2)
    committed += [9]
    assert repeated.propose(9) == ([], []) and not repeated.goes_first


def test_the_longer_an_earlier_text_agrees_the_likelier_it_goes_on() -> None:
    """Each node has the kind of the agreement before it."""
    committed = list(range(3))
    tokens, kinds = RecentTextSource(range(40), committed, is_repeat=False).propose(20)
    assert tokens == list(range(3, 23))
    assert kinds == [kind_after(run) for run in range(3, 23)]
    assert kinds == sorted(kinds) and set(kinds) == set(EARLIER_KINDS)


def test_a_text_that_left_an_earlier_one_rejoins_it() -> None:
    """At the longest match of its last tokens, of these at the nearest to its place."""
    earlier_tokens = [1, 2, 3, 4, 50, 51, 9, 8, 7, 60, 61, 4, 50, 70]
    committed = [1, 2, 30]
    earlier = RecentTextSource(earlier_tokens, committed, is_repeat=True)
    assert earlier.propose(4) == ([], [])
    committed += [4, 50]  # at 5 and at 13; the present place is 5
    assert earlier.propose(2) == ([51, 9], [kind_after(2), kind_after(3)])
    committed += [7, 60]
    assert earlier.propose(2)[0] == [61, 4]


def test_only_so_much_of_an_earlier_text_is_followed() -> None:
    """However long it is; behind its end nothing is proposed, and nothing is searched."""
    committed: list[int] = [3] * MAX_TOKENS
    assert RecentTextSource([3] * (MAX_TOKENS + 5), committed, is_repeat=True).propose(4) == ([], [])


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=8),
    st.booleans(),
)
def test_what_is_proposed_stands_in_the_earlier_text(
    tokens: list[int], commits: list[list[int]], is_repeat: bool
) -> None:
    """After the tokens that were committed last, wherever it was left and rejoined."""
    committed: list[int] = []
    earlier = RecentTextSource(tokens, committed, is_repeat=is_repeat)
    for commit in commits:
        committed += commit
        path, kinds = earlier.propose(5)
        assert len(path) == len(kinds) <= 5
        if path:
            run = 2 if committed != tokens[: len(committed)] else len(committed)
            behind = committed[len(committed) - run :] if run else []
            found = [*behind, *path]
            assert any(tokens[i : i + len(found)] == found for i in range(len(tokens)))


# -- the engine --------------------------------------------------------------------------------------------------------


def run(
    harness: Harness, earlier: tuple[int, ...], *, is_repeat: bool, params: SamplingParams = GREEDY, count: int = 60
) -> Collector:
    """One text of the engine."""
    collector = Collector()
    harness.engine.submit(flat_request(PROMPT, params, count, recent=earlier, is_repeat=is_repeat), collector)
    harness.run()
    return collector


def passes(collector: Collector) -> int:
    """Target passes of a finished text."""
    return collector.ended.usage.target_passes


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_repeat", [True, False])
def test_a_repeated_text_takes_few_passes(params: SamplingParams, is_repeat: bool) -> None:
    """Its tokens count as looked up."""
    text = plain(PROMPT, params, 60)
    harness = Harness()
    found = run(harness, tuple(text), is_repeat=is_repeat, params=params)
    assert found.tokens == text and passes(found) <= 6
    assert found.ended.usage.looked_up_tokens == 60 - passes(found)
    assert harness.engine.stats().totals.lookup_accepted == 60 - passes(found)
    assert passes(run(harness, (), is_repeat=False, params=params)) == 60


def test_a_regenerated_text_rejoins_its_earlier_one() -> None:
    """Some tokens are others, some are missing: the rest is still drafted."""
    text = plain(PROMPT, GREEDY, 60)
    edited = [*text[:10], 63, *text[11:30], *text[33:]]
    found = run(Harness(), tuple(edited), is_repeat=False)
    assert found.tokens == text and passes(found) < 25


WRONG: dict[str, Callable[[list[int]], list[int]]] = {
    "another text": lambda text: [(token + 1) % VOCAB for token in text],
    "a loop": lambda text: [text[0]] * 60,
    "right once in three": lambda text: [token if i % 3 else 0 for i, token in enumerate(text)],
}


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("is_repeat", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_earlier_text_costs_next_to_nothing(name: str, is_repeat: bool, policy: Policy) -> None:
    """Its rate is learned, as that of prompt lookup. A drafted token takes a fortieth of a step."""
    text = plain(PROMPT, GREEDY, 60)
    took = {}
    for earlier in ((), tuple(WRONG[name](text))):
        harness = Harness(config=EngineConfig(policy=policy))
        harness.engine.calibrate()
        before = harness.clock.now
        assert run(harness, earlier, is_repeat=is_repeat).tokens == text
        took[bool(earlier)] = harness.clock.now - before
    assert took[True] < 1.03 * took[False]


def test_ids_that_the_model_has_not_are_ignored() -> None:
    """They may come from anywhere, and are no fault of the request."""
    text = plain(PROMPT, GREEDY, 20)
    for earlier in ((*text[:5], VOCAB), (-1, *text), (2**32 - 1,)):
        found = run(Harness(), earlier, is_repeat=True, count=20)
        assert found.tokens == text and passes(found) == 20


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_earlier_text_changes_the_output(data: st.DataObject) -> None:
    """Whatever it is, beside drafts of the device in either form, greedy and sampled, with and without lookup."""
    params = data.draw(st.sampled_from([GREEDY, SAMPLED]))
    text = plain(PROMPT, params, 24)
    piece = st.one_of(
        st.lists(st.integers(0, VOCAB - 1), max_size=6),
        st.tuples(st.integers(0, 23), st.integers(0, 12)).map(lambda at: text[at[0] : at[0] + at[1]]),
    )
    earlier = tuple(token for part in data.draw(st.lists(piece, max_size=5)) for token in part)
    harness = Harness(config=EngineConfig(looks_up=data.draw(st.booleans()), policy=data.draw(st.sampled_from(Policy))))
    collector = Collector()
    number = harness.engine.submit(
        flat_request(PROMPT, params, 24, recent=earlier, is_repeat=data.draw(st.booleans())), collector
    )
    sent = 0
    while collector.end is None:
        base = len(collector.tokens)
        kind = data.draw(st.sampled_from(["nothing", "path", "tree"]))
        guess = data.draw(st.sampled_from([text[base : base + 4], [1, 2, 3, 4]]))
        if kind == "path" and guess:
            harness.engine.draft(number, base, [guess])
        elif kind == "tree" and guess:
            parents = [-1, *range(sent, sent + len(guess) - 1)]
            levels = [len(CHANCES) - 1] * len(guess)
            harness.engine.draft_tree(number, TreeDraft(base, sent, guess, parents, levels))
            sent += len(guess)
        harness.step()
    assert collector.tokens == text
    harness.assert_all_returned()


def test_a_repetition_outweighs_a_device_that_guesses_wrong() -> None:
    """The device's nodes are the likeliest otherwise."""
    text = plain(PROMPT, GREEDY, 40)
    harness, collector = Harness(), Collector()
    number = harness.engine.submit(flat_request(PROMPT, GREEDY, 40, recent=tuple(text), is_repeat=True), collector)
    while collector.end is None:
        base = len(collector.tokens)
        harness.engine.draft(number, base, [[(text[base] + 1) % VOCAB] * 4])
        harness.step()
    assert collector.tokens == text and passes(collector) <= 6


def test_a_prediction_has_chances_of_its_own() -> None:
    """What earlier texts of a client were worth says nothing about what it predicts, through the whole engine."""
    truth = plain(PROMPT, GREEDY, 60)
    wrong = [(token + 1) % VOCAB for token in truth]
    rates: list[list[float]] = []
    for is_predicted in (True, False):
        harness = Harness(config=EngineConfig(policy=Policy.VERIFY))
        for _ in range(3):
            request = flat_request(PROMPT, GREEDY, 60, recent=tuple(wrong), is_predicted=is_predicted)
            drafts = harness.engine._sequences[harness.engine.submit(request, Collector())].drafts
            (source,) = drafts.sources
            assert source.kinds == (PREDICTED_KINDS if is_predicted else EARLIER_KINDS)
            harness.run()
        rates.append(NodeChances(harness.engine._drafting.learned(b"").chances).rates())
    assert rates[0][PREDICTED_KINDS[0]] < rates[1][PREDICTED_KINDS[0]]
    assert rates[1][EARLIER_KINDS[0]] < rates[0][EARLIER_KINDS[0]]
    request = flat_request(PROMPT, GREEDY, 60, recent=tuple(truth), is_predicted=True)
    right = Collector()
    harness.engine.submit(request, right)
    harness.run()
    assert right.tokens == truth and passes(right) <= 6


def test_vllms_book_drafts_from_an_earlier_text() -> None:
    """By the same modules: its terms carry the text to the engine process."""
    predicted = Terms(2, GREEDY, 20, DraftHints(recent=(5, 6, 7), is_predicted=True))
    terms = Terms(1, GREEDY, 20, DraftHints(recent=(5, 6, 7), is_repeat=True))
    assert terms_of(terms.extra_args()) == terms
    book = Book(max_draft=16, policy=Policy.AUTO, looks_up=True, clock=lambda: 0.0)
    served = book.open(terms, PROMPT)
    (earlier,) = [source for source in served.drafts.sources if isinstance(source, RecentTextSource)]
    assert earlier.propose(2) == ([5, 6], [REPEATED, REPEATED])
    (prediction,) = [
        source for source in book.open(predicted, PROMPT).drafts.sources if isinstance(source, RecentTextSource)
    ]
    assert terms_of(predicted.extra_args()) == predicted and prediction.kinds == PREDICTED_KINDS


# -- the server --------------------------------------------------------------------------------------------------------


def is_up(store: RedisStore) -> bool:
    return store.stats().up == 1


@contextmanager
def serving(recent: RecentStore | None, *keys: str) -> Iterator[tuple[FakeServer, httpx.Client]]:
    """A server that keeps recent texts, and a client."""
    with closing(recent) if recent is not None else nullcontext():
        settings = ServerSettings(keys=KeyRing(keys))
        config = EngineConfig(policy=Policy.VERIFY)  # times of this machine decide nothing
        with (
            serve_fake(settings, recent=recent, config=config) as server,
            httpx.Client(base_url=server.url, timeout=30.0) as client,
        ):
            yield server, client


class Done(NamedTuple):
    """A session that has ended."""

    passes: int
    looked_up: int
    tokens: tuple[int, ...]


def session(client: httpx.Client, *, key: str | None = None, no_store: bool = False, **body: object) -> Done:
    """Runs a session."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client.headers.update(headers | {"Cache-Control": "max-age=0, No-Store" if no_store else "max-age=0"})
    done = run_session(client, {"prompt": [5, 17, 99], "max_tokens": 40, "ignore_eos": True} | body)
    usage = done.end.usage
    return Done(usage.target_passes, usage.looked_up_tokens, tuple(done.tokens))


def kept(server: FakeServer, num: int) -> None:
    """Waits until the server has kept so many texts: it does so behind an answer's end."""
    store = server.core.recent
    assert store is not None
    wait_until(lambda: store.stats().counts.stored == num)


def test_a_repeated_session_is_drafted_from_its_earlier_text() -> None:
    """Within one owner; `Cache-Control: no-store` neither uses nor keeps a text."""
    expected = tuple(target_tokens([5, 17, 99], 40))
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
        assert "outrider_recent_hits_total 1.0" in shown and "outrider_recent_misses_total 2.0" in shown
        assert "outrider_recent_up 1.0" in shown and "outrider_recent_texts 2.0" in shown


def test_a_salt_divides_what_is_kept_of_texts() -> None:
    """Another salt of the same key sees no earlier text, cannot go on with a prefix, and pushes nothing out."""
    salted: dict[str, Any] = {"cache_salt": "one", "keep_prefix": True}
    with serving(MemoryStore()) as (server, client):
        done = run_session(client, {"prompt": [5, 17, 99], "max_tokens": 40, "ignore_eos": True, **salted})
        kept(server, 1)
        name = done.end.prefix_hash
        others: list[dict[str, Any]] = [{}, {"cache_salt": "two"}]
        for other in others:
            assert session(client, **other).looked_up == 0
            turn = {"prompt": [7], "max_tokens": 4, "prefix_hash": name, **other}
            assert client.post("/v1/sessions", json=turn).json()["error"]["code"] == "prefix_not_held"
            item = {"prefix": [7], "prefix_hash": name}
            refused = client.post("/v1/verify", json={"items": [item], **other}).json()["results"][0]
            assert refused["error"]["code"] == "prefix_not_held"
        kept(server, 3)
        assert session(client, **salted).looked_up > 30
        one = [{"prefix": [7], "prefix_hash": name, "draft": []}]
        taken = client.post("/v1/verify", json={"items": one, "cache_salt": "one"}).json()["results"][0]
        assert taken["tokens"] == target_tokens([5, 17, 99, *done.tokens, 7], 1)
        again: dict[str, Any] = {
            "prompt": [*taken["tokens"], 9],
            "prefix_hash": taken["prefix_hash"],
            "cache_salt": "one",
        }
        assert session(client, **again, max_tokens=4).tokens


def test_another_prompt_and_other_sampling_find_their_own() -> None:
    """Another seed uses the earlier text as a hint; another prompt none. All texts are the target's own."""
    hot: dict[str, Any] = {"temperature": 0.8, "seed": 3}
    with serving(MemoryStore()) as (server, client):
        session(client, **hot)
        kept(server, 1)
        cold: dict[str, Any] = {"temperature": 0.0}
        for sampling in (hot, hot | {"seed": 4}, cold):
            params = SamplingParams(sampling["temperature"], seed=int(sampling.get("seed", 0)))
            assert session(client, **sampling).tokens == tuple(target_tokens([5, 17, 99], 40, params))
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
        first = run_session(client, {"prompt": [5, 17, 99], "max_tokens": 8, "ignore_eos": True, "keep_prefix": True})
        kept(server, 1)
        turn = session(client, prompt=[7, 8], prefix_hash=first.end.prefix_hash)
        kept(server, 2)
        again = session(client, prompt=[5, 17, 99, *first.tokens, 7, 8])
        assert again.tokens == turn.tokens and turn.passes == 40 and again.passes <= 5


def asked(owner: bytes, salt: bytes = b"") -> GenerateRequest:
    return flat_request(PROMPT, GREEDY, 1, owner=owner, salt=salt)


def test_no_hash_that_may_be_sent_names_a_prefix_of_another_salt() -> None:
    """Not even one computed from the name under which it is kept: that is longer than a field may be."""
    found = {asked(b"a", salt).asker.name_of("f" * 64) for salt in (b"one", b"two", b"")}
    assert len(found) == 3 and {len(name) for name in found} == {64, 65}
    assert len({asked(b"a", salt).asker.client for salt in (b"one", b"two", b"")}) == 3


def test_an_owner_has_a_bounded_number_of_known_prefixes() -> None:
    """However many it leaves, another owner's are still known."""
    recall = RecentTexts(MemoryStore(), "t")
    digest = PromptDigest("t", b"alice")
    recall.note_prefix(asked(b"bob"), "his", digest)
    for owner in range(40):
        for index in range(300):
            recall.note_prefix(asked(bytes([owner])), str(index), digest)
    known = recall._prefixes
    assert len(known) == 4096 and known.get(b"bob", "his") is digest
    assert sum(known.get(bytes([39]), str(index)) is not None for index in range(300)) <= 256


def test_a_session_that_the_client_leaves_is_kept_as_far_as_it_came() -> None:
    """A broken connection is when a text is asked for again."""
    with serving(MemoryStore()) as (server, client):
        body = {"prompt": [5, 17, 99], "max_tokens": 3000, "ignore_eos": True}
        with client.stream("POST", "/v1/sessions", json=body) as response:
            for _, line in zip(range(40), response.iter_lines(), strict=False):
                assert line is not None
        kept(server, 1)
        assert session(client).passes < 40


def test_texts_in_redis_survive_the_server(tmp_path: Path) -> None:
    """Another replica drafts from them; with Redis dead, sessions are as before."""
    place = tmp_path / "redis"
    with redis_server(place) as process:
        for expected in (40, 5):
            store = RedisStore(f"unix://{place}", wait_s=5.0, retry_s=0.02)
            wait_until(partial(is_up, store))
            with serving(store) as (server, client):
                assert session(client).passes <= expected
                kept(server, 1)
                if expected == 5:
                    process.kill()
                    process.wait()
                    assert session(client).tokens == tuple(target_tokens([5, 17, 99], 40))
                    wait_until(lambda: "outrider_recent_up 0.0" in client.get("/metrics").text)
                    assert session(client).passes == 40


def test_without_a_store_nothing_is_kept() -> None:
    """And /metrics shows nothing of it."""
    with serving(None) as (_, client):
        assert session(client).passes == session(client).passes == 40
        assert "outrider_recent" not in client.get("/metrics").text


assert fake_tokenizer().size > 99


def test_a_device_can_ask_for_a_text_from_nothing() -> None:
    """With its client's option, or for one text: the page and `run --compare` do. Other texts say what they had."""
    request = GenerationRequest(prompt=(5, 17, 99), params=GREEDY, max_tokens=12, ignore_eos=True)

    async def generate(url: str, *, is_client: bool, is_text: bool) -> int:
        async with VerifierClient(url, ClientOptions(no_store=is_client)) as client:
            one = client.for_one_text(no_store=is_text)
            return (await make_agent(Mode.CLOUD_ONLY, Endpoints([one]), None).generate(request)).num_recent

    with serving(MemoryStore()) as (server, client):
        asyncio.run(generate(server.url, is_client=True, is_text=False))
        asyncio.run(generate(server.url, is_client=False, is_text=True))
        assert asyncio.run(generate(server.url, is_client=False, is_text=False)) == 0
        kept(server, 1)
        assert "outrider_recent_misses_total 1.0" in client.get("/metrics").text
        assert asyncio.run(generate(server.url, is_client=True, is_text=False)) == 0
        assert asyncio.run(generate(server.url, is_client=False, is_text=False)) == 12
