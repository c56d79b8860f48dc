"""The systemd unit: what systemd-analyze says of it, and its command line."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.serve_command import serve_options

PLACE = Path(__file__).parent.parent / "deploy" / "systemd"
UNIT = PLACE / "outrider-cloud.service"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
SERVER = "/opt/outrider/bin/outrider-cloud"


def settings() -> dict[str, list[str]]:
    """The unit's settings, in the order of their lines."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def command() -> list[str]:
    """The words that systemd would run, with the example's variables: `${X}` is one word, `$X` is split."""
    variables = dict(
        line.split("=", 1)
        for line in (PLACE / "cloud.env.example").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    (start,) = settings()["ExecStart"]
    words: list[str] = []
    for word in shlex.split(start):
        if re.fullmatch(r"\$\w+", word):
            words += variables[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], word))
    return words


def test_the_command_is_one_of_the_server_and_stops_in_time() -> None:
    """With the example's variables its options parse; systemd waits longer than it drains; keys are a credential."""
    program, *words = command()
    options = serve_options(["outrider-cloud", *words])
    assert program == SERVER
    (patience,) = settings()["TimeoutStopSec"]
    assert int(patience) > options["drain_s"]
    (credential,) = settings()["LoadCredential"]
    assert options["api_key_file"] == f"%d/{credential.split(':')[0]}"
    assert settings()["RestartForceExitStatus"] == ["SIGHUP"], "a reload while Python still starts would be a clean end"
    assert settings()["KillMode"] == ["mixed"], "vLLM's workers get no SIGTERM: the server ends them"


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
    document = (PLACE.parent.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    documented = re.search(r"exposure level\s+of (\d\.\d)", document)
    assert documented
    threshold = f"--threshold={round(float(documented[1]) * 10)}"
    rate = ["systemd-analyze", "security", "--offline=true", "--no-pager", threshold, str(placed(tmp_path))]
    rated = subprocess.run(rate, capture_output=True, text=True)
    if "unrecognized option" in rated.stderr:
        pytest.skip("this systemd-analyze rates no unit offline")
    assert rated.returncode == 0, rated.stdout[-200:] + rated.stderr
