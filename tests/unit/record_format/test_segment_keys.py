"""Names of a segment's objects."""

from tierlog.record_format.segment_entry import name_of, new_unique, segment_keys


def test_a_key_that_no_upload_has_is_not_a_segments():
    keys = segment_keys("f/segments/", base_offset=17, leader_epoch=3, unique="ab12")
    assert keys.log == "f/segments/00000000000000000017-3-ab12.log"
    assert name_of(keys.log) == "00000000000000000017-3-ab12"
    long = keys.log.replace("-3-", f"-{'3' * 5000}-"), keys.log.replace("ab12", "ab12" * 100)
    for other in (keys.indexes, "f/17-3-ab.log", "", "a/b", *long):
        assert name_of(other) is None
    assert len({new_unique() for _ in range(100)}) == 100
