"""The wheel, installed where other packages have the names of our rooms, used from a project that
has folders of these names: two names in a user's environment are ours.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.command_line import ENVIRONMENT, ROOT
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
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment's `bin` folder. Dependencies are those of the tests, without the checkout."""
    root = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    packages = next(root.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in THEIRS:
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text(f"raise ImportError('{name} of PyPI')\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    program = root / "bin/tierlog"
    program.write_text(
        f"#!{root}/bin/python\nfrom tierlog.cli.main import main\nimport sys\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    return root / "bin"


@pytest.fixture
def project(tmp_path):
    for name in THEIRS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} of the user')\n")
    return tmp_path


@contextmanager
def running(installed, project, environment):
    """`tierlog dev` of that environment; yields its URL."""
    command, log = [installed / "tierlog", "dev", "--port", "0"], project / "broker.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=project, env=environment, stdout=out, stderr=out)
    try:
        until(lambda: process.poll() is not None or "listens on http" in log.read_text())
        yield re.search(r"listens on (http://[^\s,]+)", log.read_text())[1]
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


def test_the_tour_runs_beside_packages_and_folders_of_our_rooms_names(installed, project):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{installed}:{environment['PATH']}"
    with running(installed, project, environment) as server:

        def run(command, script):
            done = subprocess.run(
                command,
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

        for index, (kind, script) in enumerate(BLOCKS):
            if kind != "serve" and index != SPARK:
                run(["bash", "-e"] if kind == "run" else [installed / "python", "-"], script)
        where = run([installed / "python", "-"], "import tierlog; print(tierlog.__file__)")
        assert Path(where.strip()).is_relative_to(installed.parent)
        table = (
            "import tierlog; print(tierlog.read_arrow('orders', server=SERVER).read_all().num_rows)"
        )
        table = table.replace("SERVER", repr(server))
        assert run([installed / "python", "-"], table) == "20003\n"
        spark = run([installed / "python", "-"], SPARK_READS.replace("SERVER", repr(server)))
        assert spark.endswith("20003\n")
