"""Tests `outrider-cloud serve`: its options, what it refuses, what it says, and a whole run."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from click.testing import Result
from tests.fake_runtime import FakeBatchRuntime
from tests.serve_command import used_beside
from tests.serving import (
    BODY,
    PROMPT,
    fake_tokenizer,
    run_session,
    target_tokens,
)
from tests.test_bundle import make_manifest
from typer.testing import CliRunner

from outrider.cloud.engine import EngineThread
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.server import embedded
from outrider.cloud.server import main as cli
from outrider.cloud.server import serve as serve_module
from outrider.cloud.server.access import Access
from outrider.cloud.server.options import Exactness, ServeOptions
from outrider.cloud.server.target import target_identity
from outrider.edge.cli.draft_source import draft_kind
from outrider.edge.devices.placement import DraftChoice
from outrider.models.bundle.manifest import FileEntry
from outrider.models.bundle.reference_export import export_arguments
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.http.logs import LogFormat, configure_logging
from outrider.models.http.security import KeyRing, require_safe_host
from outrider.models.ingress.sockets import READY_PREFIX, open_socket, url_of
from outrider.models.process import with_parent
from outrider.models.runtimes.base import RuntimeOptions


def test_only_loopback_is_served_without_keys() -> None:
    """Beyond this machine, keys are needed or an explicit word."""
    keys = KeyRing(["sixteen-characters"])
    for host in ("127.0.0.1", "::1", "localhost", "127.8.9.1"):
        require_safe_host(host, KeyRing(), is_insecure_allowed=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(ConfigError, match="--api-key-file"):
            require_safe_host(host, KeyRing(), is_insecure_allowed=False)
        require_safe_host(host, keys, is_insecure_allowed=False)
        require_safe_host(host, KeyRing(), is_insecure_allowed=True)


def test_keys_come_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments and blank lines are skipped; a file without a key is a mistake, and so is one that is not there."""
    path, empty = tmp_path / "keys", tmp_path / "empty"
    path.write_text("# ours\n\n  first-key-of-the-file  \nsecond-key-of-the-file\n")
    empty.write_text("# none\n")
    monkeypatch.setenv("OUTRIDER_API_KEYS", "third-from-the-environment, ")
    keys = KeyRing.load(path)
    shown = b"Bearer first-key-of-the-file", b"bearer second-key-of-the-file", b"Bearer third-from-the-environment"
    assert len(keys) == 3 == len({keys.find(each) for each in shown} - {None})
    for place, variable, told in (
        (empty, "third-from-the-environment", "no key"),
        (tmp_path / "nothing", "third-from-the-environment", "cannot be read"),
        (None, "two-keys-without-a-comma between-them", "OUTRIDER_API_KEYS: neither a key nor"),
    ):
        monkeypatch.setenv("OUTRIDER_API_KEYS", variable)
        with pytest.raises(ConfigError, match=told):
            KeyRing.load(place)


@pytest.mark.skipif(os.name != "posix", reason="files have no modes as on POSIX")
def test_what_shows_keys_to_others_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key file with keys that others can read; keys that come through a network without TLS."""
    path, digest = tmp_path / "keys", "sha256:" + "0a" * 32
    for content, mode, host, expected in (
        ("a-key-of-the-file\n", 0o644, "127.0.0.1", ["other users can read the keys in"]),
        ("a-key-of-the-file\n", 0o600, "127.0.0.1", []),
        (f"# ours\n\n{digest}\n", 0o644, "127.0.0.1", []),
        (digest, 0o600, "0.0.0.0", ["unencrypted without --tls-cert"]),
    ):
        path.write_text(content)
        path.chmod(mode)
        caplog.clear()
        Access.of(ServeOptions("fake", host=host, api_key_file=path))
        assert all(words in line for words, line in zip(expected, caplog.messages, strict=True))


def test_a_taken_port_is_a_clear_refusal() -> None:
    """The port is claimed before the model is loaded."""
    with open_socket("127.0.0.1", 0) as first:
        first.listen()
        assert url_of(first, is_tls=True).startswith("https://127.0.0.1:")
        with pytest.raises(ConfigError, match="choose another --port"):
            open_socket("127.0.0.1", first.getsockname()[1])


def test_log_lines_are_text_or_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One JSON object a line, for machines; the root logger is left as it was."""
    root, logger = logging.getLogger(), logging.getLogger("outrider.cloud")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logging(LogFormat.JSON)
    logger.info("said %s", "this")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"], line["message"]) == ("info", "outrider.cloud", "said this")
    configure_logging(LogFormat.TEXT)
    logger.info("said that")
    assert "INFO outrider.cloud: said that" in capsys.readouterr().err


def test_the_command_line_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the user got wrong is one line on standard error, without a trace, and exit code 2."""
    monkeypatch.setattr(serve_module, "configure_logging", lambda _: None)
    for options, told in (
        ([str(tmp_path / "nothing")], "is not a directory"),
        ([__file__], "is not a directory"),
        ([str(tmp_path), "--host", "a" * 300, "--insecure-no-keys"], "cannot listen on"),
        ([str(tmp_path), "--port-file", str(tmp_path / "no" / "port")], "--port-file"),
        ([str(tmp_path), "--api-key-file", str(tmp_path)], "cannot be read"),
        ([str(tmp_path), "--host", "0.0.0.0"], "without API keys: anybody who reaches this port could use the model. "),
        ([str(tmp_path), "--host", "0.0.0.0"], "Give --api-key-file or --tls-client-ca"),
        ([str(tmp_path), "--tls-cert", "x.pem"], "--tls-key"),
        ([str(tmp_path), "--tls-cert", "x.pem", "--tls-key", "y.pem"], "No such file"),
    ):
        monkeypatch.setattr(sys, "argv", ["outrider-cloud", "serve", *options, "--port", "0"])
        with pytest.raises(SystemExit, check=lambda ended: ended.code == 2):
            cli.main()
        said = capsys.readouterr()
        assert re.fullmatch(f"error: .*{re.escape(told)}.*\n", said.err) and said.out == ""


def bundle_of(path: Path, **changes: str) -> Any:
    """A target's bundle for OpenVINO, as far as it is read before its model. changes: of the manifest."""
    file = FileEntry(path="openvino_model.xml", size=1, sha256="0" * 64)
    update = {"role": "target", "runtime": "openvino"} | changes
    manifest = make_manifest((file,), "0" * 64).model_copy(update=update)
    return types.SimpleNamespace(path=path, manifest=manifest, model_file=path, tokenizer=lambda: None)


def test_exactness_is_kept_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO on a CPU is bitwise unless told otherwise, which makes it another target; nothing else can be. It takes
    masks only without it: `--tree tree` loads so, the default does not.
    """
    openvino, torch = bundle_of(tmp_path), bundle_of(tmp_path, runtime="torch", format="safetensors")
    for form in TreeForm:
        loading = embedded._loading(openvino, ServeOptions("x", tree=form))
        assert loading.is_batch_invariant is (form is not TreeForm.TREE)

    def identity(bundle: Any, exact: Exactness | None, **changes: Any) -> str:
        return target_identity(bundle.manifest, embedded._loading(bundle, ServeOptions("x", exact=exact, **changes)))

    usual = identity(openvino, None)
    assert identity(openvino, Exactness.BITWISE) == usual != identity(openvino, Exactness.NEAR)
    assert identity(torch, Exactness.NEAR) == identity(torch, None)
    assert identity(openvino, Exactness.NEAR, device="GPU") == identity(openvino, None, device="GPU")
    cuda = identity(torch, None, device="cuda:1")
    assert cuda == identity(torch, Exactness.NEAR, device="cuda") != identity(torch, Exactness.BITWISE, device="cuda")
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    for bundle, changes, told in (
        (torch, {}, "torch on cpu computes logits by the shape of a step"),
        (torch, {"device": "cuda"}, "bitwise on CUDA needs Triton"),
        (openvino, {"device": "GPU"}, "openvino on GPU computes"),
        (openvino, {"tree": TreeForm.TREE}, "--tree tree gives up"),
    ):
        with pytest.raises(ConfigError, match=told):
            identity(bundle, Exactness.BITWISE, **changes)


def test_the_next_command_names_what_is_known(tmp_path: Path) -> None:
    """The draft beside the target, or to be pulled; the address where it is not the default; that a key is needed."""
    for name in ("draft", "target"):
        (tmp_path / "my pair" / name).mkdir(parents=True)
    target = tmp_path / "my pair" / "target"
    default, far, key = "http://127.0.0.1:8000", "https://cloud.example:8443", "OUTRIDER_API_KEY=KEY outrider"
    here, reference = ServeOptions(str(target)), ServeOptions("reference")
    public = ServeOptions("reference", host="0.0.0.0")
    run = '--compare "def walk(path):"'
    for options, url, needs_key, has_drafts, expected in (
        (here, default, False, False, f"outrider run --draft '{tmp_path}/my pair/draft' {run}"),
        (reference, default, False, False, f"outrider run {run}"),
        (public, "https://0.0.0.0:8443", True, False, f"{key} run --cloud https://SERVER:8443 {run}"),
        (public, "http://0.0.0.0:8000", True, False, f"{key} run --cloud https://PROXY {run}"),
        (public, "http://0.0.0.0:8000", False, False, f"outrider run --cloud http://SERVER:8000 {run}"),
        (ServeOptions("target"), far, True, True, f"{key} pull --server {far}, then {key} run --cloud {far} {run}"),
        (reference, default, False, True, f"outrider pull, then outrider run {run}"),
    ):
        assert expected == serve_module._next_command(options, target, url, needs_key=needs_key, has_drafts=has_drafts)


def test_serving_the_reference_target_exports_it_first(
    tmp_path: Path, fake_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the exporter's own command, with a word about how long it takes; without the exporter, the pip command. Where
    the pair is there, nobody asks the exporter again until a package, the pair or a file of it has changed.
    """
    pair = {role: str(shutil.copytree(fake_bundle, tmp_path / "pair" / role)) for role in ("draft", "target")}
    ran = Mock(return_value=json.dumps(pair))
    monkeypatch.setattr("outrider.models.bundle.reference_export.run_child_command", ran)
    assert embedded.export_reference_target() == Path(pair["target"])
    asked = export_arguments(700.0, *draft_kind(DraftChoice()))  # as `run` asks
    assert ran.call_args.args[0] == ["-P", "-m", with_parent.__name__, "outrider.export.cli", *asked]
    assert "is exported, in one to three minutes" in capsys.readouterr().err
    assert embedded.export_reference_target() == Path(pair["target"]) and ran.call_count == 1
    assert "is exported" not in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "distributions", lambda: [])  # another machine, say
        embedded.export_reference_target()
    embedded.export_reference_target()  # what was noted there
    assert ran.call_count == 3
    (tmp_path / "pair" / "draft" / "manifest.json").unlink()
    embedded.export_reference_target()
    assert ran.call_count == 4 and capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(
        RuntimeUnavailable, match=r"'nncf', which is not installed; run: pip install \"outrider\[export\]\""
    ):
        embedded.export_reference_target()
    assert ran.call_count == 4 and capsys.readouterr().err == ""


def test_serve_runs_a_bundle_from_start_to_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole of `serve` but the model: the engine's options, ready line, port file, requests, end."""
    opened = bundle_of(tmp_path, precision="int8")
    architecture = opened.manifest.architecture.model_copy(update={"parameters": 14_600_000})
    opened.manifest = opened.manifest.model_copy(update={"architecture": architecture})
    opened.tokenizer = fake_tokenizer

    monkeypatch.setattr(embedded, "Bundle", types.SimpleNamespace(open=lambda path: opened))
    monkeypatch.setattr(embedded, "open_batch_runtime", lambda *_: FakeBatchRuntime(vocab_size=300))
    monkeypatch.setattr(serve_module, "configure_logging", lambda _: None)
    port_file = tmp_path / "port"
    monkeypatch.setattr(embedded, "EngineThread", made := Mock(wraps=EngineThread))
    arguments = ["serve", str(tmp_path), "--port", "0", "--port-file", str(port_file), "--name", "mine", "--no-lookup"]
    urls: list[str] = []

    def use(url: str) -> None:
        urls.append(url)
        with httpx.Client(base_url=url) as client:
            assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)
            facts, ready = client.get("/v1/model").json(), client.get("/health/ready").json()
            assert (facts["name"], facts["precision"], facts["parameters"]) == ("mine", "int8", 14_600_000)
            assert {facts["target"], ready["target"]} == {target_identity(opened.manifest, RuntimeOptions())}
            assert ready["step_ms"] > 0

    with used_beside(port_file, use):
        cli.app(arguments, standalone_mode=False)
    (url,) = urls
    assert made.call_args.args[1].looks_up is False
    summary, *more = capsys.readouterr().out.splitlines()
    assert more == [
        f"{READY_PREFIX}{url}",
        f'In another terminal: outrider run --cloud {url} --draft DRAFT_BUNDLE --compare "def walk(path):"',
    ]
    assert summary.startswith("mine: 14.6M parameters, int8, loaded in") and not port_file.exists()


def test_options_come_from_a_file_and_what_is_typed_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--config FILE`; a name that is none, and a value that does not fit, are refused with file and name."""
    seen: list[ServeOptions] = []
    monkeypatch.setattr(serve_module, "serve", seen.append)
    file = tmp_path / "verifier.toml"

    def serve(*arguments: str) -> Result:
        return CliRunner().invoke(cli.app, ["serve", "here", "--config", str(file), *arguments])

    file.write_text('max_running = 5\nlookup = false\nallowed_host = ["a.example"]\ntls_cert = "cert"\nrate = 1.5\n')
    assert serve("--rate", "9").exit_code == 0
    (options,) = seen
    found = options.max_running, options.lookup, options.rate, options.allowed_host, options.tls_cert
    assert found == (5, False, 9.0, ["a.example"], tmp_path / "cert")
    for text, told in (
        ("max_runing = 5", "'max_runing' is no option of .*; did you mean 'max_running'?"),
        ("heads = true", "'heads' is no option any more. Neither n-grams nor draft heads"),
        ('max_running = "many"', "max_running is 'many'; expected one whole number"),
        ("max_running = inf", "max_running is inf; expected one whole number"),
        ("max_running = true", "max_running is True; expected one whole number"),
        ("port = 8000.7", "port is 8000.7; expected one whole number"),
        ("rate = nan", "rate is nan; expected one number"),
        ('bundle = "b"', "'bundle' is no option"),
        (f"# {'a' * (1 << 20)}", "has over 1 MiB"),
        ("max_running = 0", "max_running is 0: "),
        ('allowed_host = "a"', "expected a list of text"),
        ("name = [1]", "expected one text"),
        ("name = ", "is not TOML"),
    ):
        file.write_text(text)
        refused = serve().exception
        assert isinstance(refused, ConfigError) and re.search(f"{re.escape(str(file))}.*{told}", str(refused)), refused
    file.unlink()
    assert "cannot be read" in str(serve().exception) and len(seen) == 1
