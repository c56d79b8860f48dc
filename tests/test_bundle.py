"""Tests bundles: opening one detects every fault, and writing one is all or nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.tiny_models import make_tiny_tokenizer
from tokenizers import Tokenizer as Backend

from outrider.cloud.server.target import target_identity
from outrider.models.bundle.bundle import Bundle, _refuse_misread
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.bundle.manifest import (
    Architecture,
    ExportReport,
    FileEntry,
    Manifest,
    Parity,
    ParityStage,
    Source,
)
from outrider.models.errors import BundleError
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.text.tokenizer import Tokenizer


def make_manifest(files: tuple[FileEntry, ...], fingerprint: str, name: str = "tiny") -> Manifest:
    """A manifest such as an export writes, with invented numbers."""
    parity = Parity(
        runtime="Fake",
        max_relative_delta=1e-4,
        max_mean_kl=1e-6,
        min_argmax_agreement=0.9,
        max_own_delta=1e-4,
        own_delta=1e-6,
        stages=(ParityStage(name="prefill", rows=4, max_delta=1e-6, scale=3.0, mean_kl=0.0, argmax_agreement=1.0),),
    )
    return Manifest(
        name=name,
        role="draft",
        architecture=Architecture(
            name="llama", layers=1, hidden_size=8, heads=2, kv_heads=1, head_size=4, intermediate_size=16,
            vocab_size=320, tokenizer_size=300, max_positions=64, parameters=1000,
        ),
        format="openvino-ir",
        runtime="openvino",
        device="cpu",
        precision="fp32",
        tokenizer_fingerprint=fingerprint,
        eos_token_ids=(0,),
        source=Source(name=name, weights_sha256="0" * 64),
        files=files,
        report=ExportReport(size_bytes=1, parity=parity, versions={"outrider": "0"}),
    )  # fmt: skip


def write(destination: Path, name: str = "tiny", *, overwrite: bool = False) -> Bundle:
    """A bundle with a tokenizer and a fake IR."""
    with BundleWriter(destination, overwrite=overwrite) as writer:
        make_tiny_tokenizer(writer.directory)
        (writer.directory / "openvino_model.xml").write_text("<net/>", encoding="utf-8")
        (writer.directory / "openvino_model.bin").write_bytes(name.encode() * 100)
        fingerprint = Tokenizer.from_dir(writer.directory).fingerprint
        return writer.commit(make_manifest(writer.list_files(), fingerprint, name))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "bundle").path


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes manifest.json as with an editor."""
    path = bundle / "manifest.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    edit(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")


def test_what_was_written_is_what_is_opened(bundle: Path) -> None:
    """Manifest, model file and tokenizer are the same, and the text of the manifest is stable."""
    opened = Bundle.open(bundle)
    assert (opened.manifest.name, opened.model_file) == ("tiny", bundle / "openvino_model.xml")
    assert opened.tokenizer().decode([0]) == ""
    assert opened.manifest.to_json() == (bundle / "manifest.json").read_text(encoding="utf-8")
    assert Bundle.open(bundle).manifest.digest == opened.manifest.digest


def test_a_bundles_tokenizer_makes_no_id_that_its_model_lacks(bundle: Path) -> None:
    """An added token beyond the vocabulary, as a text model of Gemma 3 has one, is plain text."""
    edit_manifest(bundle, lambda raw: raw["architecture"].update(vocab_size=300))
    backend = Backend.from_file(str(bundle / "tokenizer.json"))
    assert backend.add_special_tokens(["<image>"]) and backend.token_to_id("<image>") == 300
    backend.save(str(bundle / "tokenizer.json"))
    fingerprint = Tokenizer.from_dir(bundle).fingerprint
    edit_manifest(bundle, lambda raw: raw.update(tokenizer_fingerprint=fingerprint))
    tokenizer = Bundle.open(bundle, verify=False).tokenizer()
    assert tokenizer.size == 300 and max(tokenizer.encode("<image>")) < 300


def test_a_manifest_without_the_formats_model_is_refused_in_words(bundle: Path) -> None:
    edit_manifest(bundle, lambda raw: raw.update(format="onnx"))
    with pytest.raises(BundleError, match=r"manifest.json lists no .onnx file, .*; export the model again"):
        assert Bundle.open(bundle).model_file


def test_the_same_files_give_the_same_manifest(tmp_path: Path) -> None:
    """It holds neither path nor time."""
    assert write(tmp_path / "a").manifest.to_json() == write(tmp_path / "sub" / "b").manifest.to_json()


def moved_out(bundle: Path) -> None:
    """Leaves a link to a file elsewhere."""
    weights = bundle / "openvino_model.bin"
    weights.symlink_to(weights.rename(bundle.with_name("outside.bin")))


def put_in(bundle: Path, name: str) -> None:
    """Adds a file."""
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_bytes(b"evil")


CODE = ("modeling.py", "pytorch_model.bin", "weights.pt", "deep/inside.pkl", ".hidden.so")
"""Files that can execute; an IR's own .bin is not one of them."""
WRONG_MANIFESTS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda raw: raw.update(schema_version=1), "schema version 1, this Outrider reads 2"),
    (lambda raw: raw.pop("schema_version"), "schema version None"),
    (lambda raw: raw.update(surprise=1), "surprise: Extra inputs"),  # an unknown key that is skipped might matter
    (lambda raw: raw["architecture"].update(layers="1"), "architecture.layers"),
    (lambda raw: raw["architecture"].update(tokenizer_size=321), "321 ids"),
    (lambda raw: raw["files"][0].update(path="../escape.json"), "plain relative path"),
    (lambda raw: raw["files"].append(raw["files"][0]), "twice"),
    (lambda raw: raw.update(files=[]), "files: Tuple should have at least 1 item"),
    (lambda raw: raw.update(eos_token_ids=[320]), "outside the vocabulary"),
    (lambda raw: raw.update(tokenizer_fingerprint="1" * 64), "fingerprint"),  # computed from the file, and compared
]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda bundle: (bundle / "tokenizer.json").unlink(), r"tokenizer\.json is missing.*again"),
        (lambda bundle: os.truncate(bundle / "openvino_model.bin", 399), r"model\.bin is truncated: 399 bytes.*400"),
        (moved_out, "symbolic link"),
        # An added chat template would change every prompt.
        (partial(put_in, name="chat_template.jinja"), r"chat_template\.jinja is not in the manifest"),
        *((partial(put_in, name=name), f"{name}.*execute code") for name in CODE),
        *((partial(edit_manifest, edit=edit), message) for edit, message in WRONG_MANIFESTS),
    ],
)
def test_a_damaged_bundle_is_refused(bundle: Path, damage: Callable[[Path], object], message: str) -> None:
    """With the file, what is wrong and what to do."""
    damage(bundle)
    with pytest.raises(BundleError, match=message):
        Bundle.open(bundle).tokenizer()


def test_one_flipped_bit_is_found_even_after_a_good_opening(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged file is hashed once a process; the cache of verified files must not hide a later change."""
    Bundle.open(bundle)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.models.bundle.bundle.hash_file", lambda path: pytest.fail("hashed again"))
        Bundle.open(bundle)
    path = bundle / "openvino_model.bin"
    first, *others = path.read_bytes()
    path.write_bytes(bytes([first ^ 1, *others]))
    os.utime(path, ns=(1, 1))
    with pytest.raises(BundleError, match=r"openvino_model\.bin is altered.*SHA-256"):
        Bundle.open(bundle)
    assert Bundle.open(bundle, verify=False).manifest.name == "tiny"


def test_what_macos_leaves_and_notes_beside_files_are_ignored(bundle: Path) -> None:
    """On foreign disks each file gets a twin with its suffix; one that a manifest lists is checked as any other. A note
    beside the files changes nothing: nobody reads it.
    """
    for name in ("NOTES.md", "._openvino_model.bin", "._tokenizer.json", "._manifest.json", ".DS_Store"):
        (bundle / name).write_bytes(b"\0\5\x16\7")
    assert Bundle.open(bundle).tokenizer().size
    (bundle / "._openvino_model.bin").unlink()
    (bundle / "._openvino_model.bin").symlink_to(bundle / "openvino_model.bin")
    with pytest.raises(BundleError, match="symbolic link"):
        Bundle.open(bundle)


def test_neither_what_macos_leaves_nor_code_is_written(tmp_path: Path) -> None:
    """An export on such a disk is a bundle without it; a script left by an exporter is not shipped."""
    with BundleWriter(tmp_path / "bundle") as writer:
        make_tiny_tokenizer(writer.directory)
        for name in ("openvino_model.xml", "openvino_model.bin", "._openvino_model.bin"):
            (writer.directory / name).write_text("<net/>", encoding="utf-8")
        assert not [entry.path for entry in writer.list_files() if entry.path.startswith(".")]
        (writer.directory / "modeling.py").write_text("", encoding="utf-8")
        with pytest.raises(BundleError, match="execute code"):
            writer.list_files()


def test_what_is_no_bundle_says_so(tmp_path: Path) -> None:
    """A wrong path, a model directory, a broken manifest."""
    for path, message in ((tmp_path / "nowhere", "not a directory"), (tmp_path, "no manifest")):
        with pytest.raises(BundleError, match=message):
            Bundle.open(path)
    for content in ("{", "[" * 100_000):
        (tmp_path / "manifest.json").write_text(content, encoding="utf-8")
        with pytest.raises(BundleError, match="JSON"):
            Bundle.open(tmp_path)
    for role in ("draft", "target"):
        (tmp_path / "pair" / role).mkdir(parents=True)
        (tmp_path / "pair" / role / "manifest.json").touch()
    with pytest.raises(BundleError, match=r"did you mean .*target, for a server, or .*draft, for a device\?"):
        Bundle.open(tmp_path / "pair")


def beside(bundle: Path) -> list[str]:
    """The bundle and what lies beside it."""
    return sorted(path.name for path in bundle.parent.iterdir())


def test_an_existing_bundle_is_replaced_only_when_asked(bundle: Path) -> None:
    """Then as a whole, with nothing left beside it."""
    with pytest.raises(BundleError, match="--overwrite"):
        write(bundle, "second")
    assert Bundle.open(bundle).manifest.name == "tiny"
    write(bundle, "second", overwrite=True)
    assert Bundle.open(bundle).manifest.name == "second" and beside(bundle) == ["bundle"]


@pytest.mark.parametrize(
    "manifest", [None, "{", "[" * 100_000, "[]", '{"manifest_version": 3, "name": "x"}', '{"schema_version": 2}']
)
def test_a_directory_that_is_no_bundle_is_never_replaced(manifest: str | None, tmp_path: Path) -> None:
    """--overwrite with a wrong path must not delete a home directory, nor a browser extension with its manifest."""
    (tmp_path / "precious.txt").write_text("x", encoding="utf-8")
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest, encoding="utf-8")
    with pytest.raises(BundleError, match="is not a bundle"):
        write(tmp_path, overwrite=True)
    assert (tmp_path / "precious.txt").is_file()


KILLED = """
import os, signal, sys
from pathlib import Path
from outrider.models.bundle.bundle_writer import BundleWriter
with BundleWriter(sys.argv[1], overwrite=True) as writer:
    (writer.directory / "half.json").write_text("{")
    if len(sys.argv) > 2:  # killed between the two renames of a replacement
        Path(sys.argv[1]).rename(str(writer.directory).replace(".partial-", ".old-"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
@pytest.mark.parametrize("arguments", [[], ["between renames"]])
def test_a_killed_writer_is_cleaned_up_by_the_next(bundle: Path, arguments: list[str]) -> None:
    """Its leftovers are removed, and a bundle that it had set aside is put back."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(bundle), *arguments], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL and any(".partial-" in name for name in beside(bundle))
    with BundleWriter(bundle, overwrite=True):
        pass
    assert Bundle.open(bundle).manifest.name == "tiny" and beside(bundle) == ["bundle"]


def test_a_live_writer_keeps_what_it_builds(bundle: Path) -> None:
    """Another writer of the same destination clears nothing of it, whatever process it is in. What a dead one left is
    cleared also without its lock file: a clean-up was itself killed.
    """
    left, other = (bundle.with_name(f".bundle.partial-{name}") for name in ("0" * 16, "notes"))
    for each in (left, other):
        each.mkdir()
    with BundleWriter(bundle, overwrite=True) as first, BundleWriter(bundle, overwrite=True) as second:
        assert first.directory.is_dir() and first.directory != second.directory and not left.exists()
        with BundleWriter(bundle, overwrite=True):
            pass
        assert first.directory.is_dir() and second.directory.is_dir()
    assert beside(bundle) == [other.name, "bundle"]


def test_a_bundle_that_comes_back_is_not_replaced_unasked(bundle: Path) -> None:
    """A killed writer had set it aside; the next one finds it, and may not overwrite."""
    bundle.rename(bundle.with_name(f".bundle.old-{'0' * 16}"))
    with pytest.raises(BundleError, match="--overwrite"), BundleWriter(bundle):
        pass
    assert Bundle.open(bundle).manifest.name == "tiny" and beside(bundle) == ["bundle"]


@pytest.mark.parametrize(
    ("runtime", "family", "config", "message"),
    [
        ("onnxruntime", "mistral", {"sliding_window": 80, "use_sliding_window": False}, "sliding window of 80"),
        ("onnxruntime", "phi3", {"sliding_window": 80, "layer_types": ["full_attention"]}, "sliding window of 80"),
        ("openvino", "gemma2", {}, "leaves out the cap"),
        ("onnxruntime", "mistral", {"sliding_window": None}, None),
        ("onnxruntime", "phi3", {}, None),
        ("openvino", "mistral", {"sliding_window": 80, "use_sliding_window": False}, None),
        ("openvino", "gemma2", {"attn_logit_softcapping": None}, None),
    ],
)
def test_a_bundle_that_an_earlier_exporter_made_wrong_is_refused(
    runtime: str, family: str, config: dict[str, object], message: str | None, tmp_path: Path
) -> None:
    """With the command that exports it again; others of the same family and runtime are opened."""
    stage = SimpleNamespace(name="prefill")
    manifest = SimpleNamespace(
        architecture=SimpleNamespace(name=family, max_positions=512),
        runtime=runtime,
        role="draft",
        device="cpu",
        source=SimpleNamespace(name="org/model"),
        report=SimpleNamespace(parity=SimpleNamespace(stages=[stage])),
    )
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if message is None:
        _refuse_misread(tmp_path, manifest)  # type: ignore[arg-type]  # the fields that it reads
        return
    with pytest.raises(BundleError, match=rf"{message}.*again: outrider-export draft org/model --runtime onnxruntime"):
        _refuse_misread(tmp_path, manifest)  # type: ignore[arg-type]
    stage.name = "prefill, beyond the window of 80"
    if family != "gemma2":
        _refuse_misread(tmp_path, manifest)  # type: ignore[arg-type]


def test_a_bundle_with_heads_of_an_older_version_opens_and_is_the_same_target() -> None:
    """What it says of them is written again as it was."""
    model = FileEntry(path="openvino_model.bin", size=1, sha256="0" * 64)
    heads = FileEntry(path="draft_heads/heads.safetensors", size=1, sha256="1" * 64)
    plain = make_manifest((model,), "0" * 64)
    told = {"file": heads.path, "hidden_size": 8, "acceptance": [{"rate": 0.5}]}
    given = make_manifest((model, heads), "0" * 64).model_dump(mode="json") | {"draft_heads": told}
    old = Manifest.model_validate_json(json.dumps(given))
    assert json.loads(old.model_dump_json())["draft_heads"] == told
    assert target_identity(old, RuntimeOptions()) == target_identity(plain, RuntimeOptions())
    assert "draft_heads" not in plain.model_dump(mode="json")
