"""The artefacts of a release, in dist/: `make release`. It uploads nothing; its last line says how.

* The same commit gives the same bytes: times are the commit's, a dirty tree is refused, and the
  SBOM is of the locked versions (deploy/docker/requirements.txt), which the image installs too.
* What is uploaded is what was checked: the wheel is built from the sdist, and installed alone.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
LOCK = ROOT / "deploy/docker/requirements.txt"
TOOLS = Path(sys.executable).parent
VERSION = re.compile(r'^__version__ = "(.+)"$', re.M)


def run(*command: str | Path, cwd: Path = ROOT, epoch: str = "") -> str:
    """What the command printed; a failure ends the release with all that it said."""
    environment = os.environ | ({"SOURCE_DATE_EPOCH": epoch} if epoch else {})
    ran = subprocess.run(  # noqa: S603
        command, cwd=cwd, env=environment, check=False, capture_output=True, text=True
    )
    if ran.returncode:
        sys.exit(f"release: {' '.join(map(str, command))}\n{ran.stdout}{ran.stderr}".rstrip())
    return ran.stdout


def version_of(root: Path) -> str:
    found = VERSION.search((root / "tierlog/__init__.py").read_text())
    assert found, "tierlog/__init__.py has the version"
    return found[1]


def notes_of(changelog: str, version: str) -> tuple[str, bool]:
    """The section of this version, without its heading, and whether the heading has a date."""
    parts = re.split(r"^## (.+)\n", changelog, flags=re.M)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        if heading.partition(",")[0] == version:
            return text.strip() + "\n", bool(re.search(r"\d{4}-\d\d-\d\d$", heading))
    sys.exit(f"release: CHANGELOG.md has no section {version}")


def build(root: Path, dist: Path, epoch: str) -> list[Path]:
    """The sdist, and the wheel made from it."""
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, root)
    run(*command, cwd=root, epoch=epoch)
    return sorted(dist.glob("*.whl")) + sorted(dist.glob("*.tar.gz"))


def check(artefacts: list[Path]) -> None:
    run(TOOLS / "check-wheel-contents", *(path for path in artefacts if path.suffix == ".whl"))
    run(TOOLS / "twine", "check", "--strict", *artefacts)


def install_locked(environment: Path, wheel: Path) -> None:
    """Nothing but the wheel and the locked versions of what it needs."""
    uv, python = TOOLS / "uv", environment / "bin/python"
    run(uv, "venv", "--quiet", "--python", sys.executable, environment)
    install = (uv, "pip", "install", "--quiet", "--python", python)
    run(*install, "--require-hashes", "--requirement", LOCK)
    run(*install, "--no-deps", wheel)
    run(uv, "pip", "check", "--quiet", "--python", python)


def write_sbom(environment: Path, dist: Path, *, version: str, epoch: str) -> None:
    """Of this version and all that `environment` has, with the texts of their licences."""
    subject = environment / "pyproject.toml"  # the tool reads no version that hatch finds
    stated = (ROOT / "pyproject.toml").read_text()
    subject.write_text(stated.replace('dynamic = ["version"]', f'version = "{version}"'))
    options = ("--output-reproducible", "--gather-license-texts", "--pyproject", subject)
    path = dist / f"tierlog-{version}.cdx.json"
    tool = (TOOLS / "cyclonedx-py", "environment", *options, "--output-file", path)
    run(*tool, environment / "bin/python", epoch=epoch)


def write_checksums(dist: Path) -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(dist.iterdir())
    ]
    (dist / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    if changed := run("git", "status", "--porcelain"):
        sys.exit(f"release: commit first, a release is a commit's:\n{changed}".rstrip())
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    version = version_of(ROOT)
    notes, is_dated = notes_of((ROOT / "CHANGELOG.md").read_text(), version)
    shutil.rmtree(DIST, ignore_errors=True)
    artefacts = build(ROOT, DIST, epoch)
    check(artefacts)
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        install_locked(environment, artefacts[0])
        said = run(environment / "bin/tierlog", "--version", cwd=Path(folder))
        assert said == f"tierlog {version}\n", said
        write_sbom(environment, DIST, version=version, epoch=epoch)
    (DIST / f"RELEASE-NOTES-{version}.md").write_text(notes)
    write_checksums(DIST)
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size:>10,}  dist/{path.name}")
    if not is_dated:
        print(f"Before an upload: date the heading {version} of CHANGELOG.md, and commit.")
    print(f"To upload, by hand: git tag -s v{version} && twine upload dist/*.whl dist/*.tar.gz")


if __name__ == "__main__":
    main()
