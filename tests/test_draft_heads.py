"""Tests draft heads from training to serving: they learn, lie in the bundle, and guess from hidden states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engine_harness import Clock, Collector
from tests.requests import flat_request
from tests.test_draft_sources import GREEDY, heads_of
from tools.tiny_sources import make_tiny_source

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.pending.learning import HeadGuesses
from outrider.cloud.pending.selected_drafts import NOTHING, SelectedDrafts
from outrider.cloud.pending.sources import Verified
from outrider.cloud.pending.trie import (
    HEAD_KINDS,
)
from outrider.cloud.server.embedded import _heads
from outrider.cloud.server.target import target_identity
from outrider.export.distill.heads import HeadOptions, add_heads
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.draft_heads import FORMAT, HEADS_FILE, DraftHeads
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import HiddenRuntime, RuntimeOptions, SequenceSlice
from outrider.models.runtimes.torch_paged import load_causal_lm

OPTIONS = HeadOptions(count=2, target_dtype="fp32", steps=40, tokens=3000, row_length=32, rate=3e-3, num_threads=1)
PROMPTS = [f"def f{number}(x, y{number % 7}):" for number in range(40)]
TOKENS = [5, 9, 3, 3, 7, 1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers."""
    path = tmp_path_factory.mktemp("heads") / "model"
    make_tiny_source("llama", path, vocab_size=320, seed=1)
    return path


@pytest.fixture(scope="module")
def bundle(source: Path) -> Bundle:
    """The same as a target."""
    return export_model(source, source.parent / "target", ExportOptions("target", "fp32", "torch", num_threads=1))


@pytest.fixture(scope="module")
def trained(source: Path, bundle: Bundle) -> Bundle:
    """With heads."""
    made = add_heads(bundle.path, source, PROMPTS, OPTIONS, out=source.parent / "with heads")
    assert made is not None
    return made


def expected_states(source: Path) -> np.ndarray:
    """transformers' own last hidden states, after the final norm."""
    model = load_causal_lm(source, torch.float32, "eager")
    with torch.inference_mode():
        return model.model(torch.tensor([TOKENS])).last_hidden_state[0].numpy()  # type: ignore[no-any-return]


def test_heads_lie_beside_the_target_and_change_nothing_else(bundle: Bundle, trained: Bundle) -> None:
    """A bundle that opens, whose model has the same files and the same identity."""
    opened = Bundle.open(trained.path)
    heads = opened.manifest.draft_heads
    assert heads is not None and heads.file == HEADS_FILE and len(heads.acceptance) == 2
    assert heads.hidden_size == bundle.manifest.architecture.hidden_size
    assert heads.tested_tokens > 0 and heads.trained_tokens > 0
    assert set(opened.manifest.files) - set(bundle.manifest.files) == {
        entry for entry in opened.manifest.files if entry.path == HEADS_FILE
    }
    options = RuntimeOptions()
    assert target_identity(opened.manifest, options) == target_identity(bundle.manifest, options)
    assert '"draft_heads"' not in bundle.manifest.to_json()  # versions without heads read bundles without heads
    loaded = DraftHeads.load(opened.path / HEADS_FILE)
    assert (loaded.count, loaded.vocab_size) == (2, 320)
    assert np.abs(loaded.weights).max() > 0


def test_a_server_takes_the_heads_of_its_bundle(bundle: Bundle, trained: Bundle) -> None:
    """And says what is missing where it has none."""
    assert _heads(trained).count == 2
    with pytest.raises(ConfigError, match="has no draft heads; train them with"):
        _heads(bundle)


def test_heads_for_another_model_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    """The bundle stays as it is."""
    make_tiny_source("llama", tmp_path / "other", vocab_size=320, seed=2)
    with pytest.raises(ConfigError, match="give the model that it was exported from"):
        add_heads(bundle.path, tmp_path / "other", PROMPTS, OPTIONS)
    assert Bundle.open(bundle.path).manifest == bundle.manifest
    with pytest.raises(ConfigError, match="expected 1 to 5"):
        replace(OPTIONS, count=9)
    nothing = ({"steps": 0}, {"steps": None, "minutes": -1.0}, {"steps": None, "minutes": float("nan")})
    for wrong in (*nothing, {"tokens": 0}, {"rate": 0.0}, {"seed": -1}, {"heldout": 0.9}):
        with pytest.raises(ConfigError, match=r"is .*; expected"):
            replace(OPTIONS, **wrong)
    with pytest.raises(RuntimeUnavailable, match=r"torch cannot use 'abacus' here \(.+\); use --device cpu"):
        replace(OPTIONS, device="abacus")
    with pytest.raises(ConfigError, match="give --minutes or --steps"):
        replace(OPTIONS, minutes=1.0)


@pytest.fixture(scope="module", params=["torch", "openvino"])
def runtime(request: pytest.FixtureRequest, source: Path, bundle: Bundle) -> Iterator[HiddenRuntime]:
    """Both runtimes, with hidden states."""
    if request.param == "torch":
        path = bundle.model_file
    else:
        exported = ExportOptions("target", "fp32", "openvino", num_threads=1)
        path = export_model(source, source.parent / "openvino", exported).model_file
    options = RuntimeOptions(num_threads=1, keeps_hidden=True, kv_cache_bytes=1 << 20)
    with closing(open_batch_runtime(request.param, path, options)) as opened:
        assert isinstance(opened, HiddenRuntime)
        yield opened


def test_a_runtime_keeps_the_hidden_states_of_its_rows(source: Path, runtime: HiddenRuntime) -> None:
    """Of the rows that were asked for, in their order, equal to transformers'."""
    expected = expected_states(source)
    runtime.forward([SequenceSlice(TOKENS[:4], 0, [0], 2), SequenceSlice(TOKENS, 0, [1], 1)])  # type: ignore[attr-defined]
    assert runtime.hidden_size == expected.shape[1]
    np.testing.assert_allclose(runtime.hidden_rows(), expected[[2, 3, 5]], atol=1e-4)
    runtime.forward([SequenceSlice(TOKENS[4:], 4, [0], 2)])  # type: ignore[attr-defined]
    np.testing.assert_allclose(runtime.hidden_rows(), expected[[4, 5]], atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_heads_guess_and_the_text_stays_the_targets(
    runtime: HiddenRuntime, trained: Bundle, temperature: float
) -> None:
    """On real hidden states: some guesses are accepted, the text is that without heads."""
    heads = DraftHeads.load(trained.path / HEADS_FILE)
    found: dict[bool, Collector] = {}
    for with_heads in (False, True):
        config = EngineConfig(heads=heads if with_heads else None, policy=Policy.VERIFY, share_prefixes=False)
        engine = Engine(runtime, config, clock=Clock())  # type: ignore[arg-type]
        found[with_heads] = Collector()
        request = flat_request(tuple(TOKENS), SamplingParams(temperature, seed=3), 60)
        engine.submit(request, found[with_heads])
        while engine.has_work:
            engine.step()
    assert found[True].tokens == found[False].tokens
    assert sum(commit.proposed for commit in found[True].commits) > 0
    assert sum(commit.accepted for commit in found[True].commits) > 0


def test_heads_guess_from_the_state_that_picked_the_last_token() -> None:
    """Of the accepted branch's last row; a state of another place guesses nothing."""
    heads = heads_of(np.eye(8, dtype=np.float32) * 20)
    text = [1, 2]
    source = HeadGuesses(heads, GREEDY, text)
    assert source.propose(3) == ([], [])
    hidden = np.eye(8, dtype=np.float32)[[3, 5, 6]]
    source.learn(Verified(text, [4, 1], SelectedDrafts.line([4, 4]), [0], [4, 1, 0], hidden))
    hidden[:] = np.nan  # the runtime uses the memory again
    assert source.propose(3) == ([], [])  # before the tokens are there
    text += [4, 1]
    assert source.propose(3) == ([5, 5, 5], [HEAD_KINDS[-1]] * 3)
    assert source.propose(2)[0] == [5, 5]
    text += [0]
    assert source.propose(3) == ([], [])


def test_heads_pick_with_the_requests_own_noise() -> None:
    """Where head and target have the same distribution, they pick the same token at any temperature."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=16).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=5)
    text = [1]
    source = HeadGuesses(heads_of(np.diag(logits).astype(np.float32)), params, text)
    source.learn(Verified(text, [2], NOTHING, [], [2], np.ones((1, 16), np.float32)))
    text += [2]
    assert source.propose(3)[0] == [pick(logits, params, 2 + index) for index in range(3)]


def write_heads(path: Path, tensors: dict[str, NDArray[Any]], format: str = FORMAT) -> None:
    """A safetensors file by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": format}}
    body = b""
    for name, tensor in tensors.items():
        data = tensor.tobytes()
        kind = {"float32": "F32", "float16": "F16"}[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def tensors_of(size: int = 4, vocab: int = 6) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(1)
    return {
        "weights": rng.normal(size=(2, size, size)).astype(np.float32),
        "biases": rng.normal(size=(2, size)).astype(np.float32),
        "unembedding": rng.normal(size=(vocab, size)).astype(np.float16),
        "bias": np.zeros(vocab, np.float16),
    }


def test_heads_are_read_from_safetensors(tmp_path: Path) -> None:
    """h + SiLU(W h + b), then the LM head."""
    tensors = tensors_of()
    write_heads(tmp_path / "heads.safetensors", tensors)
    heads = DraftHeads.load(tmp_path / "heads.safetensors")
    assert (heads.count, heads.hidden_size, heads.vocab_size) == (2, 4, 6)
    hidden = np.array([0.5, -1.0, 2.0, 0.1], np.float32)
    for head, row in enumerate(heads.logits(hidden)):
        inner = tensors["weights"][head] @ hidden + tensors["biases"][head]
        state = hidden + inner / (1 + np.exp(-inner))
        np.testing.assert_allclose(row, tensors["unembedding"].astype(np.float32) @ state, rtol=1e-5)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"\x80\x04\x95"), "holds no draft heads"),
        (lambda path: path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}"), "a header of"),
        (lambda path: write_heads(path, tensors_of(), format="another"), "its format is not"),
        (lambda path: write_heads(path, {"weights": np.zeros((1, 2, 2), np.float32)}), "not those of heads"),
        (lambda path: write_heads(path, tensors_of() | {"bias": np.zeros(5, np.float32)}), "do not fit each other"),
        (lambda path: write_heads(path, tensors_of() | {"bias": np.full(6, np.nan, np.float32)}), "not finite"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "outside the file"),
    ],
)
def test_a_file_that_holds_no_heads_is_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    """By a BundleError that says why, never by running anything in it."""
    path = tmp_path / "heads.safetensors"
    write_heads(path, tensors_of())
    spoil(path)
    with pytest.raises(BundleError, match=message):
        DraftHeads.load(path)
