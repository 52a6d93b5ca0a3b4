"""What a broker says of a data folder that it may not use: one line that names the file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.broker import Broker
from broker.settings import BrokerSettings
from record_format.errors import ConfigurationError

OPEN = """
import sys
from pathlib import Path
from broker.broker import Broker
from broker.settings import BrokerSettings
from record_format.errors import ConfigurationError
import os
os.setuid(int(sys.argv[2]))
try:
    Broker.open(BrokerSettings(data_dir=Path(sys.argv[1])), store=None).close()
except ConfigurationError as error:
    print("refused:", error)
else:
    print("opened")
"""


def open_as_nobody(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder), "65534"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    return done.stdout.splitlines()[-1]


@pytest.fixture
def folder(tmp_path):
    """A data folder of nobody's that holds a topic; nobody can reach it."""
    data = tmp_path / "data"
    broker = Broker.open(BrokerSettings(data_dir=data), store=None)
    broker.create_topic("t")
    broker.close()
    for path in (data, *data.rglob("*")):
        os.chown(path, 65534, 65534)
    for path in [*list(tmp_path.parents)[:-2], tmp_path]:
        path.chmod(path.stat().st_mode | 0o011)
    return data


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's id")
@pytest.mark.parametrize(
    "kept_back", ["", "meta.properties", "tierlog", "t-0", "t-0/00000000000000000000.log"]
)
def test_missing_permissions_are_named_in_one_line(folder, kept_back):
    if open_as_nobody(folder) != "opened":
        pytest.skip("another user cannot reach this machine's temporary folder")
    path = folder / kept_back
    os.chown(path, 0, 0)
    path.chmod(0o755 if path.is_dir() else 0o600)
    answer = open_as_nobody(folder)
    assert answer.startswith("refused: ")
    assert str(folder) in answer
    assert any(word in answer for word in ("denied", "permitted", "may not be written"))


def test_a_folder_where_a_file_should_be_is_a_refusal_too(tmp_path):
    (tmp_path / "data" / "meta.properties").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"meta\.properties"):
        Broker.open(BrokerSettings(data_dir=tmp_path / "data"), store=None)


def test_two_brokers_on_one_folder_are_refused_until_the_first_is_gone(tmp_path):
    settings = BrokerSettings(data_dir=tmp_path / "data")
    first = Broker.open(settings, store=None)
    with pytest.raises(ConfigurationError, match="in use by another broker"):
        Broker.open(settings, store=None)
    first.close()
    Broker.open(settings, store=None).close()
