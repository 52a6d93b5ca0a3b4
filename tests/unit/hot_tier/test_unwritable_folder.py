"""A folder that is not writable is one clear error at startup, and is not treated as damage."""

import errno
import os

import pytest

from tierlog.record_format.errors import ConfigurationError


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "sync_folder", "truncate"])
def test_an_unwritable_folder_is_rejected_by_name(open_log, disk, call, number):
    disk.fail(call, number)
    with pytest.raises(ConfigurationError) as refusal:
        open_log(disk=disk)
    assert os.strerror(number) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    disk.heal()
    open_log(disk=disk)


def test_a_rejected_log_is_not_marked_offline(open_log, disk, append_values, tmp_path):
    log = open_log()
    append_values(log, b"one")
    log.close()
    disk.fail("open", errno.EROFS)
    with pytest.raises(ConfigurationError):
        open_log(disk=disk, clean=False)
    assert not (tmp_path / "t-0" / "tierlog-offline").exists()
