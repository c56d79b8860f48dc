"""Makes the file that starts `outrider serve` when its user logs in, for the system's own service manager.

systemd user unit, launchd agent, or a task of Windows' Task Scheduler. The unit is checked by `systemd-analyze verify`;
launchd's and Windows' files are written after their documentation and were not run on hardware.

The service reads the configuration file at each start, so the file has no options of its own. Nothing here runs as
root.
"""

from __future__ import annotations

import os
import plistlib
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from xml.sax.saxutils import escape

import platformdirs

from outrider.edge.setup.config_file import VARIABLE, config_path
from outrider.edge.setup.endpoints import write_private
from outrider.models.errors import ConfigError, RuntimeUnavailable

System = Literal["systemd", "launchd", "windows"]
MARK: Final = "Written by `outrider service install`"
"""Stands in each file; `uninstall` removes no other."""
LABEL: Final = "outrider.serve"
TASK_NAME: Final = "Outrider"
COMMAND_TIMEOUT_S: Final = 30.0

UNIT: Final = """\
# {mark}; change it with `systemctl --user edit outrider`.
[Unit]
Description=Outrider: drafts on this device for a target in the cloud
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=exec
ExecStart={command}
{environment}WorkingDirectory=%h
Restart=on-failure
RestartSec=5
# A mistake in the configuration: starting again does not mend it.
RestartPreventExitStatus=2
UMask=0077
NoNewPrivileges=true
LockPersonality=true
RestrictRealtime=true
RestrictSUIDSGID=true
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
# Not MemoryDenyWriteExecute: runtimes compile models into memory. Not ProtectSystem, PrivateTmp and the like: a user
# manager needs user namespaces for them, and in one the NPU's and the GPU's group is lost.

[Install]
WantedBy=default.target
"""

TASK: Final = """\
<?xml version="1.0" encoding="utf-16"?>
<Task xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task" version="1.2">
  <RegistrationInfo>
    <Description>{mark}; not run on hardware.</Description>
  </RegistrationInfo>
  <Triggers>
    <LogonTrigger>
      <Enabled>true</Enabled>
      <UserId>{user}</UserId>
    </LogonTrigger>
  </Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{user}</UserId>
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure>
      <Interval>PT1M</Interval>
      <Count>5</Count>
    </RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{command}</Command>
      <Arguments>{arguments}</Arguments>
      <WorkingDirectory>{home}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
"""


Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Service:
    """A file and the commands of the service manager. config: value of OUTRIDER_CONFIG for the service.

    turn_on: commands after the file is written. turn_off: before it is removed, or replaced where the manager keeps
    what it has read. ask: shows whether the service runs, with `sign` in it if it does. log: where its log is, for
    people. encoding: the file's.
    """

    system: System
    path: Path
    content: bytes
    config: Path | None
    turn_on: tuple[Command, ...]
    turn_off: tuple[Command, ...]
    ask: Command
    log: str | None = None
    encoding: str = "utf-8"
    sign: str = ""


def systemd_unit(command: Command, config: Path | None, config_home: Path) -> Service:
    """A unit of systemd's user manager. Raises ConfigError for a path that no unit can hold."""
    environment = f"Environment={_systemd_quoted(f'OUTRIDER_CONFIG={config}')}\n" if config else ""
    started = " ".join(_systemd_quoted(part, is_command=True) for part in command)
    name, manager = "outrider.service", ("systemctl", "--user")
    return Service(
        "systemd",
        config_home / "systemd" / "user" / name,
        UNIT.format(mark=MARK, command=started, environment=environment).encode(),
        config,
        turn_on=((*manager, "daemon-reload"), (*manager, "enable", name), (*manager, "restart", name)),
        turn_off=((*manager, "disable", "--now", name),),
        ask=(*manager, "is-active", name),
        log="journalctl --user -u outrider",
    )


def launchd_agent(command: Command, config: Path | None, home: Path, user: str) -> Service:
    """An agent of launchd. home: the user's directory. user: the uid."""
    path, log = home / "Library" / "LaunchAgents" / f"{LABEL}.plist", home / "Library" / "Logs" / "outrider.log"
    document: dict[str, object] = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "WorkingDirectory": str(home),
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
        "Umask": 0o077,
    }
    if config is not None:
        document["EnvironmentVariables"] = {"OUTRIDER_CONFIG": str(config)}
    head, _, rest = plistlib.dumps(document, sort_keys=False).partition(b"<plist ")
    return Service(
        "launchd",
        path,
        head + f"<!-- {MARK}; not run on hardware. -->\n<plist ".encode() + rest,
        config,
        turn_on=(("launchctl", "bootstrap", f"gui/{user}", str(path)),),
        turn_off=(("launchctl", "bootout", f"gui/{user}/{LABEL}"),),
        ask=("launchctl", "print", f"gui/{user}/{LABEL}"),
        log=str(log),
        sign="state = running\n",
    )


def windows_task(command: Command, config: Path | None, home: Path, user: str, place: Path) -> Service:
    """A task of Windows' Task Scheduler. home: the user's directory. user: "DOMAIN\\name". place: the file's."""
    path = place / "outrider-task.xml"
    program, *arguments = command
    words = {
        "mark": MARK,
        "user": user,
        "command": program,
        "arguments": subprocess.list2cmdline(arguments),
        "home": str(home),
    }
    task = ("/TN", TASK_NAME)
    return Service(
        "windows",
        path,
        # Task Scheduler's own files are UTF-16 with a byte order mark.
        TASK.format(**{name: escape(each) for name, each in words.items()}).encode("utf-16"),
        config,
        turn_on=(("schtasks", "/Create", *task, "/XML", str(path), "/F"), ("schtasks", "/Run", *task)),
        turn_off=(("schtasks", "/End", *task), ("schtasks", "/Delete", *task, "/F")),
        ask=("schtasks", "/Query", *task, "/V", "/FO", "CSV", "/NH"),
        encoding="utf-16",
        sign='"267009"',  # SCHED_S_TASK_RUNNING as the last result: the word for it is in the system's language
    )


def service_here(module: str, platform: str = sys.platform) -> Service:
    """The service of this user and this system. Raises RuntimeUnavailable where no service manager is known.

    module: the package that is `outrider`'s command.
    """
    python, home = Path(sys.executable), Path.home()
    # A service manager has none of this shell's variables.
    is_moved = os.environ.get(VARIABLE) or (os.environ.get("XDG_CONFIG_HOME") and config_path().is_file())
    chosen = config_path() if is_moved else None
    if platform == "win32":
        quiet = python.with_name("pythonw.exe")  # python.exe would open a console window
        domain, name = os.environ.get("USERDOMAIN"), os.environ.get("USERNAME", "")
        command = (str(quiet if quiet.is_file() else python), "-P", "-m", module, "serve")
        place = platformdirs.user_config_path("outrider", appauthor=False)
        return windows_task(command, chosen, home, f"{domain}\\{name}" if domain else name, place)
    command = (str(python), "-P", "-m", module, "serve")
    if platform == "darwin":
        return launchd_agent(command, chosen, home, str(os.getuid()))
    if platform.startswith("linux"):
        return systemd_unit(command, chosen, Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config"))
    raise RuntimeUnavailable(f"no service manager is known for {platform}; start `outrider serve` at login yourself")


def write_service(service: Service, *, force: bool = False) -> bool:
    """Puts the file in its place, atomically; whether it changed. Raises ConfigError if another is there."""
    path = service.path
    before = path.read_bytes() if path.exists() else None
    if before == service.content:
        return False
    if path.is_symlink() or (before is not None and not force):
        raise ConfigError(f"{path} is there with other content; compare it with --print, or replace it with --force")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, service.content)
    return True


def remove_service(service: Service) -> None:
    """Removes the file, if it is there still. Raises ConfigError for one that we did not write."""
    try:
        written = service.path.read_bytes()
    except FileNotFoundError:  # `systemctl disable` removes a link
        return
    if MARK not in written.decode(service.encoding, errors="replace"):
        raise ConfigError(f"{service.path} was not written by `outrider service install`; remove it yourself")
    service.path.unlink()


def run_command(command: Sequence[str], sign: str = "") -> tuple[bool, str]:
    """Runs a command of the service manager: whether it succeeded and said `sign`, and its last line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return False, f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{command[0]}: {type(error).__name__}"
    if done.returncode == 0 and sign not in done.stdout:
        return False, f"{command[0]} knows it as stopped"
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit status {done.returncode}"


def _systemd_quoted(text: str, *, is_command: bool = False) -> str:
    """Quotes a word for a unit: % begins a specifier everywhere, $ a variable in commands."""
    if "\n" in text or "\r" in text:
        raise ConfigError(f"{text!r} has a line break; a unit cannot hold it: move the file")
    if re.fullmatch(r"[\w./:=+-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + (escaped.replace("$", "$$") if is_command else escaped) + '"'
