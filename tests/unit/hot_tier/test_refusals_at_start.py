"""A folder that may not be written: one clear line at the start, and nothing taken for damage."""

import errno
import os

import pytest

from record_format.errors import ConfigurationError


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "sync_folder", "truncate"])
def test_a_folder_that_may_not_be_written_is_refused_by_name(open_log, disk, call, number):
    disk.fail(call, number)
    with pytest.raises(ConfigurationError) as refusal:
        open_log(disk=disk)
    assert os.strerror(number) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    disk.heal()
    open_log(disk=disk)


def test_a_refused_log_is_not_marked_as_one_whose_disk_failed(
    open_log, disk, append_values, tmp_path
):
    log = open_log()
    append_values(log, b"one")
    log.close()
    disk.fail("open", errno.EROFS)
    with pytest.raises(ConfigurationError):
        open_log(disk=disk, clean=False)
    assert not (tmp_path / "t-0" / "tierlog-offline").exists()
