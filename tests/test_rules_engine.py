"""The acceptance rules in the engine: pending samples, what is verified, and whole texts by chi-square."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.chi_square import CHANCE, PROMPT, Languages
from tests.engine_harness import VOCAB, Collector, Harness
from tests.fake_runtime import FakeBatchRuntime

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.drafts import PendingDrafts
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize
from outrider.cloud.pending.samples import MAX_SAMPLES, SampleTrie
from outrider.cloud.seam import GenerateRequest
from outrider.models.acceptance import Rule, RuleTerms
from outrider.models.errors import RequestError
from outrider.models.rejection import WHOLE, Evidence, SparseDistribution
from outrider.models.sampling import SamplingParams
from outrider.models.tree_draft import ROOT, TreeDraft

REJECTION, TOLERANCE = RuleTerms(Rule.REJECTION), RuleTerms(Rule.TOLERANCE, delta=1.0)
SURE = SparseDistribution((1, 2), (WHOLE - 9, 9))


def path(base: int, first: int, tokens: Sequence[int], evidence: Sequence[Evidence], after: int = ROOT) -> TreeDraft:
    """A message with a path below the node `after`."""
    parents = [after, *range(first, first + len(tokens) - 1)]
    return TreeDraft(base, first, tokens, parents, [0] * len(tokens), evidence)


def likeliest(trie: SampleTrie) -> list[int]:
    return trie.likeliest(64)


def test_a_position_has_one_sample_whatever_is_resent() -> None:
    """The first that arrives after a text counts; others are dropped with all that hangs on them, until the commit."""
    trie, other = SampleTrie(), SparseDistribution((2, 1), (WHOLE - 7, 7))
    trie.merge_tree(path(0, 0, [1, 2], [SURE, SURE]), ())
    trie.merge_tree(path(0, 2, [2, 1, 1], [SURE, SURE, SURE]), ())
    trie.merge_tree(path(0, 0, [1, 2], [other, other]), ())
    assert likeliest(trie) == [1, 2] and trie.evidence(2) == [SURE, SURE]
    trie.advance(2)  # what was dropped does not come back
    assert likeliest(trie) == []
    trie.merge_tree(path(1, 5, [1], [other]), [2])
    assert likeliest(trie) == [1] and trie.evidence(1) == [other]


def test_a_late_draft_goes_on_where_its_path_is_the_text() -> None:
    trie = SampleTrie()
    for token in (1, 2):
        trie.advance(token)
    assert trie.merge_tree(path(0, 0, [1, 2, 1, 1], [SURE] * 4), [1, 2]) == 4
    assert likeliest(trie) == [1, 1]
    trie.merge_tree(path(0, 4, [1, 1, 2], [SURE] * 3), [1, 2])  # contradicts the text
    assert likeliest(trie) == [1, 1]


def test_nodes_wait_for_their_parents_and_memory_is_bounded() -> None:
    trie = SampleTrie()
    trie.merge_tree(path(0, 2, [1], [SURE], after=1), ())
    assert likeliest(trie) == []
    trie.merge_tree(path(0, 0, [2, 2], [SURE, SURE]), ())
    assert likeliest(trie) == [2, 2, 1]
    for start in range(3, 400):
        trie.merge_tree(path(0, start, [1], [SURE], after=start - 1), ())
    assert trie.num_nodes == MAX_SAMPLES
    for number in range(1000, 3000, 2):
        trie.merge_tree(path(0, number, [1], [SURE], after=number - 1), ())
    assert trie._num_held <= MAX_SAMPLES and len(trie._numbers) <= 1024


def pending(tokens: Sequence[int], q: SparseDistribution = SURE) -> PendingDrafts:
    """A session with history, and these tokens pending."""
    acceptance = AcceptanceEstimator(8)
    for _ in range(30):
        acceptance.observe([1, 2, 3], [1, 2, 9])
    drafts = PendingDrafts([], 100, acceptance, trie=SampleTrie())
    assert isinstance(drafts.trie, SampleTrie)
    drafts.trie.merge_samples(tokens, [q] * len(tokens))
    return drafts


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("with_trees", [False, True])
def test_what_is_verified_depends_neither_on_the_tokens_nor_on_what_hangs_below(
    policy: Policy, with_trees: bool
) -> None:
    """A step that is cheap for three tokens and dear for one: the first of them is verified with the others or without
    them, whatever was drawn. A policy that drops a tail by what the tokens are, or how many there are, is biased.
    """
    drafting = Drafting(8, policy, with_trees=with_trees)
    for size in range(1, 12):
        for _ in range(3):
            drafting.stepped(StepSize.of(size, 10), 0.040 if size == 1 else 0.060 if size < 8 else 0.200, False)
    chosen = []
    for tokens in ([1], [2], [1, 1, 1], [2, 1, 2], [1, 2, 1, 2, 1, 2, 1]):
        drafts = pending(tokens)
        (own,) = drafting.choose([drafts], 64, StepSize(1, 10), 10).values()
        assert list(own.tokens) == tokens[: len(own.tokens)] and len(own.evidence) == len(own.tokens)
        chosen.append((len(tokens), len(own.tokens)))
    most = max(num for _, num in chosen)
    assert most > 1 and all(num == min(length, most) for length, num in chosen)


def run_texts(
    languages: Languages, seeds: Sequence[int], *, policy: Policy = Policy.AUTO, once: bool = False
) -> list[list[int]]:
    """Texts by the engine: drafts of every length, late, cut, resent with other tokens, out of order."""
    runtime = FakeBatchRuntime(vocab_size=languages.size, block_size=4, num_blocks=1024)
    engine = Engine(runtime, EngineConfig(policy=policy, max_running=64, max_queue=10_000, looks_up=True))
    found: list[list[int]] = []
    rng = random.Random(seeds[0])
    for start in range(0, len(seeds), 64):
        sinks: list[tuple[int, int, Collector]] = []
        for seed in seeds[start : start + 64]:
            sink = Collector()
            request = GenerateRequest(
                PROMPT, languages.with_seed(seed), languages.length, patience_ms=0.0, terms=REJECTION
            )
            sinks.append((engine.submit(request, sink), seed, sink))
        numbers = dict.fromkeys((number for number, _, _ in sinks), 0)
        late: list[tuple[int, TreeDraft]] = []
        while engine.has_work:
            for number, seed, sink in sinks:
                if sink.end is None and rng.random() < 0.8:
                    tokens, qs = languages.block(sink.tokens, rng.randrange(1, 4), seed)
                    message = path(len(sink.tokens), numbers[number], tokens, qs)
                    numbers[number] += len(tokens)
                    late.append((number, message))
                    if rng.random() < 0.3:  # resent, with tokens drawn from other noise: must not count
                        others, _ = languages.block(sink.tokens, len(tokens), seed + 10**9)
                        qs = [q if q.of(t) else languages.q(sink.tokens) for q, t in zip(qs, others, strict=True)]
                        if all(q.of(t) for q, t in zip(qs, others, strict=True)):
                            late.append((number, path(len(sink.tokens), numbers[number], others, qs)))
                            numbers[number] += len(tokens)
            kept = []
            for number, message in late:
                if rng.random() < 0.7:
                    try:
                        engine.draft_tree(number, message)
                    except RequestError as error:
                        assert error.code in ("stale_draft", "unknown_session")
                else:
                    kept.append((number, message))  # arrives late
            late = kept
            engine.step()
        found += [sink.tokens for _, _, sink in sinks]
    totals = engine.stats().totals
    assert totals.accepted > 0 and totals.tested > totals.accepted and totals.rejection_sequences == len(seeds)
    return found


def test_sessions_by_rejection_write_every_text_as_often_as_the_target() -> None:
    """With drafts of varying lengths, delayed, resent with other tokens, and stale."""
    languages = Languages()
    assert languages.excess(run_texts(languages, range(2000))) < CHANCE


def test_a_text_by_rejection_is_the_same_given_the_same_messages() -> None:
    languages = Languages()
    assert run_texts(languages, range(64)) == run_texts(languages, range(64))


@pytest.mark.parametrize(
    ("terms", "evidence"),
    [
        (REJECTION, ()),
        (REJECTION, (-0.1,)),
        (REJECTION, (SparseDistribution((1, 2), (WHOLE, 1)),)),
        (REJECTION, (SparseDistribution((2, 3), (WHOLE - 1, 1)),)),
        (TOLERANCE, ()),
        (TOLERANCE, (SURE,)),
        (RuleTerms(), (SURE,)),
    ],
)
def test_a_draft_without_what_its_rule_needs_is_refused_by_name(
    terms: RuleTerms, evidence: tuple[Evidence, ...]
) -> None:
    """In an item, and in a session; the session goes on."""
    harness = Harness()
    request = GenerateRequest((1, 2), SamplingParams(), 4, draft=(1,), once=True, terms=terms, evidence=evidence)
    with pytest.raises(RequestError) as refused:
        harness.engine.submit(request, Collector())
    assert refused.value.code == "wrong_evidence"
    sink = Collector()
    number = harness.engine.submit(GenerateRequest((1, 2), SamplingParams(), 4, terms=terms), sink)
    with pytest.raises(RequestError) as refused:
        harness.engine.draft_tree(number, path(0, 0, [1], evidence))
    assert refused.value.code == "wrong_evidence"
    if terms.rule.needs_evidence:
        with pytest.raises(RequestError) as refused:
            harness.engine.draft(number, 0, [[1]])
        assert refused.value.code == "wrong_evidence"
    harness.run()
    assert sink.end is not None and sink.end.reason == "length"


def test_ids_beyond_the_vocabulary_are_refused_in_a_distribution_too() -> None:
    harness = Harness()
    number = harness.engine.submit(GenerateRequest((1, 2), SamplingParams(), 4, terms=REJECTION), Collector())
    beyond = SparseDistribution((1, VOCAB), (WHOLE - 1, 1))
    with pytest.raises(RequestError) as refused:
        harness.engine.draft_tree(number, path(0, 0, [1], [beyond]))
    assert refused.value.code == "token_out_of_range"


def test_tolerance_is_counted_and_ends_with_its_delta() -> None:
    """Accepts what the target would not have picked, calibrates, and reports both."""
    harness = Harness(config=EngineConfig(policy=Policy.VERIFY))
    sink = Collector()
    terms = RuleTerms(Rule.TOLERANCE, delta=30.0, acceptance=0.5)
    params = SamplingParams(temperature=1.0, seed=4)
    number = harness.engine.submit(GenerateRequest((1, 2), params, 12, terms=terms), sink)
    harness.step()
    sent = 0
    while sink.end is None:
        harness.engine.draft_tree(number, path(len(sink.tokens), sent, [5, 6, 7], [-0.5] * 3))
        sent += 3
        harness.step()
    usage, totals = sink.end.usage, harness.engine.stats().totals
    assert usage.tolerated_tokens == totals.tolerated > 0
    assert usage.delta is not None and usage.delta < 30.0
    assert totals.tolerance_sequences == 1
    assert sink.tokens[1:4] == [5, 6, 7]
