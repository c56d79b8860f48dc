"""The bundled reference pair: its files, sizes and numbers, the pure parts of what made it, and what is exported of it
for a first use: kept, and widened, which computes the same.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tests.export_cli import run_export
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer
from tokenizers import Tokenizer

from outrider import reference
from outrider.edge.cli.draft_source import NPU_SHAPES, default_draft, draft_kind
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.export.cli import main as export_cli
from outrider.export.distill.trainer.losses import match_bound
from outrider.export.make.pair import PairPaths
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import identify, read_source
from outrider.export.source.torch_source import load_source_model, source_logits
from outrider.export.source.widen import widen
from outrider.models.bundle.bundle import hash_file
from outrider.models.bundle.reference_export import export_arguments
from outrider.models.errors import ExportError, RuntimeUnavailable
from training.card import render
from training.corpus import SourceFile, load_corpus, split
from training.evaluate import heldout_passages, load_heldout
from training.prompts import MAX_TOKENS, MIN_TOKENS

HERE = Path(reference.__file__).parent


def stored(name: str) -> Any:
    """One of the JSON files beside the pair."""
    return json.loads((HERE / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(reference.target_dir() / "tokenizer.json"))


def test_the_package_loads_no_model_library() -> None:
    """Importing the pair's package and reading its prompts loads neither torch nor transformers."""
    code = (
        "import sys; from outrider import reference; reference.load_prompts(1); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tokenizers')))"
    )
    paths = {"PYTHONPATH": str(HERE.parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=paths, check=False).returncode == 0


def test_a_model_is_identified_without_a_model_library() -> None:
    """As `read_source` has it: a demo that finds its pair exported starts seconds earlier."""
    source = read_source(reference.draft_dir())
    assert identify(reference.draft_dir()) == (source.describe(), source.tokenizer.fingerprint)
    code = (
        "import sys; from outrider import reference; from outrider.export.source.model_source import identify; "
        "identify(reference.draft_dir()); sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=paths, check=False).returncode == 0


def test_the_pair_keeps_its_promises() -> None:
    """The target is at most 40 MB, the draft at most 4 MB, and the target has ten times the draft's parameters. Held-
    out perplexity is under 20 and two thirds of the tested tokens are accepted at temperature 0.8; after up to 900
    tokens, 0.55 of them, and 0.66 of greedy ones.
    """
    metrics, weights = stored("metrics.json"), "model.safetensors"
    for directory, largest in ((reference.target_dir(), 40_000_000), (reference.draft_dir(), 4_000_000)):
        assert (directory / weights).stat().st_size <= largest
    assert metrics["parameters"]["target"] >= 10 * metrics["parameters"]["draft"]
    assert metrics["heldout"]["target"]["perplexity"] < 20.0
    assert {row["temperature"]: row["in_chain"] for row in metrics["acceptance"]}[0.8] >= 0.66
    rows = metrics["acceptance_by_context"]
    contexts = itertools.product((0.0, 0.8), (100, 300, 600, 900))
    assert [(row["temperature"], row["context"]) for row in rows] == list(contexts)
    for row in rows:
        assert row["in_chain"] >= {0.0: 0.66, 0.8: 0.55}[row["temperature"]] and row["error"] < 0.015


def test_both_models_have_one_tokenizer() -> None:
    """tokenizer.json and tokenizer_config.json are equal byte for byte, and name a class that every release knows."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (reference.target_dir() / name).read_bytes() == (reference.draft_dir() / name).read_bytes()
    config = json.loads((reference.draft_dir() / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize(
    "text", ["def f(x_1):\n    return x_1\n", "naïve – 東京 🙂", "\t\r\n  \n\n\tif a != b :", "x" * 50]
)
def test_the_tokenizer_gives_back_every_byte(tokenizer: Tokenizer, text: str) -> None:
    """Encoding and decoding is the identity on code, on other scripts and on odd white space."""
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_prompts_are_many_distinct_and_from_heldout_files(tokenizer: Tokenizer) -> None:
    """At least 240 prompts of 30 to 120 tokens, none twice, each found in its held-out file at its line."""
    texts = {entry["path"]: entry["text"] for entry in stored("heldout.json")}
    prompts = reference.load_prompts()
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= 240
    for prompt in prompts:
        lines = texts[prompt.file].split("\n")[prompt.line - 1 :]
        assert "\n".join(lines).startswith(prompt.text.partition("\n\n")[2]) or "\n".join(lines).startswith(prompt.text)
        assert MIN_TOKENS <= len(tokenizer.encode(prompt.text).ids) <= MAX_TOKENS


def test_a_limit_takes_the_first_prompts() -> None:
    """`load_prompts(3)` is the start of all prompts; a negative limit is an error that says so."""
    assert reference.load_prompts(3) == reference.load_prompts()[:3]
    with pytest.raises(ValueError, match="limit is -1"):
        reference.load_prompts(-1)


def test_the_split_is_deterministic_and_disjoint() -> None:
    """Whole files are held out, the same ones in any order of reading, and none is in both halves."""
    files = [SourceFile(f"m{index}.py", "x = 1\n" * (1500 + index)) for index in range(40)]
    corpus, backwards = split(files, num_heldout=5), split(files[::-1], num_heldout=5)
    heldout, train = ({file.path for file in half} for half in (corpus.heldout, corpus.train))
    assert heldout == {file.path for file in backwards.heldout} and not heldout & train
    assert (len(corpus.heldout), len(corpus.train)) == (5, 35)


def test_the_library_gives_the_stored_heldout_files() -> None:
    """Reading and splitting this Python's library holds out files of which none is trained on."""
    corpus = load_corpus()
    assert not {file.path for file in corpus.heldout} & {file.path for file in corpus.train}
    trained = stored("training.json")["corpus"]
    if platform.python_version() == trained["python"]:
        assert [file.path for file in corpus.heldout] == trained["heldout"]


def test_the_card_shows_the_stored_numbers() -> None:
    """MODEL_CARD.md is what `card` renders from metrics.json and training.json, so it cannot go stale."""
    rendered = render(stored("metrics.json"), stored("training.json"))
    assert (HERE / "MODEL_CARD.md").read_text(encoding="utf-8") == rendered


def test_the_match_bound_is_the_match_probability_when_nothing_is_left_out() -> None:
    """The bound equals the share of equal picks under shared Gumbel noise, and is 1 for equal distributions."""
    generator = torch.Generator().manual_seed(1)
    log_p = torch.randn(20, generator=generator).log_softmax(-1)
    log_q = torch.randn(20, generator=generator).log_softmax(-1)
    nothing = torch.zeros(())
    noise = -torch.log(-torch.log(torch.rand(40_000, 20, generator=generator).clamp(min=1e-12)))
    share = ((log_p + noise).argmax(-1) == (log_q + noise).argmax(-1)).float().mean()
    assert math.isclose(match_bound(log_p, log_q, nothing, nothing), share, abs_tol=0.01)
    assert math.isclose(match_bound(log_p, log_p, nothing, nothing), 1.0, abs_tol=1e-5)


def test_the_models_load_and_write_python(tokenizer: Tokenizer) -> None:
    """Both directories load with AutoModelForCausalLM, and each predicts its own kind of text better than chance. Over
    real text their likeliest tokens agree in more than half of the positions 600 to 900.
    """
    start = torch.tensor([tokenizer.encode("import os\nimport sys\n\n\ndef main():\n    if __name__ ==").ids])
    far = torch.tensor(heldout_passages(tokenizer, load_heldout(), count=4, length=900))
    picks = []
    for directory in (reference.target_dir(), reference.draft_dir()):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.inference_mode():
            next_id = int(model(input_ids=start).logits[0, -1].argmax())
            picks.append(model(input_ids=far).logits.argmax(-1))
        assert tokenizer.decode([next_id]).strip() in {"'__", '"__', "'", '"', "__"}
        assert model.config.max_position_embeddings >= 1024
    agrees = (picks[0] == picks[1]).float().mean(dim=0)
    assert float(agrees[600:].mean()) > 0.55  # with the draft of 256 positions it was 0.28


# -- what is exported of it for a first use ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "models", "widen_mb", "precision"),
    [
        (["reference"], (reference.draft_dir(), reference.target_dir()), 700.0, "fp32"),
        (["reference", "--widen", "0"], (reference.draft_dir(), reference.target_dir()), None, None),
        (
            ["reference", "--widen", "300", "--target-precision", "int8"],
            (reference.draft_dir(), reference.target_dir()),
            300.0,
            "int8",
        ),
        (["DRAFT", "TARGET"], ("DRAFT", "TARGET"), None, None),
        # As it does for `distill`, the name stands for the one model in its place.
        (["mine", "reference"], ("mine", reference.target_dir()), None, None),
        (["reference", "theirs"], (reference.draft_dir(), "theirs"), None, None),
    ],
)
def test_the_reference_target_is_widened_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    models: tuple[object, object],
    widen_mb: float | None,
    precision: str | None,
) -> None:
    """Said on the screen where it was not asked for; the next command is printed; others' pairs stay as they are."""
    export = MagicMock(return_value=())
    monkeypatch.setattr(export_cli, "export_pair", export)
    assert run_export(monkeypatch, "pair", *arguments) == 0
    shown, given = capsys.readouterr(), export.call_args
    target = given.kwargs["options"].target
    assert (given.args[:2], target.widen_mb, target.precision) == (models, widen_mb, precision)
    assert ("is widened to 700 MB" in shown.err) == (widen_mb == 700.0)
    assert shown.out.endswith("Serve it: outrider-cloud serve bundles/target\n")


def test_the_cached_pair_is_printed_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the commands of the device and the server read; only the reference pair is kept."""
    export = MagicMock(return_value=PairPaths(Path("d"), Path("t")))
    monkeypatch.setattr(export_cli, "export_reference_pair", export)
    for given, choice, widen_mb, draft in (
        (700.0, DraftChoice(emulate_npu=True), 700.0, ExportOptions("draft", device="npu", static_shapes=NPU_SHAPES)),
        (0.0, DraftChoice("onnxruntime"), None, ExportOptions("draft", runtime="onnxruntime")),
    ):
        assert run_export(monkeypatch, *export_arguments(given, *draft_kind(choice))) == 0
        assert json.loads(capsys.readouterr().out) == {"draft": "d", "target": "t"}
        options = export.call_args.kwargs
        assert (options["widen_mb"], options["target_precision"], options["draft"]) == (widen_mb, "fp32", draft)
    assert run_export(monkeypatch, "pair", "DRAFT", "TARGET", "--cached") == 2
    assert "--cached keeps the pair 'reference' only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        *((option, option) for option in ("--ahead-of-time", "--chat", "--sweep", "--keep", "--force", "--overwrite")),
        ("--same-tokenizer", "--same-tokenizer"),
        ("--out x", "--out"),
        ("--npu-platform NPU4000", "--npu-platform"),
        ("--target-device gpu", "--target-device"),
        ("--target-runtime torch", "--target-runtime"),
        ("--prompts x.json", "--prompts"),
        ("--step-ms 15", "--step-ms"),
        ("--extra-ms 1", "--extra-ms"),
        ("--rtt-ms 20", "--rtt-ms"),
        ("--threads 2", "--threads"),
        ("--threads 0 --out bundles", "--out, --threads"),  # also one that is given with its default
    ],
)
def test_the_cached_pair_refuses_options_that_it_would_drop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, refused: str
) -> None:
    """By name, in one message, before any work."""
    monkeypatch.setattr(export_cli, "export_reference_pair", pytest.fail)
    assert run_export(monkeypatch, "pair", "reference", "--cached", "--widen", "0", *words.split()) == 2
    assert f"--cached does not take {refused}; leave out" in " ".join(capsys.readouterr().err.split())


def test_without_the_exporter_a_run_asks_for_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of advice: to name one."""
    monkeypatch.setattr("outrider.edge.cli.draft_source.is_installed", lambda name: name != "torch")
    with pytest.raises(RuntimeUnavailable, match=r"'torch' is not installed\. Get a draft from your server with"):
        default_draft(AS_BUNDLED)


def make_source(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    size = make_tiny_tokenizer(directory)
    return make_tiny_model(family, directory, vocab_size=size, **overrides)


def logits(directory: Path) -> NDArray[np.float32]:
    return source_logits(load_source_model(directory), range(2, 60))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {"mlp_bias": True}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {})],
)
def test_a_widened_model_computes_the_same(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """Logits move by no more than the order of a sum moves them; the same files are written again.

    Added neurons do real work: they are not zero, and far from the denormal numbers that would make kernels slow.
    """
    source = make_source(tmp_path / "source", family, **overrides)
    widened = widen(source, tmp_path / "wide", 4.0)
    before, after = logits(source), logits(tmp_path / "wide")
    assert np.abs(after - before).max() <= 2e-6 * np.abs(before).max()
    assert widened.architecture.parameters * 4e-6 == pytest.approx(4.0, rel=0.02)
    original, tensors = read_source(source).architecture, load_file(tmp_path / "wide" / "model.safetensors")
    for kind in ("gate", "up"):
        added = tensors[f"model.layers.0.mlp.{kind}_proj.weight"][original.intermediate_size :]
        assert len(added) and np.abs(added).min() > 1e-3 and np.abs(added).max() < 1
    widen(source, tmp_path / "again", 4.0)
    first, second = ({p.name: hash_file(p) for p in (tmp_path / name).iterdir()} for name in ("wide", "again"))
    assert first == second


def test_what_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    """Too small a wish, a widened model, a place that is taken, a feed-forward of another make."""
    source, ungated = make_source(tmp_path / "source"), make_source(tmp_path / "ungated", "gpt_neox")
    wide = widen(source, tmp_path / "wide", 2.0).path
    for model, to, megabytes, message in (
        (source, tmp_path / "wider", 0.01, "cannot be widened"),
        (ungated, tmp_path / "wider", 2.0, r"\(gpt_neox\) cannot be widened: it has 0 matrices"),
        (source, wide, 2.0, "not empty"),
        (wide, tmp_path / "wider", 4.0, "widened already"),
    ):
        with pytest.raises(ExportError, match=message):
            widen(model, to, megabytes)
