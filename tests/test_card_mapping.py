"""A draft with another tokenizer is judged through a map of tokens, and its card says what that costs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from tests.export_cli import run_export
from tests.tiny_models import SAMPLE_TEXT, make_tiny_model, make_tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from outrider.export.check.acceptance import Continuation, measure_ranks, summarize
from outrider.export.check.token_mapping import measure_mapping, share_kept
from outrider.export.cli.display import print_report
from outrider.export.make.pair import Judging, PairOptions, PairPaths, export_pair
from outrider.export.make.sweep import sweep_pair
from outrider.export.recipes import ExportOptions
from outrider.export.report.card import require_text_kept, warnings_of, words_of_mapping
from outrider.export.report.card_html import card_html
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import TokenMapping
from outrider.models.errors import ExportError, TokenizerMismatch
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import ModelLimits
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.text.vocabulary_map import VocabularyMap

PROSE = "The harbour was quiet that morning. Two fishing boats lay at the pier, and\n  nobody spoke. "
OPTIONS = PairOptions(
    ExportOptions("draft", "fp32", "onnxruntime", num_threads=1),
    ExportOptions("target", "fp32", "torch", num_threads=1),
)


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
    special = ["[UNK]", "[SEP]"]
    tokenizer.train_from_iterator(
        (PROSE * 9, *SAMPLE_TEXT),
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False),
    )
    root = tmp_path_factory.mktemp("wordpiece") / "wordpiece"
    root.mkdir()
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text('{"eos_token": "[SEP]"}')
    return make_tiny_model("llama", root, vocab_size=300, seed=5, num_hidden_layers=1)


def measured(draft: Path, target: Path) -> TokenMapping:
    """Of the prose."""
    ours, theirs = Tokenizer.from_dir(draft), Tokenizer.from_dir(target)
    return measure_mapping(VocabularyMap(theirs, ours), theirs, ours, [theirs.encode(PROSE), theirs.encode("x_1")])


def test_a_tokenizer_that_keeps_every_text_covers_some_ids(bpe: Path, strangers: PairPaths) -> None:
    """The bytes and the merges that both have; nothing is changed, and the draft may be written."""
    found = measured(bpe, strangers.target)
    assert (found.text_kept, found.changes) == (1.0, ())
    assert 256 / 300 < found.ids_covered < 1.0 and 0.5 < found.text_covered <= 1.0
    assert found.target_tokenizer == Tokenizer.from_dir(strangers.target).fingerprint
    require_text_kept(found, "a", "b")


def test_a_tokenizer_that_changes_texts_is_recognised(wordpiece: Path, strangers: PairPaths) -> None:
    """Case, line breaks and spaces are lost: far less than all comes back, and the draft is refused in those words."""
    found = measured(wordpiece, strangers.target)
    assert found.text_kept < 0.7
    assert {"upper case", "line breaks", "runs of spaces"} <= set(found.changes)
    with pytest.raises(ExportError, match=r"draft a cannot write the text of b: .* upper case, line breaks.*--force"):
        require_text_kept(found, "a", "b")


def test_the_kept_share_counts_lines_from_both_ends(wordpiece: Path, bpe: Path) -> None:
    """A lower-case word in the middle of a line costs what is between the changes; a lost line break one character."""
    tokenizer = Tokenizer.from_dir(wordpiece)
    assert share_kept(tokenizer, ["the boats lay"]) == 1.0
    assert share_kept(tokenizer, ["the boats Lay"]) == 12 / 13
    assert share_kept(tokenizer, ["the boats\n"]) == 9 / 10
    assert share_kept(Tokenizer.from_dir(bpe), [PROSE, "  x = 1\n", "東京 😀"]) == 1.0
    assert share_kept(tokenizer, []) == 1.0


class Masked:
    """A SequenceRuntime that is sure of token 5 and has no score for token 7."""

    def __init__(self) -> None:
        self.limits = ModelLimits(16, 64)
        self.length = 0

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after the last token."""
        self.length += len(tokens)
        logits = np.zeros(16, np.float32)
        logits[5], logits[7] = 9.0, -np.inf
        return logits

    def truncate(self, length: int) -> None:
        """Cuts back."""
        self.length = length

    def close(self) -> None:
        """Nothing to release."""


def test_picks_without_a_score_are_counted_apart() -> None:
    """A guess that is wrong had a score; one that no token writes had none."""
    texts = [Continuation((1,), (5, 7, 6, 7), SamplingParams(temperature=t, seed=1)) for t in (0.0, 0.8)]
    for found in summarize(measure_ranks(Masked(), texts, num_ids=16), "t"):
        assert (found.unscored, found.rate) == (0.5, 0.25)
    assert '"unscored":0.5' in found.model_dump_json()
    (scored,) = summarize(measure_ranks(Masked(), [Continuation((1,), (5, 6), SamplingParams())], num_ids=16), "t")
    assert scored.unscored == 0.0 and "unscored" not in scored.model_dump_json()  # versions before it read that


def test_a_pair_of_two_tokenizers_is_judged_and_its_card_says_so(
    bpe: Path, strangers: PairPaths, tmp_path: Path
) -> None:
    """In the manifest, the terminal and the page; the bundle's identity does not depend on it."""
    draft, _ = export_pair(bpe, strangers.target, tmp_path / "out", options=OPTIONS, judging=Judging(is_forced=True))
    manifest = Bundle.open(draft.path).manifest
    mapping = manifest.report.mapping
    assert mapping is not None and mapping.text_kept == 1.0 and len(manifest.report.acceptance) == 3
    words = words_of_mapping(manifest)
    assert words is not None and words.startswith(
        f"Another tokenizer than the target's: one draft token writes {mapping.ids_covered:.0%} of the target's ids and"
    )
    console = Console(width=400, record=True, file=io.StringIO())
    print_report(console, draft)
    assert words in console.export_text()
    assert words.replace("'", "&#39;") in card_html([manifest])
    report = manifest.report.model_copy(update={"mapping": None})
    assert manifest.model_copy(update={"report": report}).digest == manifest.digest
    assert '"mapping"' in manifest.to_json()
    assert '"mapping"' not in manifest.model_copy(update={"report": report}).to_json()


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
