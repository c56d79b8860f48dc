"""The server as a whole: what it exposes, how it ends, and its command line."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import FakeServer, StepGate, fake_tokenizer, read_events, run_session, serve_fake, target_tokens
from tests.test_bundle import make_manifest
from typer.testing import CliRunner

from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.api.stream import encode_commit
from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine.config import SpillType, TreeForm
from outrider.cloud.seam import CommitEvent
from outrider.cloud.server import embedded
from outrider.cloud.server import main as cli
from outrider.cloud.server import serve as serve_module
from outrider.cloud.server.options import Exactness, ServeOptions
from outrider.cloud.server.target import target_identity
from outrider.edge.cli.draft_source import draft_kind
from outrider.edge.devices.placement import DraftChoice
from outrider.models.bundle.manifest import FileEntry, Manifest
from outrider.models.bundle.reference_export import export_arguments
from outrider.models.errors import ConfigError, RuntimeUnavailable, SamplingError
from outrider.models.http.logs import LogFormat, configure_logging
from outrider.models.http.security import KeyRing, require_safe_host
from outrider.models.ingress.sockets import READY_PREFIX, open_socket, url_of
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.wire.protocol import Commit, ReadyAnswer, SessionEnd, SessionOpen, parse_event
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE

PROMPT = [5, 17, 99, 3]
ALIASES = {
    **dict.fromkeys(("/health", "/healthz", "/livez"), "/health/live"),
    "/readyz": "/health/ready",
}
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serve_fake() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as opened:
        yield opened


@given(
    base=st.integers(0, 10**6),
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9),
    proposed=st.integers(0, 8),
)
def test_commits_on_the_wire_are_the_protocols(base: int, tokens: list[int], proposed: int) -> None:
    """What is written by hand is what the protocol's model reads, and as short as it can be."""
    event = CommitEvent(base, tuple(tokens), min(proposed, 1), proposed)
    data = encode_commit(event)
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    assert parse_event(data[6:]) == Commit(base=base, tokens=tokens, accepted=min(proposed, 1), proposed=proposed)
    raw = json.loads(data[6:])
    assert set(raw) == ({"base", "tokens", "accepted", "proposed"} if proposed else {"base", "tokens"})
    assert data[6:-2] == json.dumps(raw, separators=(",", ":")).encode()


def test_what_is_no_event_is_refused() -> None:
    """A reader does not guess."""
    for data in ("{}", "[]", '{"type":"other"}', "{", '{"base":1}'):
        with pytest.raises(ValueError):
            parse_event(data)


def test_a_token_costs_less_than_sixty_bytes_down(client: httpx.Client) -> None:
    """The worst case of a session, a commit for every token, with numbers of four digits."""
    with_lookup = encode_commit(CommitEvent(3, (1, 2, 3), 2, 4, 1)).decode().strip()
    assert parse_event(with_lookup[6:]) == Commit(base=3, tokens=[1, 2, 3], accepted=2, proposed=4, looked_up=1)
    assert len(encode_commit(CommitEvent(9999, (151_935,), 0, 0))) < 60
    with client.stream("POST", "/v1/sessions", json=BODY) as response:
        received = sum(map(len, response.iter_raw()))
    assert received / 24 < 60


def test_small_answers_have_small_headers(server: FakeServer) -> None:
    """A drafts answer is a status line; nothing tells the server's name or the date."""
    host, port = server.url.removeprefix("http://").split(":")
    answers = []
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as stream:
        connection.sendall(_post("/v1/sessions", json.dumps(BODY | {"max_tokens": 4000}).encode()))
        while not (line := stream.readline()).startswith(b"data: "):
            answers.append(line)
        opened = parse_event(line[6:])
        assert isinstance(opened, SessionOpen)
        with socket.create_connection((host, int(port))) as second:
            second.sendall(_post(f"/v1/sessions/{opened.session}/drafts", b'{"base":0,"paths":[[1,2,3]]}'))
            first_line = second.makefile("rb").readline()
    assert not any(line.lower().startswith((b"server:", b"date:")) for line in answers)
    assert first_line in (b"HTTP/1.1 204 No Content\r\n", b"HTTP/1.1 409 Conflict\r\n")
    server.wait_until(server.is_empty)


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def test_small_writes_leave_at_once(server: FakeServer, client: httpx.Client) -> None:
    """TCP_NODELAY is in effect on accepted connections."""
    client.get("/health/live")
    (connection, *_) = server.server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_metrics_tell_what_happened(client: httpx.Client, server: FakeServer) -> None:
    """The exposition parses, has help for everything, and counts tokens, requests and times."""

    def read() -> dict[str, float]:
        answer = client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        families = list(text_string_to_metric_families(answer.text))
        assert all(family.documentation for family in families)
        return {
            sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
            for family in families
            for sample in family.samples
        }

    before = read()
    told = run_session(client, BODY)
    server.wait_until(server.is_empty)
    after = read()

    def grown(name: str, **labels: str) -> float:
        key = name + json.dumps(labels, sort_keys=True)
        return after[key] - before.get(key, 0.0)

    assert grown("outrider_generation_tokens_total") == 24
    assert grown("outrider_request_success_total", finished_reason="length") == 1
    assert grown("outrider_time_to_first_token_seconds_count") == 1
    assert grown("outrider_inter_token_latency_seconds_count") == len(told.commits) - 1
    assert grown("outrider_http_requests_total", route="/v1/sessions", method="POST", status="200") == 1
    assert grown("outrider_e2e_request_latency_seconds_count") == 1
    assert grown("outrider_target_passes_total") == len(told.commits)
    for name in ("kv_cache_free_blocks", "draft_patience_seconds", "decode_step_seconds", "kv_cache_usage_perc"):
        assert f"outrider_{name}{{}}" in after
    client.get("/no/such/path")
    assert 'route="unmatched"' in client.get("/metrics").text
    assert "/no/such/path" not in client.get("/metrics").text


def test_readiness_tells_the_load(client: httpx.Client, server: FakeServer) -> None:
    """What agents choose an endpoint by."""
    server.wait_until(server.is_empty)
    ready = ReadyAnswer.model_validate_json(client.get("/health/ready").content)
    assert (ready.status, ready.model, ready.running, ready.queue_depth) == ("ready", "fake", 0, 0)
    assert ready.free_block_share == 1.0
    facts = client.get("/v1/model").json()
    assert facts["tokenizer"] == server.core.model.tokenizer.fingerprint and facts["vocab_size"] == 300


def test_the_openapi_document_is_complete(client: httpx.Client, server: FakeServer) -> None:
    """Every route is in it, every body and answer has a schema, and every reference leads somewhere."""
    document = client.get("/openapi.json").json()
    assert {
        "/v1/sessions",
        "/v1/sessions/{session_id}",
        "/v1/sessions/{session_id}/drafts",
        "/v1/verify",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/model",
        "/v1/drafts",
        "/v1/drafts/{name}/{path}",
        "/v1/tokenizer",
        "/v1/tokenizer/{path}",
        "/v1/render",
        "/health/live",
        "/health/ready",
        "/metrics",
    } == set(document["paths"])
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], path
            assert "422" not in operation["responses"] and "default" in operation["responses"]
            if method == "post":
                assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            good = next(answer for status, answer in operation["responses"].items() if status[0] == "2")
            assert good.get("content") or "204" in operation["responses"], path
    drafts = document["paths"]["/v1/sessions/{session_id}/drafts"]["post"]
    assert drafts["requestBody"]["content"][TREE_MEDIA_TYPE]["schema"]["format"] == "binary"
    assert TREE_MEDIA_TYPE in drafts["description"]
    text = json.dumps(document)
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert references <= set(document["components"]["schemas"])
    assert {"SessionRequest", "SessionOpen", "Commit", "SessionEnd", "DraftRequest", "VerifyItem"} <= references
    assert "CompletionRequest" in references and "ErrorAnswer" in references
    routed = {
        (method.lower(), route.path_format)
        for route in _routes(server)
        for method in route.methods or ()
        if method != "HEAD" and route.path not in ALIASES
    }
    assert routed <= {(method, path) for path, operations in document["paths"].items() for method in operations}


def test_the_document_knows_which_temperatures_are_refused(client: httpx.Client) -> None:
    """Those between greedy and the smallest one, in every request that has a temperature."""
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    properties = [schema.get("properties", {}) for schema in schemas.values()]
    found = [each["temperature"] for each in properties if "not" in each.get("temperature", {})]
    assert len(found) >= 4
    least = 0.0001
    assert {each["not"]["exclusiveMaximum"] for each in found} == {least}
    assert {(each["not"]["type"], each["not"]["exclusiveMinimum"]) for each in found} == {("number", 0.0)}
    assert SamplingParams(temperature=least).temperature == least
    with pytest.raises(SamplingError):
        SamplingParams(temperature=least / 2)


def test_health_is_answered_under_its_usual_names() -> None:
    """The same answer, without a key, and not once more in the document."""
    settings = ServerSettings(keys=KeyRing(["sixteen-characters"]))
    with serve_fake(settings) as server, httpx.Client(base_url=server.url) as client:
        documented = client.get("/openapi.json").json()["paths"]
        for alias, path in ALIASES.items():
            assert client.get(alias).json() == client.get(path).json() and client.get(alias).status_code == 200
            assert path in documented and alias not in documented
            for name in (alias, path):
                head = client.head(name)
                assert (head.status_code, head.content) == (200, b"")
        assert client.get("/v1/model").status_code == 401


def _routes(server: FakeServer) -> list[APIRoute]:
    from outrider.cloud.api.completions import completion_routes
    from outrider.cloud.api.downloads import download_routes
    from outrider.cloud.api.health import health_routes
    from outrider.cloud.api.sessions import session_routes
    from outrider.cloud.api.verify import verify_routes

    groups = (completion_routes, download_routes, health_routes, session_routes, verify_routes)
    return [route for group in groups for route in group(server.core).routes if isinstance(route, APIRoute)]


def test_the_document_says_that_keys_are_needed(client: httpx.Client) -> None:
    """With keys, and only then, the document names the scheme."""
    assert "security" not in client.get("/openapi.json").json()
    with serve_fake(ServerSettings(keys=KeyRing(["sixteen-characters"]))) as server:
        document = httpx.get(server.url + "/openapi.json").json()
    (needed,) = document["security"]
    assert document["components"]["securitySchemes"][next(iter(needed))]["scheme"] == "bearer"


def test_draining_lets_running_sessions_finish() -> None:
    """While draining, new work is refused, drafts are taken, streams go to their end, and then the server closes."""
    gate = StepGate()
    with serve_fake(gate=gate, drain_s=30.0) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/sessions", json=BODY) as response:
            events = read_events(response)
            opened = next(events)
            assert isinstance(opened, SessionOpen)
            server.server.handle_exit(signal.SIGTERM, None)
            server.wait_until(lambda: client.post("/v1/sessions", json=BODY).status_code == 503)
            ready = client.get("/health/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            draft = {"base": 0, "paths": [target_tokens(PROMPT, 4)]}
            assert client.post(f"/v1/sessions/{opened.session}/drafts", json=draft).status_code == 204
            gate.open()
            *commits, end = events
        assert isinstance(end, SessionEnd) and end.reason == "length"
        tokens = [token for commit in commits if isinstance(commit, Commit) for token in commit.tokens]
        assert tokens == target_tokens(PROMPT, 24)
        server.wait_until(lambda: server.server.should_exit)
        with pytest.raises(httpx.TransportError):
            while True:
                httpx.get(server.url + "/health/live")


def test_what_does_not_finish_in_time_is_told() -> None:
    """With no time to drain, streams end with the reason "shutdown" and what was committed so far."""
    gate = StepGate()
    with serve_fake(gate=gate) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/sessions", json=BODY | {"max_tokens": 4000}) as response:
            server.server.begin_drain(0.0)
            server.wait_until(lambda: client.post("/v1/sessions", json=BODY).status_code == 503)
            gate.open()
            *_, end = read_events(response)
        assert isinstance(end, SessionEnd) and end.reason == "shutdown"
        server.wait_until(lambda: server.server.should_exit)


def test_a_second_signal_ends_what_runs() -> None:
    """Who asks twice does not want to wait for the sequences, and who asks three times for nothing at all."""
    gate = StepGate()
    with (
        serve_fake(gate=gate, drain_s=600.0) as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v1/sessions", json=BODY | {"max_tokens": 4000}) as response,
    ):
        server.server.handle_exit(signal.SIGINT, None)
        server.wait_until(lambda: client.post("/v1/sessions", json=BODY).status_code == 503)
        assert not server.server.should_exit
        server.server.handle_exit(signal.SIGINT, None)
        gate.open()
        *_, end = read_events(response)
        assert isinstance(end, SessionEnd) and end.reason == "shutdown"
        server.wait_until(lambda: server.server.should_exit)
        assert not server.server.force_exit
        server.server.handle_exit(signal.SIGINT, None)
        assert server.server.force_exit


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
        ([str(tmp_path), "--host", "0.0.0.0"], "without API keys"),
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


def test_trees_on_request_give_up_batch_invariance(tmp_path: Path) -> None:
    """OpenVINO takes masks only without it: `--tree tree` loads so, the default does not."""
    file = FileEntry(path="openvino_model.xml", size=1, sha256="0" * 64)
    manifest = make_manifest((file,), "0" * 64).model_copy(update={"role": "target", "runtime": "openvino"})
    bundle = types.SimpleNamespace(path=tmp_path, manifest=manifest, model_file=tmp_path)
    for form, is_invariant in ((TreeForm.AUTO, True), (TreeForm.LINE, True), (TreeForm.TREE, False)):
        loading = embedded._loading(bundle, ServeOptions(str(tmp_path), tree=form))  # type: ignore[arg-type]
        assert loading.is_batch_invariant is is_invariant


def test_exactness_is_kept_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO on a CPU is bitwise unless told otherwise, which makes it another target; nothing else can be."""
    file = FileEntry(path="openvino_model.xml", size=1, sha256="0" * 64)
    openvino = make_manifest((file,), "0" * 64).model_copy(update={"role": "target", "runtime": "openvino"})
    torch = openvino.model_copy(update={"runtime": "torch", "format": "safetensors"})

    def identity(manifest: Manifest, exact: Exactness | None, **changes: Any) -> str:
        bundle: Any = types.SimpleNamespace(path=tmp_path, manifest=manifest, model_file=tmp_path)
        return target_identity(manifest, embedded._loading(bundle, ServeOptions("x", exact=exact, **changes)))

    usual = identity(openvino, None)
    assert identity(openvino, Exactness.BITWISE) == usual != identity(openvino, Exactness.NEAR)
    assert identity(torch, Exactness.NEAR) == identity(torch, None)
    assert identity(openvino, Exactness.NEAR, device="GPU") == identity(openvino, None, device="GPU")
    cuda = identity(torch, None, device="cuda:1")
    assert cuda == identity(torch, Exactness.NEAR, device="cuda") != identity(torch, Exactness.BITWISE, device="cuda")
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    for manifest, changes, told in (
        (torch, {}, "torch on cpu computes logits by the shape of a step"),
        (torch, {"device": "cuda"}, "bitwise on CUDA needs Triton"),
        (openvino, {"device": "GPU"}, "openvino on GPU computes"),
        (openvino, {"tree": TreeForm.TREE}, "--tree tree gives up"),
        (openvino, {"spill_type": SpillType.FP8}, "--spill-type fp8 rounds"),
    ):
        with pytest.raises(ConfigError, match=told):
            identity(manifest, Exactness.BITWISE, **changes)


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
    file = FileEntry(path="openvino_model.xml", size=1, sha256="0" * 64)
    manifest = make_manifest((file,), "0" * 64).model_copy(update={"role": "target", "runtime": "openvino"})
    bundle = types.SimpleNamespace(path=tmp_path, manifest=manifest, model_file=tmp_path, tokenizer=lambda: None)
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
    found = CliRunner().invoke(cli.app, ["serve", str(tmp_path), "--port", "0", *given])
    assert str(found.exception) == "far enough"
    assert [config.looks_up for config in seen] == [expected]


def test_the_next_command_names_what_is_known(tmp_path: Path) -> None:
    """The draft beside the target, the address where it is not the default; nothing for the reference pair."""
    for name in ("draft", "target"):
        (tmp_path / "my pair" / name).mkdir(parents=True)
    target = tmp_path / "my pair" / "target"
    default = "http://127.0.0.1:8000"
    named = serve_module._next_command(ServeOptions(str(target)), target, default, needs_key=False)
    assert named == f"outrider run --draft '{tmp_path}/my pair/draft' --compare \"def walk(path):\""
    plain = serve_module._next_command(ServeOptions("reference"), target, default, needs_key=False)
    assert plain == 'outrider run --compare "def walk(path):"'
    public = ServeOptions("reference", host="0.0.0.0")
    remote = serve_module._next_command(public, target, "https://0.0.0.0:8443", needs_key=True)
    assert remote == 'OUTRIDER_API_KEY=KEY outrider run --cloud https://SERVER:8443 --compare "def walk(path):"'


def test_serving_the_reference_target_exports_it_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the exporter's own command, with a word about how long it takes; without the exporter, the pip command."""
    ran: list[list[str]] = []

    def run_child(arguments: list[str], failure: str) -> str:
        ran.append(arguments)
        return '{"draft": "there/draft", "target": "there/target"}'

    monkeypatch.setattr("outrider.models.bundle.reference_export.run_child_command", run_child)
    assert embedded.export_reference_target() == Path("there/target")
    asked = export_arguments(700.0, *draft_kind(DraftChoice()))  # as `run` asks
    assert ran == [["-P", "-m", "outrider.export.cli", *asked]]
    assert "takes one to three minutes" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(
        RuntimeUnavailable, match=r"'nncf', which is not installed; run: pip install \"outrider\[export\]\""
    ):
        embedded.export_reference_target()
    assert len(ran) == 1 and capsys.readouterr().err == ""


def test_serve_runs_a_bundle_from_start_to_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole of `serve` but the model: ready line, port file, requests, end."""
    from tests.fake_runtime import FakeBatchRuntime

    started: list[VerifierServer] = []

    class Opened:
        path = tmp_path
        model_file = tmp_path

        class manifest:
            role = "target"
            name = "fake-bundle"
            eos_token_ids = (0,)
            runtime = "openvino"
            device = "cpu"
            precision = "int8"
            format = "openvino-ir"
            files = (FileEntry(path="openvino_model.bin", size=1, sha256="0" * 64),)
            widened = None
            digest = "d" * 64

            class architecture:
                parameters = 14_600_000
                name = "llama"

        tokenizer = staticmethod(fake_tokenizer)

    class Server(VerifierServer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(embedded, "Bundle", types.SimpleNamespace(open=lambda path: Opened))
    monkeypatch.setattr(embedded, "open_batch_runtime", lambda *_: FakeBatchRuntime(vocab_size=300))
    monkeypatch.setattr(serve_module, "VerifierServer", Server)
    monkeypatch.setattr(serve_module, "configure_logging", lambda _: None)
    port_file = tmp_path / "port"
    arguments = ["serve", str(tmp_path), "--port", "0", "--port-file", str(port_file), "--name", "mine"]
    failures: list[BaseException] = []

    def run() -> None:
        try:
            cli.app(arguments, standalone_mode=False)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not port_file.exists():
            assert thread.is_alive(), failures
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        with httpx.Client(base_url=url) as client:
            assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)
            facts = client.get("/v1/model").json()
            assert (facts["name"], facts["precision"], facts["parameters"]) == ("mine", "int8", 14_600_000)
            ready = client.get("/health/ready").json()
            assert ready["step_ms"] > 0
            named = {facts["target"], ready["target"]}
            assert named == {target_identity(Opened.manifest, RuntimeOptions())}  # type: ignore[arg-type]
    finally:
        for server in started:
            server.handle_exit(signal.SIGTERM, None)
        thread.join(30.0)
    assert not thread.is_alive() and not failures
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
