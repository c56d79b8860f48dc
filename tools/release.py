"""Makes a release: `make release`. docs/releasing.md has the steps around it.

1. The version has an entry in CHANGELOG.md, the reference pair has the same version, nothing is uncommitted.
2. The wheel job builds, installs and tests the wheels; the very files that it has tested are kept.
3. They are installed into a fresh environment, whose packages are listed (CycloneDX) and audited.
4. SHA256SUMS has the checksum of every file.

Exit status: 0 made; 1 refused, or a package is known to be vulnerable; 3 with --require-audit, where nobody could be
asked.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from tools.audit import Audit, Verdict, audit
from tools.sbom import site_packages, write_sbom

ROOT = Path(__file__).parent.parent
OWN = frozenset({"outrider", "outrider-reference"})
NOT_AUDITED = 3
CHECKSUMS = "SHA256SUMS"


class Refused(Exception):
    """The release cannot be made; the message says why, and what to do."""


def project_version(folder: Path) -> str:
    """The version in a folder's pyproject.toml."""
    document = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    return str(document["project"]["version"])


def require_entry(changelog: str, version: str) -> None:
    """Raises Refused unless the changelog has a dated, non-empty section of the version."""
    section = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if section is None:
        raise Refused(
            f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'; rename the section of unreleased changes"
        )
    if not re.search(r"^\* \S", section[1], re.MULTILINE):
        raise Refused(f"the section of {version} in CHANGELOG.md lists no change; write what users will notice")


def require_clean(root: Path) -> None:
    """Raises Refused if the clone has changes that no commit has."""
    status = ["git", "-C", str(root), "status", "--porcelain"]
    changes = subprocess.run(status, capture_output=True, text=True, check=True).stdout.splitlines()
    if changes:
        raise Refused(f"{len(changes)} files are not committed, such as {changes[0][3:]}; commit or stash them")


def write_checksums(place: Path) -> None:
    """Writes SHA256SUMS for `sha256sum --check`."""
    files = sorted(path for path in place.iterdir() if path.is_file() and path.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (place / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def make(out: Path, extras: str) -> Audit:
    """Makes the release in the directory `out`, which must not exist; one that fails leaves none."""
    out.mkdir(parents=True)
    try:
        return _made(out, extras)
    except BaseException:
        shutil.rmtree(out)
        raise


def _made(out: Path, extras: str) -> Audit:
    run(sys.executable, str(ROOT / "tests" / "wheel_job.py"), "--keep", str(out))
    version = project_version(ROOT)
    committed = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    epoch_s = int(subprocess.run(committed, capture_output=True, text=True, check=True).stdout)
    with tempfile.TemporaryDirectory(prefix="outrider-release-") as scratch:
        home = Path(scratch) / "installed"
        venv.create(home, with_pip=True)
        python = home / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        # By name and version: an installation by path would note the path.
        install = [str(python), "-m", "pip", "install", "--quiet", "--find-links", str(out)]
        run(*install, f"outrider[{extras}]=={version}")
        run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
        sbom = out / f"outrider-{version}.cdx.json"
        num_packages = write_sbom(python, sbom, (ROOT, home, Path.home(), Path(tempfile.gettempdir())), epoch_s)
        print(f"{sbom.name}: {num_packages} packages of outrider[{extras}]")
        verdict = audit(site_packages(python), OWN)
    (out / "audit.json").write_text(verdict.to_json(), encoding="utf-8")
    write_checksums(out)
    return verdict


def run(*command: str) -> None:
    """Runs a command and shows it; raises Refused if it fails."""
    print("$", *command, flush=True)
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise Refused(f"{Path(command[0]).name} {command[1]} failed; its output above says why")


def exit_status(found: Audit, *, is_audit_required: bool) -> int:
    """Of the command, by the audit."""
    if found.verdict is Verdict.VULNERABLE:
        return 1
    return NOT_AUDITED if is_audit_required and found.verdict is Verdict.NOT_ASKED else 0


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory to make; default: dist")
    parser.add_argument("--extras", default="cloud,edge", help="extras whose packages are listed and audited")
    parser.add_argument("--require-audit", action="store_true", help="fail where the advisory service cannot be asked")
    options = parser.parse_args(arguments)
    try:
        version = project_version(ROOT)
        require_entry((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
        if project_version(ROOT / "reference") != version:
            raise Refused(f"outrider-reference has another version than {version}; set both alike")
        require_clean(ROOT)
        if options.out.exists():
            raise Refused(f"{options.out} exists; remove it, or name another directory with --out")
        found = make(options.out, options.extras)
    except (Refused, ValueError) as error:
        sys.exit(f"release: {error}")
    files = ", ".join(sorted(path.name for path in options.out.iterdir()))
    print(f"made in {options.out}: {files}")
    print(f"audit: {found.verdict.upper()}: {found.words}")
    sys.exit(exit_status(found, is_audit_required=options.require_audit))


if __name__ == "__main__":
    main()
