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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from tests.fake_runtime import FakeBatchRuntime
from tests.serve_command import used_beside
from tests.serving import (
    fake_tokenizer,
    run_session,
    target_tokens,
)
from tests.test_bundle import make_manifest
from typer.testing import CliRunner

from outrider.cloud.engine import EngineConfig
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

PROMPT = [5, 17, 99, 3]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}


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
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  first-key-of-the-file  \nsecond-key-of-the-file\n")
    monkeypatch.setenv("OUTRIDER_API_KEYS", "third-from-the-environment, ")
    keys = KeyRing.load(path)
    assert len(keys) == 3
    owners = {
        keys.find(b"Bearer first-key-of-the-file"),
        keys.find(b"bearer second-key-of-the-file"),
        keys.find(b"Bearer third-from-the-environment"),
    }
    assert len(owners) == 3
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="no key"):
        KeyRing.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing.load(tmp_path / "nothing")
    monkeypatch.setenv("OUTRIDER_API_KEYS", "two-keys-without-a-comma between-them")
    with pytest.raises(ConfigError, match="OUTRIDER_API_KEYS: neither a key nor"):
        KeyRing.load(None)


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
        assert len(caplog.messages) == len(expected), caplog.messages
        assert all(words in line for words, line in zip(expected, caplog.messages, strict=True))


def test_a_taken_port_is_a_clear_refusal() -> None:
    """The port is claimed before the model is loaded."""
    with open_socket("127.0.0.1", 0) as first:
        first.listen()
        assert url_of(first, is_tls=True).startswith("https://127.0.0.1:")
        with pytest.raises(ConfigError, match="choose another --port"):
            open_socket("127.0.0.1", first.getsockname()[1])


def test_log_lines_are_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object a line, for machines; the root logger is left as it was."""
    root = logging.getLogger()
    kept = root.handlers[:], root.level
    root.handlers = []
    try:
        configure_logging(LogFormat.JSON)
        logging.getLogger("outrider.cloud").info("said %s", "this")
        line = json.loads(capsys.readouterr().err)
        configure_logging(LogFormat.TEXT)
        logging.getLogger("outrider.cloud").info("said that")
        assert "INFO outrider.cloud: said that" in capsys.readouterr().err
    finally:
        root.handlers, root.level = kept
    assert (line["level"], line["logger"], line["message"]) == ("info", "outrider.cloud", "said this")


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
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert ended.value.code == 2 and said.out == ""
        (line,) = said.err.splitlines()
        assert line.startswith("error: ") and told in line


def test_help_names_everyday_options_and_help_all_every_one() -> None:
    """Without loading anything heavy."""
    short, whole = (
        CliRunner().invoke(cli.app, ["serve", help_option], env={"COLUMNS": "200", "TERM": "dumb"})
        for help_option in ("--help", "--help-all")
    )
    assert short.exit_code == whole.exit_code == 0
    for option in ("--host", "--api-key-file", "--tls-cert"):
        assert option in short.output and option in whole.output
    for option in ("--port-file", "--insecure-no-keys", "--policy", "--rate"):
        assert option not in short.output and option in whole.output
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == version("outrider")


def bundle_of(path: Path, **changes: str) -> Any:
    """A target's bundle for OpenVINO, as far as it is read before its model. changes: of the manifest."""
    file = FileEntry(path="openvino_model.xml", size=1, sha256="0" * 64)
    update = {"role": "target", "runtime": "openvino"} | changes
    manifest = make_manifest((file,), "0" * 64).model_copy(update=update)
    return types.SimpleNamespace(path=path, manifest=manifest, model_file=path, tokenizer=lambda: None)


@pytest.mark.parametrize("form", TreeForm)
def test_trees_on_request_give_up_batch_invariance(tmp_path: Path, form: TreeForm) -> None:
    """OpenVINO takes masks only without it: `--tree tree` loads so, the default does not."""
    loading = embedded._loading(bundle_of(tmp_path), ServeOptions(str(tmp_path), tree=form))
    assert loading.is_batch_invariant is (form is not TreeForm.TREE)


def test_exactness_is_kept_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO on a CPU is bitwise unless told otherwise, which makes it another target; nothing else can be."""
    openvino, torch = bundle_of(tmp_path), bundle_of(tmp_path, runtime="torch", format="safetensors")

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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], True),
        (["--lookup"], True),
        (["--no-lookup"], False),
    ],
)
def test_lookup_can_be_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], expected: bool
) -> None:
    """`serve --no-lookup` reaches the engine."""
    bundle = bundle_of(tmp_path)
    seen: list[EngineConfig] = []

    def engine(runtime: FakeBatchRuntime, config: EngineConfig) -> None:
        seen.append(config)
        raise ConfigError("far enough")

    monkeypatch.setattr(embedded, "EngineThread", engine)
    monkeypatch.setattr(serve_module, "configure_logging", lambda form: None)
    monkeypatch.setattr(embedded, "open_batch_runtime", lambda kind, file, options: FakeBatchRuntime())
    monkeypatch.setattr(embedded, "Bundle", types.SimpleNamespace(open=lambda path: bundle))
    model = types.SimpleNamespace(name="fake", target="0" * 16, tokenizer=fake_tokenizer(), dialect=None)
    monkeypatch.setattr(embedded, "ServedModel", lambda *arguments: model)
    assert str(CliRunner().invoke(cli.app, ["serve", str(tmp_path), "--port", "0", *given]).exception) == "far enough"
    assert [config.looks_up for config in seen] == [expected]


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
        told = serve_module._next_command(options, target, url, needs_key=needs_key, has_drafts=has_drafts)
        assert told == expected


def test_serving_the_reference_target_exports_it_first(
    tmp_path: Path, fake_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the exporter's own command, with a word about how long it takes; without the exporter, the pip command. Where
    the pair is there, nobody asks the exporter again until a package, the pair or a file of it has changed.
    """
    ran: list[list[str]] = []
    pair = {role: str(shutil.copytree(fake_bundle, tmp_path / "pair" / role)) for role in ("draft", "target")}

    def run_child(arguments: list[str], failure: str) -> str:
        ran.append(arguments)
        return json.dumps(pair)

    monkeypatch.setattr("outrider.models.bundle.reference_export.run_child_command", run_child)
    assert embedded.export_reference_target() == Path(pair["target"])
    asked = export_arguments(700.0, *draft_kind(DraftChoice()))  # as `run` asks
    assert ran == [["-P", "-m", with_parent.__name__, "outrider.export.cli", *asked]]
    assert "is exported, in one to three minutes" in capsys.readouterr().err
    assert embedded.export_reference_target() == Path(pair["target"]) and len(ran) == 1
    assert "is exported" not in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "distributions", lambda: [])  # another machine, say
        embedded.export_reference_target()
    embedded.export_reference_target()  # what was noted there
    assert len(ran) == 3
    (tmp_path / "pair" / "draft" / "manifest.json").unlink()
    embedded.export_reference_target()
    assert len(ran) == 4 and capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(
        RuntimeUnavailable, match=r"'nncf', which is not installed; run: pip install \"outrider\[export\]\""
    ):
        embedded.export_reference_target()
    assert len(ran) == 4 and capsys.readouterr().err == ""


def test_serve_runs_a_bundle_from_start_to_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole of `serve` but the model: ready line, port file, requests, end."""
    opened = bundle_of(tmp_path, precision="int8")
    architecture = opened.manifest.architecture.model_copy(update={"parameters": 14_600_000})
    opened.manifest = opened.manifest.model_copy(update={"architecture": architecture})
    opened.tokenizer = fake_tokenizer

    monkeypatch.setattr(embedded, "Bundle", types.SimpleNamespace(open=lambda path: opened))
    monkeypatch.setattr(embedded, "open_batch_runtime", lambda *_: FakeBatchRuntime(vocab_size=300))
    monkeypatch.setattr(serve_module, "configure_logging", lambda _: None)
    port_file = tmp_path / "port"
    arguments = ["serve", str(tmp_path), "--port", "0", "--port-file", str(port_file), "--name", "mine"]
    urls: list[str] = []

    def use(url: str) -> None:
        urls.append(url)
        with httpx.Client(base_url=url) as client:
            assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)
            facts = client.get("/v1/model").json()
            assert (facts["name"], facts["precision"], facts["parameters"]) == ("mine", "int8", 14_600_000)
            ready = client.get("/health/ready").json()
            assert ready["step_ms"] > 0
            assert {facts["target"], ready["target"]} == {target_identity(opened.manifest, RuntimeOptions())}

    with used_beside(port_file, use):
        cli.app(arguments, standalone_mode=False)
    (url,) = urls
    summary, ready, following = capsys.readouterr().out.splitlines()
    assert (
        following == f'In another terminal: outrider run --cloud {url} --draft DRAFT_BUNDLE --compare "def walk(path):"'
    )
    assert summary.startswith("mine: 14.6M parameters, int8, loaded in")
    assert ready == f"{READY_PREFIX}{url}"
    assert not port_file.exists()


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
    assert (options.max_running, options.lookup, options.rate) == (5, False, 9.0)
    assert (options.allowed_host, options.tls_cert) == (["a.example"], tmp_path / "cert")
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
        found = serve().exception
        assert isinstance(found, ConfigError) and str(file) in str(found) and re.search(told, str(found)), found
    file.unlink()
    assert "cannot be read" in str(serve().exception)
    assert len(seen) == 1
