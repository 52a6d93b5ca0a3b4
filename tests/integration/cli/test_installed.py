"""The wheel of the sdist, installed with what it needs and nothing else, where other packages have
the names of our rooms, used from a project that has folders of these names: two names in a user's
environment are ours.
"""

import re
import shutil
import subprocess
import sysconfig
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.command_line import ENVIRONMENT, ROOT
from tests.fakes.release import install_locked, release
from tests.fakes.waiting import until
from tests.integration.cli.test_readme import BLOCKS, SPARK

THEIRS = ("api", "broker", "manifest", "repair")
SPARK_READS = """
import pyspark_tierlog
from pyspark.sql import SparkSession

pyspark_tierlog.prepare()
spark = SparkSession.builder.master("local[1]").getOrCreate()
pyspark_tierlog.register(spark)
print(spark.read.format("tierlog").options(server=SERVER, subscribe="orders").load().count())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    built = release.build(ROOT, tmp_path_factory.mktemp("dist"), "1700000000")
    return next(path for path in built if path.suffix == ".whl")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `bin` folder of an environment with the locked versions of the base install."""
    root = tmp_path_factory.mktemp("environment")
    install_locked(root, wheel)
    for name in THEIRS:
        package = packages_of(root) / name
        package.mkdir()
        (package / "__init__.py").write_text(f"raise ImportError('{name} of PyPI')\n")
    return root / "bin"


def packages_of(environment):
    return next(environment.glob("lib/python*/site-packages"))


def add_extras(installed):
    """Spark's packages, as the tests have them: 1.2 GB are not installed once more."""
    extras = packages_of(installed.parent) / "extras.pth"
    extras.write_text(sysconfig.get_path("purelib") + "\n")


@pytest.fixture
def project(tmp_path):
    for name in THEIRS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} of the user')\n")
    return tmp_path


@contextmanager
def running(installed, project):
    """Yields the URL of that environment's `tierlog dev`, and a function to run scripts there."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{installed}:{environment['PATH']}"
    command, log = [installed / "tierlog", "dev", "--port", "0"], project / "broker.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=project, env=environment, stdout=out, stderr=out)
    try:
        until(lambda: process.poll() is not None or "listens on http" in log.read_text())
        server = re.search(r"listens on (http://[^\s,]+)", log.read_text())[1]

        def run(kind, script):
            done = subprocess.run(
                ["bash", "-e"] if kind == "run" else [installed / "python", "-"],
                input=script.replace("http://127.0.0.1:8640", server),
                cwd=project,
                env=environment | {"TIERLOG_SERVER": server},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            return done.stdout

        yield server, run
    finally:
        process.terminate()
        process.wait(60)


def test_two_names_are_installed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
        files = set(archive.namelist())
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "tierlog",
        "pyspark_tierlog",
    }
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "*.py"], capture_output=True, text=True, check=True
    ).stdout.split()
    rooms = {path.name for path in (ROOT / "tierlog").iterdir() if path.is_symlink()}
    for name in tracked:
        room = name.partition("/")[0]
        if room in rooms:
            assert f"tierlog/{name}" in files, name


def test_the_base_install_has_no_extra_and_the_size_that_the_readme_says(installed):
    environment = installed.parent
    names = {path.name for path in packages_of(environment).iterdir()}
    assert not names & {"numba", "numpy", "pandas", "pyarrow", "pyspark", "moto"}
    said = re.search(r"pip install \.\s.*?(\d+) MB on disk", (ROOT / "README.md").read_text())
    files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    found = sum(path.stat().st_size for path in files) / 1e6
    assert 0.6 * int(said[1]) < found < 1.1 * int(said[1])  # pip and compiled modules are missing


def test_the_readmes_commands_run_beside_packages_and_folders_of_our_rooms_names(
    installed, project
):
    kind, script = BLOCKS[1]
    with running(installed, project) as (_, run):
        assert '"remaining_segments":0' in run(kind, script)
        where = run("python", "import tierlog; print(tierlog.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)


@pytest.mark.soak
def test_so_do_the_tour_and_spark(installed, project):
    with running(installed, project) as (server, run):
        for index, (kind, script) in enumerate(BLOCKS):
            if kind != "serve" and index != SPARK:
                run(kind, script)
        add_extras(installed)
        table = (
            "import tierlog; print(tierlog.read_arrow('orders', server=SERVER).read_all().num_rows)"
        )
        assert run("python", table.replace("SERVER", repr(server))) == "20003\n"
        spark = run("python", SPARK_READS.replace("SERVER", repr(server)))
        assert spark.endswith("20003\n")
