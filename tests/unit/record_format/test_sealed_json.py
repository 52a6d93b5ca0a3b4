"""A sealed document is intact or refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptManifest, UnknownFormatVersion
from tierlog.record_format.sealed_json import is_truncated, seal, unseal

DOCUMENT = b'{"topic":"caf\xc3\xa9","list":[1,2,{"a":null}],"version":12}'
SEALED = seal(DOCUMENT, kind="manifest")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def test_the_layout_of_a_sealed_document() -> None:
    assert (
        b'{"format_version":1,"kind":"manifest","length":%d,"crc32c":"%08x","document":%s}'
        % (len(DOCUMENT), crc32c_of(DOCUMENT), DOCUMENT)
    ) == SEALED


@given(st.dictionaries(st.text(), json_values))
def test_a_document_round_trips_byte_for_byte(document: dict[str, object]) -> None:
    data = msgspec.json.encode(document)
    sealed = seal(data, kind="k")
    for form in (bytes, bytearray, memoryview):
        assert unseal(form(sealed), kind="k", file="f") == data


def test_every_flipped_bit_is_detected() -> None:
    for position in range(len(SEALED)):
        for bit in range(8):
            changed = bytearray(SEALED)
            changed[position] ^= 1 << bit
            with pytest.raises((CorruptManifest, UnknownFormatVersion)):
                unseal(changed, kind="manifest", file="f")


def test_truncation_and_trailing_bytes_are_detected() -> None:
    for size in range(len(SEALED)):
        with pytest.raises(CorruptManifest):
            unseal(SEALED[:size], kind="manifest", file="f")
    for more in (b"}", b"{}", b"x", b"\0"):
        with pytest.raises(CorruptManifest):
            unseal(SEALED + more, kind="manifest", file="f")


def test_another_kind_is_refused() -> None:
    with pytest.raises(CorruptManifest, match="kind") as caught:
        unseal(SEALED, kind="page", file="some/key")
    assert caught.value.file == "some/key"


def test_a_newer_version_is_refused_whatever_its_other_fields() -> None:
    newer = b'{"format_version":2,"checksum":"other","body":[]}'
    with pytest.raises(UnknownFormatVersion, match="version 2") as caught:
        unseal(newer, kind="manifest", file="some/key")
    assert caught.value.file == "some/key"


def test_an_edited_document_is_refused() -> None:
    for old, new in ((b'"version":12', b'"version":13'), (b"[1,2", b"[1, 2")):
        with pytest.raises(CorruptManifest):
            unseal(SEALED.replace(old, new), kind="manifest", file="f")


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b"\xff", b'{"format_version":"1"}', b"[" * 100_000]
)
def test_bytes_that_are_no_sealed_document_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptManifest):
        unseal(data, kind="manifest", file="f")


def test_a_length_of_thousands_of_digits_is_corrupt_not_truncated() -> None:
    header, _, document = SEALED.partition(b'"length":')
    rest = document.lstrip(b"0123456789")
    assert is_truncated(SEALED[:-1])
    assert not is_truncated(header + b'"length":' + b"9" * 5000 + rest[:-1])


def test_a_deeply_nested_document_is_refused() -> None:
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(CorruptManifest):
        unseal(seal(deep, kind="k"), kind="k", file="f")


@given(st.binary(max_size=100))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((CorruptManifest, UnknownFormatVersion)):
        unseal(data, kind="manifest", file="f")
