import pytest

from tierlog.record_format import sealed_json
from tierlog.record_format.errors import ConfigurationError, CorruptManifest
from tierlog.record_format.format_level import (
    LEVELS,
    NEW_FOLDER_LEVEL,
    decode_level,
    encode_level,
    newest_level,
)


def recorded(**members: object) -> bytes:
    return sealed_json.encode(members, kind="format")


def test_levels_are_numbered_without_a_gap_and_a_new_folder_has_one_of_them() -> None:
    assert list(LEVELS) == list(range(1, newest_level() + 1))
    assert NEW_FOLDER_LEVEL in LEVELS


def test_a_recorded_level_is_read_back() -> None:
    assert [decode_level(encode_level(level), file="f") for level in LEVELS] == list(LEVELS)


def test_a_higher_level_is_refused_with_the_file_and_the_version_that_reads_it() -> None:
    with pytest.raises(ConfigurationError) as refused:
        decode_level(recorded(level=99, read_since="7.5.0"), file="here/format.json")
    assert "here/format.json: format level 99, which tierlog 7.5.0 and newer read" in str(
        refused.value
    )


def test_a_newer_version_may_record_more_than_the_level() -> None:
    data = recorded(level=1, read_since="0.1.0", features={"tables": 3})
    assert decode_level(data, file="f") == 1


@pytest.mark.parametrize("data", [b"", b"{}", encode_level(1)[:-1], recorded(level="1")])
def test_a_record_that_cannot_be_read_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptManifest):
        decode_level(data, file="f")
