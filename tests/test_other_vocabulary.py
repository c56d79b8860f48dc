"""Tests drafts with another tokenizer than the target's: how a text is split, and scores against a plain twin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_runtime import FakeSequenceRuntime
from tests.mapped_twin import MAPS, PlainTwin, Row, assert_alike, fake, placed, row_of
from tests.other_tokenizers import DRAFTS, END, TEXT, tokenizer_of

from outrider.edge.drafting.drafter import ModelDrafter
from outrider.models.errors import ModelFault
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.processor_plan import ProcessorPlan
from outrider.models.runtimes.base import BranchingRuntime, ShareableRuntime
from outrider.models.runtimes.mapped_scores import covers_of
from outrider.models.runtimes.mapped_sequence import MappedSequence, mapped
from outrider.models.text.vocabulary_map import VocabularyMap

IDS = st.lists(st.integers(0, tokenizer_of("target").size - 1), min_size=1, max_size=12)
"""Any ids: ends inside characters, the end token, text that no tokenizer writes so."""
WRITTEN = st.sampled_from(TEXT.splitlines(keepends=True)).map(lambda line: tokenizer_of("target").encode(line) or [1])


BYTES = {
    tokenizer_of("target").token_bytes(index)[0]: index
    for index in range(tokenizer_of("target").size)
    if len(tokenizer_of("target").token_bytes(index)) == 1
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_text_in_pieces_is_split_as_a_whole(kind: str) -> None:
    mapping, draft = MAPS[kind], tokenizer_of(kind)
    for text in (TEXT, TEXT * 3, TEXT.replace("\n", " "), "x", " leading", "a" * 50):
        place = placed(mapping, tokenizer_of("target").encode(text))
        tail = mapping.text.split(place.tail, place.cut.at_start)
        assert [*place.cut.since(0), *tail.tokens] == draft.encode(text)
        assert place.tail.endswith(text[-1:].encode()) and tail.ends[-1] == len(place.tail)


@pytest.mark.parametrize("kind", DRAFTS)
@given(ids=IDS, more=IDS)
def test_cuts_do_not_depend_on_how_a_text_came(kind: str, ids: list[int], more: list[int]) -> None:
    """The same bytes, id by id and byte by byte."""
    target = tokenizer_of("target")
    plain = [each for each in ids + more if each not in target.special_ids]
    spelled = [BYTES[byte] for byte in b"".join(map(target.token_bytes, plain))]
    one, other = (placed(MAPS[kind], each) for each in (plain, spelled))
    assert (one.cut.since(0), one.tail, one.cut.key) == (other.cut.since(0), other.tail, other.cut.key)


@pytest.mark.parametrize("kind", DRAFTS)
@settings(max_examples=40)
@given(data=st.data(), max_branches=st.sampled_from([1, 2, 8]))
def test_scores_are_those_of_a_plain_twin(kind: str, data: st.DataObject, max_branches: int) -> None:
    """After any course of a text: what was appended, cut back, branched."""
    sequence, twin = MappedSequence(fake(kind, max_branches), MAPS[kind]), PlainTwin(kind, row_of(kind))
    text: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        ids = data.draw(st.one_of(IDS, WRITTEN))
        what = data.draw(st.sampled_from(["extend", "branches", "truncate"]))
        if what == "truncate":
            del text[data.draw(st.integers(0, len(text))) :]
            sequence.truncate(len(text))
        elif what == "extend" or not text:
            text += ids
            assert_alike(sequence.extend(ids), twin, text)
        else:
            branches = [ids[: size + 1] for size in range(min(3, len(ids)))] + [data.draw(IDS)]
            for branch, row in zip(branches, sequence.extend_branches(branches), strict=True):
                assert_alike(row, twin, [*text, *branch])
        assert sequence.length == len(text)


def failing() -> tuple[MappedSequence, list[ModelFault]]:
    """A draft's sequence, and the faults of its next calls."""
    faults: list[ModelFault] = []

    def step(_: Sequence[int]) -> None:
        if faults:
            raise faults.pop()

    return MappedSequence(fake("gpt2", 1, on_step=step), MAPS["gpt2"]), faults


def test_the_target_s_own_tokenizer_costs_nothing() -> None:
    target = tokenizer_of("target")
    mapping, runtime = VocabularyMap(target, target), FakeSequenceRuntime(vocab_size=target.size)
    assert mapped(runtime, target, target) is runtime and mapping.covered(range(target.size)) == 1.0
    ids = target.encode(TEXT)
    place = placed(mapping, ids)
    assert [*place.cut.since(0), *mapping.text.split(place.tail, place.cut.at_start).tokens] == ids


@pytest.mark.parametrize("kind", DRAFTS)
def test_the_map_says_what_it_covers(kind: str) -> None:
    mapping, target, draft = MAPS[kind], tokenizer_of("target"), tokenizer_of(kind)
    for index, token in enumerate(mapping.token_of.tolist()):
        is_known = token < mapping.num_tokens and index not in target.special_ids
        assert not is_known or draft.token_bytes(token) == target.token_bytes(index)
    assert mapping.token_of[target.token_id(END)] == draft.token_id(END)
    assert 0.3 < mapping.covered(range(target.size)) < 1.0


class Knows(FakeSequenceRuntime):
    """A runtime that is sure of how a text goes on, and where it ends."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(vocab_size=MAPS[kind].num_tokens, max_branches=1)
        self.tokens = [*tokenizer_of(kind).encode(text), *tokenizer_of(kind).eos_token_ids]

    def extend(self, tokens: Sequence[int]) -> Row:
        super().extend(tokens)
        row = np.zeros(self.limits.vocab_size, np.float32)
        row[self.tokens[min(self.length, len(self.tokens) - 1)]] = 15.0
        return row


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_that_knows_the_text_guesses_the_target_s_ids(kind: str) -> None:
    """Also those that begin inside a token of the draft, or end behind one; and the end."""
    target, num_right, num_all = tokenizer_of("target"), 0, 0
    for text in (TEXT[:200], "class Parser:\n    pass", "x = tokens[0] + 10", "return name"):
        ids = [*target.encode(text), *target.eos_token_ids]
        sequence = MappedSequence(Knows(kind, text), MAPS[kind])
        is_right = [sequence.extend([index]).argmax() == after for index, after in itertools.pairwise(ids)]
        assert is_right[-1]
        num_right, num_all = num_right + sum(is_right), num_all + len(is_right)
    assert num_right > (0.75 if kind == "unigram" else 0.9) * num_all  # which writes indentations space by space


def test_a_text_beyond_the_draft_s_positions_is_begun_at_its_later_half() -> None:
    runtime, ids = fake("gpt2", max_positions=256), tokenizer_of("target").encode(TEXT * 3)
    sequence = MappedSequence(runtime, MAPS["gpt2"])
    for start in range(0, len(ids), 7):
        assert np.isfinite(sequence.extend(ids[start : start + 7])).any()
        assert np.isfinite(sequence.extend_branches([ids[:2], ids[:1]])).any() and 0 < runtime.length <= 256
    sequence.truncate(3)
    assert np.isfinite(sequence.extend(ids[3:5]).max())


def test_another_text_is_read_from_its_own_place() -> None:
    """A long text leaves nothing behind by which a shorter one with the same beginning would be read too late."""
    runtime, ids = fake("gpt2", max_positions=256), tokenizer_of("target").encode(TEXT * 4)
    sequence = MappedSequence(runtime, MAPS["gpt2"])
    sequence.extend(ids)
    for length in (260, 200, 60):
        sequence.truncate(4)
        sequence.extend(ids[100 : 100 + length])
        assert runtime.length >= min(placed(MAPS["gpt2"], [*ids[:4], *ids[100 : 100 + length]]).cut.length, 256 // 8)


@pytest.mark.parametrize("max_branches", [1, 8])
def test_a_long_text_is_seldom_read_again(max_branches: int) -> None:
    """Also where a drafted path goes to and fro over the place where the draft's positions end."""
    asked: list[int] = []
    runtime = fake("gpt2", max_branches, max_positions=256, on_step=lambda tokens: asked.append(len(tokens)))
    sequence = MappedSequence(runtime, MAPS["gpt2"])
    ids = tokenizer_of("target").encode(TEXT * 5)
    for start in range(len(ids) - 12):
        sequence.extend(ids[start : start + 1])
        if max_branches == 1:
            for depth in range(1, 12):
                sequence.extend(ids[start + depth : start + depth + 1])
            sequence.truncate(start + 1)
        else:
            sequence.extend_branches([ids[start + 1 : start + 9]])
    assert sum(size > 100 for size in asked) <= 2 * placed(MAPS["gpt2"], ids).cut.length // 128 + 2


def test_texts_of_one_model_run_together() -> None:
    asked: list[int] = []
    runtime = fake("pieces", on_branches=lambda branches: asked.append(len(branches)))
    one = mapped(runtime, tokenizer_of("target"), tokenizer_of("pieces"))
    assert isinstance(one, MappedSequence) and isinstance(one, ShareableRuntime) and isinstance(one, BranchingRuntime)
    other, ids = one.open_sequence(), tokenizer_of("target").encode("for index in range(10):\n    pass")
    one.extend(ids[:4])
    other.extend(ids[:6])
    asked.clear()
    rows = one.extend_branches_of([(one, [ids[4:6], ids[4:7]]), (other, [ids[6:7]])])
    assert max(asked) > 2 and np.array_equal(rows[1], rows[2])
    assert not isinstance(MappedSequence(fake("pieces", 1), MAPS["pieces"]), ShareableRuntime)
    other.close()
    one.close()
    assert runtime.is_closed


def test_a_failed_call_leaves_the_text_as_it_was() -> None:
    (sequence, faults), twin = failing(), PlainTwin("gpt2", row_of("gpt2"))
    ids = tokenizer_of("target").encode(TEXT[:120])
    sequence.extend(ids[:9])
    for start in (9, 10, 14):
        faults.append(ModelFault("the device is gone"))
        with pytest.raises(ModelFault):
            sequence.extend(ids[9:start] or ids[20:25])
        assert sequence.length == 9
    assert_alike(sequence.extend(ids[9:15]), twin, ids[:15])


def test_a_failed_call_for_a_row_that_is_no_longer_kept() -> None:
    """The draft's sequence ends where the text was cut, and runs its last token again."""
    (sequence, faults), twin = failing(), PlainTwin("gpt2", row_of("gpt2"))
    ids = tokenizer_of("target").encode("class Parser: pass")
    sequence.extend(ids)
    sequence.draft.hold(sequence._places[-1].cut)
    for _ in range(2):
        sequence.draft.rows = type(sequence.draft.rows)(MAPS["gpt2"].num_tokens)
        faults.append(ModelFault("the device is gone"))
        with pytest.raises(ModelFault):
            sequence.extend(ids[1:2])
    assert_alike(sequence.extend(ids[1:2]), twin, [*ids, ids[1]])
    assert_alike(sequence.extend(ids[2:4]), twin, [*ids, *ids[1:4]])


def test_where_the_grammar_allows_no_scored_id_nothing_is_guessed() -> None:
    """And the drafter does not fail: a grammar of digits, and a draft that is sure of a word."""
    target = tokenizer_of("target")
    with closing(GrammarCompiler(target, target.size, target.eos_token_ids)) as compiler:
        grammar = compiler.compile(GrammarSpec("regex", "[0-9]{1,9}"))
        drafter = ModelDrafter(MappedSequence(Knows("gpt2", "return name"), MAPS["gpt2"]), target.size)
        drafter.begin(target.encode("return"), SamplingParams(0.0), ProcessorPlan(grammar=grammar))
        assert drafter.guess([()], 4) == [[]]
        drafter.begin(target.encode("return"), SamplingParams(0.0))
        assert drafter.guess([()], 1)[0]


def test_a_normalizer_that_changes_the_text_asks_for_nothing_again() -> None:
    """Where the draft's tokens are not the text's bytes, only the text's end is a place between tokens."""
    target, draft = tokenizer_of("target"), tokenizer_of("normalized")
    mapping, ids = VocabularyMap(target, draft), target.encode("naming\uff0ctokens")
    assert len(covers_of(mapping, placed(mapping, ids))) <= 2
    assert np.isfinite(MappedSequence(FakeSequenceRuntime(vocab_size=draft.size), mapping).extend(ids)).any()
