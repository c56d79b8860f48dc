"""Tests what starts `outrider serve` at login: the files, and the commands `outrider service`."""

from __future__ import annotations

import configparser
import os
import plistlib
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from tests.commands import Outrider

from outrider.edge.setup.service import (
    MARK,
    Service,
    launchd_agent,
    remove_service,
    run_command,
    service_here,
    systemd_unit,
    windows_task,
    write_service,
)
from outrider.models.errors import ConfigError, RuntimeUnavailable

PLACES = (
    ("systemd", ".config/systemd/user/outrider.service"),
    ("launchd", "Library/LaunchAgents/outrider.serve.plist"),
    ("windows", "AppData/Local/outrider/outrider-task.xml"),
)


def service(
    home: Path, system: str = "systemd", python: str = "/opt/a b/bin/python", *, has_config: bool = True
) -> Service:
    """The service of a user whose home is `home`."""
    command = (python, "-m", "outrider.edge.cli", "serve")
    config = home / "my $100% config.toml" if has_config else None
    if system == "systemd":
        return systemd_unit(command, config, home / ".config")
    if system == "launchd":
        return launchd_agent(command, config, home, "me")
    return windows_task(command, config, home, "me", home / "AppData" / "Local" / "outrider")


def test_the_unit_starts_serve_with_the_configuration(tmp_path: Path) -> None:
    """Paths with spaces, dollars and percent signs survive systemd's quoting; secrets are not in it."""
    unit = configparser.ConfigParser(interpolation=None, comment_prefixes="#")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(service(tmp_path, python="/opt/a b/$x 5%/python").content.decode())
    started = unit["Service"]
    command = started["ExecStart"].replace("$$", "$").replace("%%", "%")
    assert shlex.split(command) == ["/opt/a b/$x 5%/python", "-m", "outrider.edge.cli", "serve"]
    environment = shlex.split(started["Environment"].replace("%%", "%"))
    assert environment == [f"OUTRIDER_CONFIG={tmp_path}/my $100% config.toml"]
    assert (unit["Install"]["WantedBy"], started["RestartPreventExitStatus"]) == ("default.target", "2")
    safe = ("NoNewPrivileges", "LockPersonality", "RestrictRealtime", "RestrictSUIDSGID")
    assert {started[line] for line in safe} == {"true"}
    assert "OUTRIDER_CONFIG" not in service(tmp_path, has_config=False).content.decode()
    with pytest.raises(ConfigError, match="line break"):
        service(tmp_path, python="/a\nExecStartPre=/bin/evil")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    """Its own checker, which also looks for the program."""
    unit = tmp_path / "outrider.service"
    unit.write_bytes(service(tmp_path, python=sys.executable).content)
    command = ["systemd-analyze", "--user", "verify", str(unit)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "Failed to initialize manager" in done.stderr:
        pytest.skip("systemd runs no user manager here")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_launchd_agent_starts_serve_and_starts_it_again(tmp_path: Path) -> None:
    """Not run on hardware: read back as a property list."""
    content = service(tmp_path, "launchd").content
    agent = plistlib.loads(content)
    assert agent == agent | {
        "ProgramArguments": ["/opt/a b/bin/python", "-m", "outrider.edge.cli", "serve"],
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "EnvironmentVariables": {"OUTRIDER_CONFIG": f"{tmp_path}/my $100% config.toml"},
    }
    assert MARK.encode() in content and b"not run on hardware" in content


def test_the_windows_task_starts_serve_at_its_users_logon(tmp_path: Path) -> None:
    """Not run on hardware: read back as XML. No time limit, also on battery, without administrator's rights."""
    content = service(tmp_path, "windows", r"C:\Program Files\Python\pythonw.exe").content
    assert content.startswith(b"\xff\xfe")  # as Task Scheduler writes its own
    task = ElementTree.fromstring(content)
    space = "http://schemas.microsoft.com/windows/2004/02/mit/task"

    for path, expected in {
        "Actions/Exec/Command": r"C:\Program Files\Python\pythonw.exe",
        "Actions/Exec/Arguments": "-m outrider.edge.cli serve",
        "Triggers/LogonTrigger/UserId": "me",
        "Principals/Principal/UserId": "me",
        "Principals/Principal/RunLevel": "LeastPrivilege",
        "Settings/ExecutionTimeLimit": "PT0S",
        "Settings/StopIfGoingOnBatteries": "false",
        "Settings/DisallowStartIfOnBatteries": "false",
    }.items():
        assert task.findtext(path, namespaces={"": space}) == expected, path
    assert MARK in task.findtext("RegistrationInfo/Description", "", {"": space})


@pytest.mark.parametrize(("system", "place"), PLACES)
def test_a_file_of_other_content_is_replaced_only_with_force(
    tmp_path: Path, system: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written whole or not at all, on a full disk too; the same is left alone; only a file of ours is removed."""
    made = service(tmp_path, system)
    assert made.path == tmp_path / place
    assert write_service(made) and not write_service(made)
    assert made.path.read_bytes() == made.content and stat.S_IMODE(made.path.stat().st_mode) == 0o600
    mine = "# mine\n".encode("utf-16" if system == "windows" else "utf-8")
    made.path.write_bytes(mine)
    for change, words in ((write_service, "--force"), (remove_service, "was not written by")):
        with pytest.raises(ConfigError, match=words):
            change(made)
        assert made.path.read_bytes() == mine
    assert write_service(made, force=True) and made.path.read_bytes() == made.content
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        write_service(service(tmp_path, system, "another"), force=True)
    assert made.path.read_bytes() == made.content
    assert [path.name for path in made.path.parent.iterdir()] == [made.path.name]  # no temporary file is left
    remove_service(made)
    assert not made.path.exists()


def test_each_system_has_its_manager(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    """The file is this user's, and starts this installation with this configuration."""
    monkeypatch.setenv("USERNAME", "me")
    monkeypatch.setenv("USERDOMAIN", "HOME")
    exec_start = f"ExecStart={sys.executable} -P -m outrider.edge.cli serve\n"
    for name, system, manager, encoding, words in (
        ("linux", "systemd", "systemctl", "utf-8", exec_start),
        ("darwin", "launchd", "launchctl", "utf-8", "<string>outrider.edge.cli</string>"),
        ("win32", "windows", "schtasks", "utf-16", "<UserId>HOME\\me</UserId>"),
    ):
        each = service_here("outrider.edge.cli", name)
        assert (each.system, each.config) == (system, config) and words in each.content.decode(encoding)
        assert {command[0] for command in (*each.turn_on, *each.turn_off, each.ask)} == {manager}
    with pytest.raises(RuntimeUnavailable, match="plan9"):
        service_here("outrider.edge.cli", "plan9")


@pytest.fixture
def managed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A home of this test's own, and a service manager that takes every command; the commands."""
    commands: list[tuple[str, ...]] = []

    def take(command: tuple[str, ...], sign: str = "") -> tuple[bool, str]:
        commands.append(command)
        return True, "active"

    made = service(tmp_path)
    monkeypatch.setattr("outrider.edge.cli.setup_screens.service_here", lambda module: made)
    monkeypatch.setattr("outrider.edge.cli.setup_screens.run_command", take)
    return commands


def test_install_status_and_uninstall(
    config: Path, tmp_path: Path, managed: list[tuple[str, ...]], outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--print writes nothing; install enables and starts; variables that the service will not see are named."""
    made = service(tmp_path)
    path = made.path
    assert outrider("service", "install", "--print").out == made.content.decode()
    assert not path.exists() and not managed
    assert "not installed" in outrider("service", "status", code=1).out
    advice = {
        "OUTRIDER_API_KEY": "name that as key_file in the configuration file",
        "OUTRIDER_API_KEYS": "name that as api_key_file below [serve] in the configuration file",
        "OUTRIDER_CACHE": "`systemctl --user edit outrider`, and add `Environment=OUTRIDER_CACHE=DIR` below [Service]",
        "OUTRIDER_DRAFT": "put it into the configuration file",
        "OUTRIDER_SERVE_API_KEY": "name that as key_file in the configuration file",
    }
    for name in advice:
        monkeypatch.setenv(name, "x")
    shown = outrider("service", "install")
    assert f"wrote {path}" in shown.out.replace("\n", "")
    notes = [line for line in shown.err.splitlines() if "the service does not see" in line]
    for note, (name, words) in zip(notes, advice.items(), strict=True):  # not OUTRIDER_CONFIG, which is set as well
        assert f"the service does not see {name}; " in note and note.endswith(words)
    assert [command[2] for command in managed] == ["daemon-reload", "enable", "restart"]
    assert "runs\n" in outrider("service", "status").out
    path.write_text(f"# {MARK}, an older one\n")
    assert "is not this version's; run `outrider service install --force`" in outrider("service", "status").out
    assert "--force" in outrider("service", "install", code=2).err
    outrider("service", "install", "--force")
    assert path.read_bytes() == made.content
    outrider("service", "uninstall")
    assert not path.exists() and managed[-2] == ("systemctl", "--user", "disable", "--now", "outrider.service")
    assert "not installed" in outrider("service", "uninstall").out


def test_what_exists_does_not_run_yet(tmp_path: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """launchd and Windows answer for each service that they know. Words as documented; not run on hardware."""
    task = '"PC","\\Outrider","N/A","{}","Interactive only","28/11/2026 09:00:00","{}"'
    for system, shown, does_run in (
        ("launchd", "\tstate = running\n\tlast exit code = 0\n}", True),
        ("launchd", "\tstate = not running\n\tlast exit code = 0\n}", False),
        ("windows", task.format("Wird ausgeführt", 267009), True),
        ("windows", task.format("Bereit", 0), False),
    ):
        made = service(tmp_path, system)
        write_service(made)
        told = replace(made, ask=(sys.executable, "-c", f"print({shown!r}.encode('ascii', 'replace').decode())"))
        monkeypatch.setattr("outrider.edge.cli.setup_screens.service_here", lambda module, told=told: told)
        assert ("knows it as stopped" in outrider("service", "status", code=0 if does_run else 1).out) != does_run


@pytest.mark.parametrize("system", ["launchd", "windows"])
def test_an_install_ends_what_ran_before(
    system: str,
    config: Path,
    tmp_path: Path,
    managed: list[tuple[str, ...]],
    outrider: Outrider,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task that runs is not started a second time."""
    made = service(tmp_path, system)
    monkeypatch.setattr("outrider.edge.cli.setup_screens.service_here", lambda module: made)
    outrider("service", "install")
    assert managed == [made.turn_off[0], *made.turn_on]


def test_a_broken_configuration_is_not_installed(
    config: Path, tmp_path: Path, managed: list[tuple[str, ...]], outrider: Outrider
) -> None:
    """The service would only fail at each login; uninstalling still works."""
    config.write_text("[run]\nseed = 'x'\n", encoding="utf-8")
    assert "line 2: run.seed is 'x'" in outrider("service", "install", code=2).err
    assert not service(tmp_path).path.exists() and not managed
    outrider("service", "uninstall")


def test_a_manager_that_fails_is_reported_with_the_command(
    config: Path, managed: list[tuple[str, ...]], outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is there, so the user can run the command later; the exit status says that it is not done."""
    monkeypatch.setattr(
        "outrider.edge.cli.setup_screens.run_command", lambda command: (False, "Failed to connect to bus")
    )
    shown = outrider("service", "install", code=1)
    assert "`systemctl --user daemon-reload` failed: Failed to connect to bus" in shown.err
    assert "started" not in shown.out
    for command, answer in (
        (("outrider-no-such-manager",), (False, "outrider-no-such-manager is not installed")),
        ((sys.executable, "-c", "print('up')"), (True, "up")),
        ((sys.executable, "-c", "raise SystemExit('down')"), (False, "down")),
    ):
        assert run_command(command) == answer
