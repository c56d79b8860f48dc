"""What `make release` refuses, lists and audits."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.raw_server import http_answer, raw_server, writes
from tools import release
from tools.audit import Audit, Verdict, audit, judge
from tools.sbom import require_no_paths, site_packages, write_sbom

ROOT = Path(__file__).parent.parent
ENTRY = (
    "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-11-22\n\n### Added\n\n* A thing.\n\n## [1.1.0] - 2026-01-01\n"
)


def test_a_version_needs_a_dated_entry_that_lists_something() -> None:
    """Each refusal says what to write."""
    release.require_entry(ENTRY, "1.2.0")
    with pytest.raises(release.Refused, match=r"no section '## \[1\.2\.1\] - YYYY-MM-DD'"):
        release.require_entry(ENTRY, "1.2.1")
    with pytest.raises(release.Refused, match="lists no change"):
        release.require_entry(ENTRY, "1.1.0")


def test_uncommitted_changes_are_refused(tmp_path: Path) -> None:
    """What no commit has is in no release."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    release.require_clean(tmp_path)
    (tmp_path / "new.py").touch()
    with pytest.raises(release.Refused, match=r"1 files are not committed, such as new\.py"):
        release.require_clean(tmp_path)


def test_both_distributions_have_one_version() -> None:
    """A release requires the reference pair by its own version."""
    assert release.project_version(ROOT) == release.project_version(ROOT / "reference")


def test_an_older_python_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the build's hook, which runs before pip resolves the extras; it asks for what pyproject.toml requires."""
    path = ROOT / "hatch_build.py"
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit, match=r"^outrider needs Python 3\.11 or newer; this is "):
        exec(code, {"__name__": "hook"})
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_release_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """So the next one is not refused because of it."""
    with pytest.raises(release.Refused), pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "run", Mock(side_effect=release.Refused("the wheel job failed")))
        release.make(tmp_path / "dist", "all")
    assert list(tmp_path.iterdir()) == []


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    """In the form that sha256sum reads; the list itself is not in it."""
    (tmp_path / "a.whl").write_bytes(b"wheel")
    release.write_checksums(tmp_path)
    release.write_checksums(tmp_path)
    assert (tmp_path / release.CHECKSUMS).read_text() == f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n"


def install(site: Path, name: str, version: str) -> None:
    """Makes `site` look as if a distribution were installed there."""
    place = site / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_list_of_packages_is_reproducible_and_names_no_path(tmp_path: Path) -> None:
    """CycloneDX, from a real environment, with nothing random in it; an installation by path is refused."""
    home, listed = tmp_path / "home", tmp_path / "list.json"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    site = site_packages(python)
    install(site, "demo", "1.0")
    assert write_sbom(python, listed, (tmp_path, ROOT), 1_700_000_000) == 1
    document = json.loads(listed.read_text())
    assert (document["bomFormat"], document["components"][0]["purl"]) == ("CycloneDX", "pkg:pypi/demo@1.0")
    assert document["metadata"]["component"]["name"] == "outrider"
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00" and "serialNumber" not in document
    (site / "demo-1.0.dist-info" / "direct_url.json").write_text(json.dumps({"url": tmp_path.as_uri(), "dir_info": {}}))
    with pytest.raises(ValueError, match="the package list names this machine"):
        write_sbom(python, listed, (tmp_path, ROOT), 1_700_000_000)
    with pytest.raises(ValueError, match="names this machine"):
        require_no_paths('{"x": "/srv/build/a"}', [Path("/srv/build")])


def known(fault: str) -> dict[str, object]:
    """An advisory in OSV's form, for every version."""
    ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]
    affected = [{"package": {"name": "demo", "ecosystem": "PyPI"}, "ranges": ranges}]
    return {"id": fault, "summary": "bad", "affected": affected, "published": "2026-01-01T00:00:00Z"}


def answer_of(*advisories: dict[str, object]) -> bytes:
    """What an OSV service says that knows these of every package."""
    return http_answer(json.dumps({"vulns": advisories} if advisories else {}).encode())


def test_vulnerable_clean_and_not_asked_are_three_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pip-audit itself, against a service that knows a fault, one that knows none, and none at all."""
    install(tmp_path / "site", "demo", "1.0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    options = ["-s", "osv", "--cache-dir", str(tmp_path / "cache"), "--timeout", "5", "--osv-url"]
    for answer, expected in (
        (answer_of(known("PYSEC-2026-1")), (Verdict.VULNERABLE, "1 known vulnerabilities: demo 1.0: PYSEC-2026-1")),
        (answer_of(), (Verdict.CLEAN, "no known vulnerabilities in 1 packages")),
    ):
        with raw_server(writes(answer)) as service:
            found = audit(tmp_path / "site", release.OWN, [*options, service.url])
        assert (found.verdict, found.words) == expected
    found = audit(tmp_path / "site", release.OWN, [*options, service.url])  # it has ended
    assert found.verdict is Verdict.NOT_ASKED and found.words.startswith("the advisory service gave no answer: ")


def test_a_service_that_knows_no_package_was_not_asked() -> None:
    """Our own packages are nowhere; of others each must be known."""
    own, lost = ({"name": name, "skip_reason": "not found"} for name in ("outrider", "typer"))
    good = {"name": "numpy", "version": "2.2", "vulns": []}
    verdicts = [
        judge(json.dumps({"dependencies": packages}), "No known vulnerabilities found", release.OWN).verdict
        for packages in ([own, good], [own, good, lost], [own, lost], [own], [])
    ]
    assert verdicts == [Verdict.CLEAN, *[Verdict.NOT_ASKED] * 4]


@pytest.mark.parametrize(
    ("verdict", "expected"), [(Verdict.CLEAN, [0, 0]), (Verdict.VULNERABLE, [1, 1]), (Verdict.NOT_ASKED, [0, 3])]
)
def test_the_exit_status_tells_them_apart(verdict: Verdict, expected: list[int]) -> None:
    """A vulnerable release fails; one that could not be audited fails where that is asked for."""
    found = [release.exit_status(Audit(verdict, ""), is_audit_required=each) for each in (False, True)]
    assert found == expected
