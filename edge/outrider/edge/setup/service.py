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
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from xml.sax.saxutils import escape

import platformdirs

from outrider.edge.setup.config_file import VARIABLE, config_path
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


@dataclass(frozen=True, slots=True)
class Service:
    """The file and the commands that turn it on and off. home: the user's directory. user: "DOMAIN\\name" or a uid.

    module: the package that is `outrider`'s command. config: value of OUTRIDER_CONFIG for the service.
    """

    system: System
    home: Path
    python: Path
    module: str
    user: str
    config: Path | None = None
    config_home: Path | None = None

    @property
    def path(self) -> Path:
        """Where the file goes."""
        if self.system == "systemd":
            return (self.config_home or self.home / ".config") / "systemd" / "user" / "outrider.service"
        if self.system == "launchd":
            return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        return (self.config_home or self.home / "AppData" / "Local" / "outrider") / "outrider-task.xml"

    @property
    def command(self) -> tuple[str, ...]:
        """What the service runs: this installation's `outrider serve`."""
        return (str(self.python), "-m", self.module, "serve")

    def content(self) -> bytes:
        """The file."""
        if self.system == "systemd":
            return self._unit().encode()
        return self._plist() if self.system == "launchd" else self._task()

    def turn_on(self) -> tuple[tuple[str, ...], ...]:
        """Commands after the file is written."""
        if self.system == "systemd":
            unit = "outrider.service"
            return ("systemctl", "--user", "daemon-reload"), ("systemctl", "--user", "enable", unit), (
                "systemctl", "--user", "restart", unit
            )  # fmt: skip
        if self.system == "launchd":
            return (("launchctl", "bootstrap", f"gui/{self.user}", str(self.path)),)
        create = ("schtasks", "/Create", "/TN", TASK_NAME, "/XML", str(self.path), "/F")
        return create, ("schtasks", "/Run", "/TN", TASK_NAME)

    def turn_off(self) -> tuple[tuple[str, ...], ...]:
        """Commands before the file is removed, or replaced where the manager keeps what it has read."""
        if self.system == "systemd":
            return (("systemctl", "--user", "disable", "--now", "outrider.service"),)
        if self.system == "launchd":
            return (("launchctl", "bootout", f"gui/{self.user}/{LABEL}"),)
        return ("schtasks", "/End", "/TN", TASK_NAME), ("schtasks", "/Delete", "/TN", TASK_NAME, "/F")

    def ask(self) -> tuple[str, ...]:
        """The command that shows whether it runs."""
        if self.system == "systemd":
            return ("systemctl", "--user", "is-active", "outrider.service")
        if self.system == "launchd":
            return ("launchctl", "print", f"gui/{self.user}/{LABEL}")
        return ("schtasks", "/Query", "/TN", TASK_NAME)

    def _unit(self) -> str:
        environment = f"Environment={_systemd_quoted(f'OUTRIDER_CONFIG={self.config}')}\n" if self.config else ""
        command = " ".join(_systemd_quoted(part, is_command=True) for part in self.command)
        return UNIT.format(mark=MARK, command=command, environment=environment)

    def _plist(self) -> bytes:
        log = self.home / "Library" / "Logs" / "outrider.log"
        document: dict[str, object] = {
            "Label": LABEL,
            "ProgramArguments": list(self.command),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "WorkingDirectory": str(self.home),
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
            "Umask": 0o077,
        }
        if self.config is not None:
            document["EnvironmentVariables"] = {"OUTRIDER_CONFIG": str(self.config)}
        written = plistlib.dumps(document, sort_keys=False)
        head, _, rest = written.partition(b"<plist ")
        return head + f"<!-- {MARK}; not run on hardware. -->\n<plist ".encode() + rest

    def _task(self) -> bytes:
        words = {
            "mark": MARK,
            "user": self.user,
            "command": self.command[0],
            "arguments": subprocess.list2cmdline(self.command[1:]),
            "home": str(self.home),
        }
        # Task Scheduler's own files are UTF-16 with a byte order mark.
        return TASK.format(**{name: escape(each) for name, each in words.items()}).encode("utf-16")


def service_here(module: str, platform: str = sys.platform) -> Service:
    """The service of this user and this system. Raises RuntimeUnavailable where no service manager is known.

    module: as in `Service`.
    """
    python = Path(sys.executable)
    # A service manager has none of this shell's variables.
    is_named = bool(os.environ.get(VARIABLE))
    is_moved = bool(os.environ.get("XDG_CONFIG_HOME")) and config_path().is_file()
    chosen = config_path() if is_named or is_moved else None
    if platform == "win32":
        quiet = python.with_name("pythonw.exe")  # python.exe would open a console window
        domain, name = os.environ.get("USERDOMAIN"), os.environ.get("USERNAME", "")
        place = platformdirs.user_config_path("outrider", appauthor=False)
        user = f"{domain}\\{name}" if domain else name
        return Service("windows", Path.home(), quiet if quiet.is_file() else python, module, user, chosen, place)
    if platform == "darwin":
        return Service("launchd", Path.home(), python, module, str(os.getuid()), chosen)
    if not platform.startswith("linux"):
        raise RuntimeUnavailable(
            f"no service manager is known for {platform}; start `outrider serve` at login yourself"
        )
    place = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Service("systemd", Path.home(), python, module, str(os.getuid()), chosen, place)


def write_service(service: Service, *, force: bool = False) -> bool:
    """Puts the file in its place, atomically; whether it changed. Raises ConfigError if another is there."""
    content, path = service.content(), service.path
    try:
        before = path.read_bytes()
    except FileNotFoundError:
        before = None
    if before == content:
        return False
    if path.is_symlink() or (before is not None and not force):
        raise ConfigError(f"{path} is there with other content; compare it with --print, or replace it with --force")
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return True


def remove_service(service: Service) -> bool:
    """Removes the file; False if there is none. Raises ConfigError for a file that we did not write."""
    try:
        content = service.path.read_bytes()
    except FileNotFoundError:
        return False
    if MARK not in content.decode("utf-16" if service.system == "windows" else "utf-8", errors="replace"):
        raise ConfigError(f"{service.path} was not written by `outrider service install`; remove it yourself")
    service.path.unlink()
    return True


def run_command(command: Sequence[str]) -> tuple[bool, str]:
    """Runs a command of the service manager: whether it succeeded, and its last line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return False, f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{command[0]}: {type(error).__name__}"
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
