"""What the report card shows is measured as drafting goes: acceptance, ranks, leads, times.

A draft with another tokenizer is judged through a map of tokens, and its card says what that costs.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from tests.engine_harness import Clock
from tests.export_cli import run_export
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.test_bundle import make_manifest
from tests.test_card import OPTIONS, reported
from tests.tiny_models import SAMPLE_TEXT, make_tiny_model, make_tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from outrider.export.check import timing
from outrider.export.check.acceptance import NEW_TOKENS, Continuation, Rounds, measure_ranks, play_rounds, summarize
from outrider.export.check.parity import SequenceSteps
from outrider.export.check.runner import measure_agreement, open_draft
from outrider.export.check.token_mapping import measure_mapping, share_kept
from outrider.export.cli.display import print_report
from outrider.export.make.pair import Judging, PairPaths, export_pair, judge, write_texts
from outrider.export.make.sweep import sweep_pair
from outrider.export.recipes import ExportOptions
from outrider.export.report.card import (
    TargetTimes,
    leads,
    require_text_kept,
    warnings_of,
    words_of_mapping,
)
from outrider.export.report.card_html import card_html
from outrider.export.source.model_source import read_source
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Acceptance, FileEntry, TokenMapping
from outrider.models.errors import ExportError, TokenizerMismatch
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes.base import ModelLimits, OneSequence, SequenceSlice
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.text.vocabulary_map import VocabularyMap


def test_rounds_are_counted_only_where_they_could_run_in_full() -> None:
    """Up to the first rejected token, past the target's own; a round that the text's end cuts short is left out."""
    matches = np.array([1, 1, 0, 0, 1, 1, 1, 1, 0, 1], dtype=np.bool_)
    assert play_rounds(matches, 4) == Rounds(tested=8, accepted=6, rounds=3)
    assert play_rounds(matches, 2) == Rounds(tested=7, accepted=5, rounds=4)
    assert play_rounds(matches[:3], 4) == Rounds()
    # With short ends: 1 1 0 | 0 | 1 1 1 1 (and the free token after it) | 1
    assert play_rounds(matches, 4, counts_short_ends=True) == Rounds(tested=9, accepted=7, rounds=4)


class Rows(OneSequence):
    """A SequenceRuntime of 16 tokens. row: logits after so many tokens, by token; those that it leaves out are 0."""

    def __init__(self, row: Callable[[int], dict[int, float]], *, max_positions: int = 512) -> None:
        super().__init__(ModelLimits(16, max_positions))
        self.fed: list[int] = []
        self._row = row

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after the last token."""
        self._length += len(tokens)
        self.fed.append(len(tokens))
        row = self._row(self.length)
        return np.array([row.get(token, 0.0) for token in range(16)], np.float32)

    def close(self) -> None:
        """Nothing to release."""


def measured(draft: Rows, *texts: Continuation, num_ids: int = 16) -> Acceptance:
    """The draft's acceptance along texts of one temperature."""
    (found,) = summarize(measure_ranks(draft, texts, num_ids=num_ids), "t")
    return found


def one_hot(answers: Sequence[int]) -> Rows:
    """Is sure of one token at every position: `answers[position]`."""
    return Rows(lambda position: {answers[position]: 99.0})


def continuation(prompt: tuple[int, ...], text: tuple[int, ...], temperature: float = 0.0) -> Continuation:
    """What a target wrote."""
    return Continuation(prompt, text, SamplingParams(temperature=temperature, seed=1))


def test_acceptance_is_of_single_steps_along_the_targets_text() -> None:
    """The prompt in one piece, then a token at a time, as drafting goes; matches at three of four positions."""
    draft = one_hot([0, 0, 5, 6, 9, 8])
    found = measured(draft, continuation((1, 2), (5, 6, 7, 8)))
    assert draft.fed == [2, 1, 1, 1]
    assert (found.rate, found.tested_tokens, found.target) == (0.75, 4, "t")
    rows = [(row.depth, row.rate, row.tokens_per_pass) for row in found.by_depth]
    assert rows == [(1, 0.6667, 1.667), (2, 1.0, 3.0), (4, 0.6667, 3.0)]


def test_ranks_and_leads_are_counted_in_the_same_reading() -> None:
    """Among the best 1, 2, 4 and 8; by the lead of the best over the second, where there are tokens."""
    leads_of = [0, 0, 0.1, 0.2, 3.0, 9.0]  # of token 5 over token 9, and that over token 3 by 1
    draft = Rows(lambda at: {5: 99.0, 9: 99.0 - leads_of[at], 3: 98.0 - leads_of[at]})
    found = measured(draft, continuation((1, 2), (5, 9, 3, 5)))
    assert draft.fed == [2, 1, 1, 1] and found.rate == 0.5
    assert [(row.width, row.rate) for row in found.by_width] == [(1, 0.5), (2, 0.75), (4, 1.0), (8, 1.0)]
    rows = [(row.from_gap, row.share, row.rates) for row in found.by_gap]
    assert rows == [(0.0, 0.5, (0.5, 0.5)), (2.0, 0.25, (0.0, 0.0)), (4.0, 0.25, (1.0, 0.0))]
    assert leads(found) == ("0 to 2", "2 to 4", "over 4")


def test_the_error_is_that_of_texts_which_differ() -> None:
    """Two texts, one always and one never accepted: a third is unknown."""
    found = measured(one_hot([0, 5, 5, 5]), continuation((1,), (5, 5)), continuation((1,), (6, 6)))
    assert found.rate == 0.5 and found.error == pytest.approx(np.sqrt(2 * 1.0**2) / 4, abs=1e-4)


def test_padding_columns_are_no_tokens() -> None:
    """A padded vocabulary's columns beyond the tokenizer's ids are never picked."""
    found = measured(one_hot([0, 15]), continuation((1,), (0,)), num_ids=8)
    assert found.rate == 1.0  # all real columns are equal, and ties go to the lowest id


def test_texts_that_a_short_draft_cannot_hold_are_left_out() -> None:
    """An NPU's draft may be compiled for short sequences; if nothing fits, an error says so."""
    texts = [continuation((1,), (5,)), continuation((1, 1, 1), (5, 5))]
    long, short = (Rows(lambda at: {5: 99.0}, max_positions=most) for most in (3, 1))
    assert measured(long, *texts).tested_tokens == 1
    with pytest.raises(ExportError, match=f"no prompt fits 1 positions with {NEW_TOKENS} new tokens"):
        measured(short, *texts)


def test_a_draft_is_judged_at_the_temperature_that_decides_or_not_at_all(
    strangers: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only colder texts end early enough to fit, nobody knows whether it is good: an error, forced or not.

    Texts that are left out at another temperature are counted.
    """
    (tmp_path / "model.onnx").touch()
    monkeypatch.setattr("outrider.export.make.pair.open_draft", lambda *_: Rows(lambda at: {5: 99.0}, max_positions=3))
    manifest = make_manifest((FileEntry(path="model.onnx", size=1, sha256="0" * 64),), "0" * 64)
    options = ExportOptions("draft", "fp32", "onnxruntime")
    staged: Any = SimpleNamespace(writer=SimpleNamespace(directory=tmp_path), options=options, manifest=manifest)
    target, times = read_source(strangers.target), TargetTimes(20.0, 0.5, "as given")

    def judged(greedy: tuple[int, ...], sampled: tuple[int, ...], is_forced: bool) -> None:
        texts = [continuation((1,), greedy), continuation((1,), sampled, 0.8)]
        judge(staged, texts, 1, times, target, None, is_forced=is_forced)

    short, long = (5,), (5, 5, 5)
    for is_forced in (False, True):
        with pytest.raises(ExportError, match=f"no prompt fits 3 positions with {NEW_TOKENS} new tokens"):
            judged(short, long, is_forced)
    assert staged.manifest is manifest
    judged(long, short, True)
    assert "acceptance is without 1 of the 1 prompts" in staged.manifest.report.notes[-1]


def test_the_targets_cache_holds_the_longest_prompt_that_its_positions_hold(
    strangers: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded again with a larger cache where the usual one does not; short prompts still run together."""
    (tmp_path / "model.xml").touch()
    rows, opened = list[int](), list[int]()

    def open_target(path: Path, options: ExportOptions, *, kv_cache_bytes: int = 0) -> FakeBatchRuntime:
        opened.append((kv_cache_bytes or 256 << 20) // (9 << 20))  # blocks of 9 MB: the usual cache holds 28
        return FakeBatchRuntime(
            max_positions=2000, num_blocks=opened[-1], on_step=lambda batch: rows.append(len(batch))
        )

    monkeypatch.setattr("outrider.export.make.pair.open_target", open_target)
    prompts = [[(number + at) % 250 + 1 for at in range(length)] for number, length in enumerate((9, 12, 900, 1990, 7))]
    written = partial(write_texts, tmp_path, ExportOptions("target", "fp32"), read_source(strangers.target))
    texts = written(prompts)
    assert opened[0] == 28 and opened[1] * 16 >= 900 + NEW_TOKENS and len(opened) == 2
    assert [len(text.prompt) for text in texts[:4]] == [9, 12, 900, 7] and len(texts) == 4 * 3
    assert rows[0] == 2  # and not one at a time, in rooms for the longest
    assert [text.text for text in texts[:2]] == [text.text for text in written(prompts[:2])[:2]] and len(opened) == 3


def test_an_export_in_full_precision_agrees_with_its_source(
    tiny_model: Callable[[str], Path], tiny_ir: Callable[..., Path]
) -> None:
    """Every argmax and no divergence; INT8 has some; another model's logits have much."""
    from outrider.export.source.torch_source import load_source_model, source_logits

    model = load_source_model(tiny_model("qwen2"))
    texts = [(3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8)]
    truth = [source_logits(model, text) for text in texts]
    found = {}
    for int8 in (False, True):
        with closing(open_draft(tiny_ir("qwen2", int8=int8) / "openvino_model.xml", ExportOptions("draft"))) as draft:
            found[int8] = measure_agreement(SequenceSteps(draft), texts, truth, num_ids=96)
            stranger = measure_agreement(SequenceSteps(draft), texts, truth[::-1][:1] + truth[1:], num_ids=96)
    assert (found[False].argmax, found[False].rows) == (1.0, 12) and found[False].mean_kl < 1e-6
    assert 1e-6 < found[True].mean_kl < 0.1 < stranger.mean_kl


def test_a_targets_times_are_its_step_and_what_a_token_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that knows the answer, 5 + 0.7 n ms for n tokens; every step begins where the prompt ends."""
    clock, steps = Clock(), list[SequenceSlice]()

    def step(batch: Sequence[SequenceSlice]) -> None:
        steps.extend(batch)
        clock.now += (5.0 + 0.7 * len(batch[0].tokens)) / 1e3

    monkeypatch.setattr(time, "perf_counter", clock)
    times = timing.time_target(FakeBatchRuntime(vocab_size=16, on_step=step), [1] * 100)
    found = (times.token_ms, times.extra_ms, times.extend_tokens, times.extend_ms)
    assert found == pytest.approx((5.7, 0.7, 9, 11.3))
    assert {(piece.past, len(piece.tokens)) for piece in steps} == {(0, 100), *((100, n) for n in (1, 2, 3, 5, 9))}


@pytest.mark.parametrize(("speed", "at_most"), [(1.0, None), (2000.0, 1 + 2 * (3 + 5))])
def test_a_drafts_times_are_of_one_token_and_of_several(
    speed: float, at_most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the stated context, which is what is left in the cache; a step of seconds is not repeated as often."""
    clock, fed = Clock(), list[int]()

    def step(tokens: Sequence[int]) -> None:
        fed.append(len(tokens))
        clock.now += speed * (1.0 + 0.1 * len(tokens)) / 1e3

    monkeypatch.setattr(time, "perf_counter", clock)
    draft = FakeSequenceRuntime(vocab_size=16, on_step=step)
    times = timing.time_draft(draft, [1] * 128)
    assert (times.token_ms, times.extend_ms) == pytest.approx((speed * 1.1, speed * 1.8))
    assert (times.extend_tokens, draft.length) == (8, 128) and at_most in (None, len(fed))


def test_the_machine_is_its_processor_not_its_name() -> None:
    """Nothing in a manifest tells whose machine it was."""
    import platform

    words = timing.machine(3)
    assert words.endswith(", 3 threads") and platform.node() not in words
    assert timing.machine(1).endswith(", 1 thread")


def test_picks_of_the_judge_are_those_of_the_sampler() -> None:
    """The draft is judged by the picks that it makes when it drafts: same seed, same position."""
    params = SamplingParams(temperature=0.8, seed=1)
    wanted = tuple(pick(np.zeros(16, np.float32), params, position) for position in (2, 3, 4))
    assert measured(Rows(lambda at: {}), Continuation((1, 2), wanted, params)).rate == 1.0 and len(set(wanted)) > 1


def test_picks_without_a_score_are_counted_apart() -> None:
    """A guess that is wrong had a score; one that no token writes had none."""
    draft = Rows(lambda at: {5: 99.0, 7: -np.inf})
    for temperature in (0.0, 0.8):
        found = measured(draft, continuation((1,), (5, 7, 6, 7), temperature))
        assert (found.unscored, found.rate) == (0.5, 0.25)
    assert '"unscored":0.5' in found.model_dump_json()
    scored = measured(draft, continuation((1,), (5, 6)))
    assert scored.unscored == 0.0 and "unscored" not in scored.model_dump_json()  # versions before it read that


# -- through a map of tokens -------------------------------------------------------------------------------------------


PROSE = "The harbour was quiet that morning. Two fishing boats lay at the pier, and\n  nobody spoke. "


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft with byte-level BPE of longer tokens than the strangers'."""
    root = tmp_path_factory.mktemp("bpe") / "other"
    make_tiny_tokenizer(root, vocab_size=450, special_tokens=("<|stop|>",), text=(PROSE * 9,))
    return make_tiny_model("llama", root, vocab_size=450, seed=5, num_hidden_layers=1)


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft with a tokenizer like BERT's: lower case, and words without what is between them."""
    tokenizer = Backend(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        (PROSE * 9, *SAMPLE_TEXT),
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False),
    )
    root = tmp_path_factory.mktemp("wordpiece") / "wordpiece"
    root.mkdir()
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text('{"eos_token": "[SEP]"}')
    return make_tiny_model("llama", root, vocab_size=300, seed=5, num_hidden_layers=1)


def mapping_of(draft: Path, target: Path) -> TokenMapping:
    """Of the prose."""
    ours, theirs = Tokenizer.from_dir(draft), Tokenizer.from_dir(target)
    return measure_mapping(VocabularyMap(theirs, ours), theirs, ours, [theirs.encode(PROSE), theirs.encode("x_1")])


def test_a_tokenizer_that_keeps_every_text_covers_some_ids(bpe: Path, strangers: PairPaths) -> None:
    """The bytes and the merges that both have; nothing is changed, and the draft may be written."""
    found = mapping_of(bpe, strangers.target)
    assert (found.text_kept, found.changes) == (1.0, ())
    assert 256 / 300 < found.ids_covered < 1.0 and 0.5 < found.text_covered <= 1.0
    assert found.target_tokenizer == Tokenizer.from_dir(strangers.target).fingerprint
    require_text_kept(found, "a", "b")


def test_a_tokenizer_that_changes_texts_is_recognised(wordpiece: Path, strangers: PairPaths) -> None:
    """Case, line breaks and spaces are lost: far less than all comes back, and the draft is refused in those words."""
    found = mapping_of(wordpiece, strangers.target)
    assert found.text_kept < 0.7 and {"upper case", "line breaks", "runs of spaces"} <= set(found.changes)
    with pytest.raises(ExportError, match=r"draft a cannot write the text of b: .* upper case, line breaks.*--force"):
        require_text_kept(found, "a", "b")


def test_the_kept_share_counts_lines_from_both_ends(wordpiece: Path, bpe: Path) -> None:
    """A lower-case word in the middle of a line costs what is between the changes; a lost line break one character."""
    tokenizer = Tokenizer.from_dir(wordpiece)
    for texts, share in ((["the boats lay"], 1.0), (["the boats Lay"], 12 / 13), (["the boats\n"], 9 / 10), ([], 1.0)):
        assert share_kept(tokenizer, texts) == share
    assert share_kept(Tokenizer.from_dir(bpe), [PROSE, "  x = 1\n", "東京 😀"]) == 1.0


def test_a_pair_of_two_tokenizers_is_judged_and_its_card_says_so(
    bpe: Path, strangers: PairPaths, tmp_path: Path
) -> None:
    """In the manifest, the terminal and the page; the bundle's identity does not depend on it."""
    draft, _ = export_pair(bpe, strangers.target, tmp_path / "out", options=OPTIONS, judging=Judging(is_forced=True))
    manifest = Bundle.open(draft.path).manifest
    mapping = manifest.report.mapping
    assert mapping is not None and mapping.text_kept == 1.0 and len(manifest.report.acceptance) == 3
    words = words_of_mapping(manifest) or ""
    assert words.startswith(
        f"Another tokenizer than the target's: one draft token writes {mapping.ids_covered:.0%} of the target's ids and"
    )
    console = Console(width=400, record=True, file=io.StringIO())
    print_report(console, draft)
    assert words in console.export_text() and words.replace("'", "&#39;") in card_html([manifest])
    without = reported(manifest, mapping=None)
    assert without.digest == manifest.digest
    assert ['"mapping"' in each.to_json() for each in (manifest, without)] == [True, False]


def test_a_draft_that_cannot_write_the_text_is_refused_unless_forced(
    wordpiece: Path, strangers: PairPaths, tmp_path: Path
) -> None:
    """By the pair and by the sweep; forced, the card warns."""
    for make in (export_pair, sweep_pair):
        with pytest.raises(ExportError, match="wordpiece cannot write the text of target: its tokenizer changes"):
            make(wordpiece, strangers.target, tmp_path / "out", options=OPTIONS)
        assert not (tmp_path / "out").exists()
    forced = Judging(is_forced=True)
    draft, _ = export_pair(wordpiece, strangers.target, tmp_path / "out", options=OPTIONS, judging=forced)
    (said,) = [words for words in warnings_of(draft.manifest) if "cannot write" in words]
    assert "upper case" in said and "keeps a text as it is" in said


def test_the_command_can_ask_for_one_tokenizer(
    bpe: Path,
    strangers: PairPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Then two are refused, by the first difference."""
    out = tmp_path / "out"
    assert run_export(monkeypatch, "pair", str(bpe), str(strangers.target), "--out", str(out), "--same-tokenizer") == 2
    assert "first difference" in capsys.readouterr().err
    with pytest.raises(TokenizerMismatch):
        sweep_pair(bpe, strangers.target, out, judging=Judging(same_tokenizer=True))
