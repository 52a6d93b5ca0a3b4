"""What `make release` makes: the same bytes from the same commit, of one version."""

import json
import os
import shutil
import subprocess
import tomllib
import zipfile
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tierlog
from tests.fakes.command_line import ROOT
from tests.fakes.release import install_locked, release


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    """Of two copies of the tracked files, of different times and permissions."""
    if not (release.TOOLS / "twine").exists():
        pytest.skip("needs the extra `release`")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", ":!tests", ":!bench"], cwd=ROOT, capture_output=True, check=True
    ).stdout.split(b"\0")[:-1]
    made = []
    for name, mode in (("one", 0o644), ("two", 0o600)):
        root = tmp_path_factory.mktemp(name)
        for path in map(os.fsdecode, tracked):
            if (ROOT / path).exists():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, root / path, follow_symlinks=False)
                if not (root / path).is_symlink():
                    (root / path).chmod(mode)
        made.append(release.build(root, root / "dist", "1700000000"))
    return made


def test_the_same_files_give_the_same_bytes(artefacts):
    one, two = artefacts
    assert [path.name for path in one] == [
        f"tierlog-{tierlog.__version__}-py3-none-any.whl",
        f"tierlog-{tierlog.__version__}.tar.gz",
    ]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_the_artefacts_pass_the_checks_of_an_upload(artefacts):
    release.check(artefacts[0])


def test_the_wheel_has_types_and_the_licence_of_all_that_is_in_it(artefacts):
    with zipfile.ZipFile(artefacts[0][0]) as archive:
        names = set(archive.namelist())
    assert {"tierlog/py.typed", "pyspark_tierlog/py.typed"} <= names
    licences = f"tierlog-{tierlog.__version__}.dist-info/licenses"
    static = {name for name in names if name.endswith(".LICENSE.txt") and "/static/" in name}
    assert len(static) > 1
    for name in static - {one for one in static if one.startswith(licences)}:
        assert f"{licences}/{name.removeprefix('tierlog/')}" in names
    assert f"{licences}/LICENSE" in names
    definitions = "record_format/kafka_messages/message_definitions"
    assert {f"{licences}/{definitions}/{name}" for name in ("LICENSE", "NOTICE")} <= names
    assert f"tierlog/{definitions}/FetchRequest.json" in names


def test_the_version_has_one_place():
    assert version("tierlog") == tierlog.__version__ == release.version_of(ROOT)
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


def test_the_changelog_has_notes_for_this_version():
    notes, _ = release.notes_of((ROOT / "CHANGELOG.md").read_text(), tierlog.__version__)
    assert notes.startswith("### ")
    assert "\n## " not in notes


def test_a_heading_is_dated_when_it_ends_with_a_date():
    text = "# Changelog\n\n## 0.2.0, 2027-01-31\n\n- New.\n\n## 0.1.0, not released yet\n\n- Old.\n"
    assert release.notes_of(text, "0.2.0") == ("- New.\n", True)
    assert release.notes_of(text, "0.1.0") == ("- Old.\n", False)
    with pytest.raises(SystemExit, match=r"has no section 0\.3\.0"):
        release.notes_of(text, "0.3.0")


def test_the_locked_versions_are_those_that_the_project_admits():
    locked = {
        canonicalize_name(one.name): next(iter(one.specifier)).version
        for one in map(
            Requirement,
            (
                line.rstrip(" \\")
                for line in release.LOCK.read_text().splitlines()
                if not line.startswith(" ")
            ),
        )
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for needed in map(Requirement, project["dependencies"]):
        found = locked[canonicalize_name(needed.name)]
        assert needed.specifier.contains(found), f"{needed}: locked is {found}; make lock"


def test_the_sbom_is_of_this_version_and_names_every_locked_package(tmp_path, artefacts):
    environment = tmp_path / "environment"
    install_locked(environment, artefacts[0][0])
    release.write_sbom(environment, tmp_path, version=tierlog.__version__, epoch="1700000000")
    (path,) = tmp_path.glob("*.cdx.json")
    bom = json.loads(path.read_text())
    subject = bom["metadata"]["component"]
    assert (subject["name"], subject["version"]) == ("tierlog", tierlog.__version__)
    names = {canonicalize_name(one["name"]) for one in bom["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {canonicalize_name(Requirement(one).name) for one in project["dependencies"]} <= names
    assert all(one.get("licenses") for one in bom["components"])
    assert str(tmp_path) not in path.read_text()
