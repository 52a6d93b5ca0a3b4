"""A broker that dies between renaming a file and syncing its folder, and its successor."""

from random import Random

import pytest

from tests.fakes.lossy_disk import LossyDisk
from tierlog.broker.data_folder.data_folder import DataFolder
from tierlog.host import medium
from tierlog.host.durable_file import REAL_DISK


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture
def disk(monkeypatch):
    disk = LossyDisk()
    for call in ("open", "write_at", "truncate", "sync_bytes", "sync_folder", "rename", "unlink"):
        monkeypatch.setattr(REAL_DISK, call, getattr(disk, call))
    return disk


@pytest.mark.parametrize(
    "name", ["log-start-offset-checkpoint", "tierlog/topics.json", "tierlog/manifests/x-0.json"]
)
def test_files_read_at_the_next_start_survive_a_power_failure(disk, tmp_path, name):
    folder = DataFolder(tmp_path / "died")
    folder.write(folder.path / name, b"old")

    def die(call):
        if call == "sync_folder":
            raise Crash

    disk.before_call = die
    with pytest.raises(Crash):
        folder.write(folder.path / name, b"new")
    disk.before_call = lambda call: None
    folder.close()
    disk.keep_into(tmp_path / "next", of=folder.path)
    DataFolder(tmp_path / "next").close()
    assert (tmp_path / "next" / name).read_bytes() == b"new"
    for seed in range(20):
        image = tmp_path / f"image-{seed}"
        disk.crash_into(image, Random(seed), of=tmp_path / "next")
        assert (image / name).read_bytes() == b"new", f"seed {seed}"


def test_the_name_of_a_new_data_folder_survives_a_power_failure(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(medium, "sync_folder", synced.append)
    data = tmp_path / "new" / "data"
    DataFolder(data).close()
    assert synced == [tmp_path, tmp_path / "new", data, data / "tierlog"]
