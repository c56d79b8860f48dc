"""Tests stateless verification and prefixes that are kept between requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.engine_harness import SAMPLED, VOCAB, Harness, plain, refused

from outrider.cloud.engine import EngineConfig
from outrider.models.errors import RequestError

PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(3 + 5 * i)] for i in range(8)]


def verify_all(harness: Harness, prompt: list[int], count: int, guess: Sequence[int]) -> list[int]:
    """Stop-and-wait as an agent does it: four drafts per call, the prefix by its hash after the first."""
    text: list[int] = []
    name: str | None = None
    while len(text) < count:
        draft = list(guess[len(text) : len(text) + 4])
        most = min(len(draft) + 1, count - len(text))
        collector = harness.finished([] if name else [*prompt, *text], most, draft=draft, once=True, prefix_hash=name)
        assert collector.ended.usage.target_passes == 1
        text += collector.tokens
        name = collector.ended.prefix_hash
    return text


@pytest.mark.parametrize("error_every", [1, 3, 1000])
def test_verifying_call_by_call_gives_the_same_text(error_every: int) -> None:
    """Stateless verification with parked prefixes equals the plain loop, whatever share of the drafts is correct."""
    harness, prompt = Harness(), PROMPTS[4]
    truth = plain(prompt, SAMPLED, 30)
    guess = [t if i % error_every else (t + 1) % VOCAB for i, t in enumerate(truth, start=1)]
    assert verify_all(harness, prompt, 30, guess) == truth


def test_a_parked_prefix_leaves_only_new_tokens_to_run() -> None:
    """The call that continues a parked prefix runs one token and its drafts."""
    harness, prompt = Harness(), PROMPTS[4]
    truth = plain(prompt, SAMPLED, 9)
    first = harness.finished(prompt, 5, draft=truth[:4], once=True)
    assert first.tokens == truth[:5]
    second = harness.finished([], 4, draft=truth[5:8], once=True, prefix_hash=first.ended.prefix_hash)
    assert second.tokens == truth[5:9]
    assert harness.batches[-1] == [4]


def test_an_unknown_prefix_hash_is_a_409() -> None:
    """The error asks for the tokens; using a prefix twice gives the same error."""
    with refused("prefix_not_held", 409):
        Harness().submit([1], once=True, prefix_hash="0" * 32)


def test_a_refused_item_leaves_its_prefix_parked() -> None:
    """A bad token after a good hash does not release the prefix."""
    harness = Harness()
    first = harness.finished(PROMPTS[2], 1, once=True)
    with pytest.raises(RequestError, match="token id"):
        harness.submit([VOCAB + 1], once=True, prefix_hash=first.ended.prefix_hash)
    harness.engine.step()
    again = harness.finished([], 1, once=True, prefix_hash=first.ended.prefix_hash)
    assert [*first.tokens, *again.tokens] == plain(PROMPTS[2], SAMPLED, 2)


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_a_sequence_that_is_to_be_kept_is_parked_whole(ends: str) -> None:
    """Prompt and text stand behind the hash: what goes on from it runs the new tokens only, and is the whole's text."""
    harness, prompt, more = Harness(), PROMPTS[4], [7, 8, 9]
    truth = plain(prompt, SAMPLED, 9)
    stop_ids = frozenset({truth[-1]}) if ends == "stop" else frozenset[int]()
    first = harness.finished(prompt, 9 if ends == "length" else 50, stop_ids=stop_ids, keep=True)
    assert first.ended.reason == ends and first.ended.prefix_hash is not None
    begun = len(harness.batches)
    second = harness.finished(more, 6, prefix_hash=first.ended.prefix_hash)
    assert second.tokens == plain([*prompt, *first.tokens, *more], SAMPLED, 6)
    assert harness.batches[begun] == [1 + len(more)]  # the last token of the text was never run


def test_what_is_cut_or_was_not_asked_for_is_not_parked() -> None:
    """A cancelled sequence, one that fills the context, and one without `keep` leave no parked prefix."""
    harness = Harness(max_positions=40)
    sequence_id, cut = harness.submit(PROMPTS[4], 30, keep=True)
    harness.run_steps(3)
    harness.engine.cancel(sequence_id)
    _, full = harness.submit(PROMPTS[4], 500, keep=True)
    silent = harness.finished(PROMPTS[4], 5)
    ends = [(each.ended.reason, each.ended.prefix_hash) for each in (cut, full, silent)]
    assert ends == [("cancelled", None), ("context", None), ("length", None)] and harness.engine.stats().parked == 0


@pytest.mark.parametrize("once", [True, False], ids=["verify", "session"])
def test_a_parked_prefix_is_kept_for_a_bounded_time(once: bool) -> None:
    """Then it is not held, and its blocks are free at the next step; a refused request does not renew it."""
    harness = Harness(config=EngineConfig(max_parked_s=60.0))
    first = harness.finished(PROMPTS[2], 5, once=once, keep=not once)
    assert first.ended.prefix_hash is not None
    harness.clock.now += 40.0
    with pytest.raises(RequestError, match="token id"):
        harness.submit([VOCAB + 1], prefix_hash=first.ended.prefix_hash)
    harness.engine.step()
    assert harness.engine.stats().parked == 1
    harness.clock.now += 20.0
    with pytest.raises(RequestError, match="not held"):
        harness.submit([1], prefix_hash=first.ended.prefix_hash)
    harness.engine.step()
    stats = harness.engine.stats()
    assert (stats.parked, stats.parked_blocks, stats.free_blocks) == (0, 0, stats.num_blocks)


def test_sessions_share_the_limit_of_parked_prefixes() -> None:
    """An owner's oldest gives way, whether a verify call or a session left it; nobody else's hash is taken."""
    harness = Harness(config=EngineConfig(max_parked=3))
    names = []
    for start in range(6):
        collector = harness.finished([start] * 9, 1, once=start % 2 == 0, keep=start % 2 == 1, owner=b"a")
        assert collector.ended.prefix_hash is not None
        names.append(collector.ended.prefix_hash)
    assert harness.engine.stats().parked == 3
    for owner, name in ((b"b", names[-1]), (b"a", names[0])):
        with pytest.raises(RequestError, match="not held"):
            harness.submit([1], prefix_hash=name, owner=owner)
    for name in names[3:]:
        harness.submit([1], 1, prefix_hash=name, owner=b"a")
    harness.run()
    assert harness.engine.stats().parked == 0


def test_parked_prefixes_are_evicted_for_running_sequences() -> None:
    """A cache full of parked prefixes still serves a long request."""
    harness = Harness(num_blocks=16, block_size=4)
    for start in range(6):
        harness.finished([start] * 9, 1, once=True)
    assert harness.engine.stats().parked > 0
    assert harness.finished(PROMPTS[0], 50).tokens == plain(PROMPTS[0], SAMPLED, 50)
