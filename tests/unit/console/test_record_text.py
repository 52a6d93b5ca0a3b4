import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.api.console.record_browser import (
    MAX_HEX_BYTES,
    MAX_PRETTY_BYTES,
    MAX_PRETTY_DEPTH,
    MAX_SUMMARY,
    MAX_TEXT,
    full_text,
    hex_dump,
    summary,
    visible,
)


def test_json_is_indented_with_its_numbers_as_they_were_sent() -> None:
    found = full_text(b'{"a":[1,2.50],"n":12345678901234567890}')
    assert found.kind == "json"
    joined = " ".join(found.text.split())
    assert joined == '{ "a": [ 1, 2.50 ], "n": 12345678901234567890 }'
    assert "\n  " in found.text


@pytest.mark.parametrize("data", [b"", b"plain", b"{not json}", b"[1,", b"<script>", b'"a"', b"12"])
def test_invalid_json_is_text(data: bytes) -> None:
    assert full_text(data) == ("text", data.decode(), len(data), False)


def test_an_8_byte_integer_is_binary() -> None:
    number = (42).to_bytes(8, "big")
    assert summary(number) == ("binary", "00 00 00 00 00 00 00 2a", 8, False)
    assert full_text(number).kind == "binary"


def test_null_differs_from_empty_text() -> None:
    assert full_text(None).kind == summary(None).kind == "null"
    assert full_text(b"").kind == summary(b"").kind == "text"


def test_bytes_are_a_hex_dump() -> None:
    found = full_text(bytes(range(256)) * 3)
    assert found.kind == "binary"
    assert found.size_bytes == 768
    assert found.cut
    assert len(found.text.splitlines()) == MAX_HEX_BYTES // 16
    assert hex_dump(b"\x00AB\xff") == "00000000  00 41 42 ff" + " " * 38 + "·AB·"


def test_deep_json_is_not_indented() -> None:
    for depth in (MAX_PRETTY_DEPTH, MAX_PRETTY_DEPTH + 1, 30_000):
        data = b"[" * depth + b"1" + b"]" * depth
        assert full_text(data).kind == ("json" if depth <= MAX_PRETTY_DEPTH else "text")


def test_long_values_are_truncated_with_their_size() -> None:
    data = b'{"a":"' + b"x" * MAX_PRETTY_BYTES + b'"}'
    found = full_text(data)
    assert found.kind == "text"
    assert found.cut
    assert len(found.text) == MAX_TEXT
    assert found.size_bytes == len(data)


def test_truncation_splits_no_character() -> None:
    for letter in ("é", "€", "😀"):
        for shift in range(4):
            found = full_text(b"x" * shift + letter.encode() * 4 * MAX_TEXT)
            assert found.kind == "text"
            assert found.cut


@pytest.mark.parametrize(
    "code",
    [0x00, 0x1B, 0x7F, 0x85, 0xAD, 0x200B, 0x202E, 0x2066, 0xFEFF, 0x2028, 0xE000, 0xE0041],
)
def test_invisible_characters_are_named(code: int) -> None:
    text = visible(f"a{chr(code)}b")
    assert chr(code) not in text
    assert text.startswith("a")
    assert len(text) > 2


def test_spaces_of_other_scripts_stay() -> None:
    assert visible("東京\u3000タワー\t1\u00a0m\n") == "東京\u3000タワー\t1\u00a0m\n"


def test_a_summary_is_one_line() -> None:
    found = summary(b"a\n\tb  c" + b" x" * 1000)
    assert "\n" not in found.text
    assert found.text.startswith("a b c x")
    assert len(found.text) == MAX_SUMMARY
    assert found.cut


@given(st.binary(max_size=2000))
def test_any_bytes_can_be_shown(data: bytes) -> None:
    for found in (full_text(data), summary(data)):
        assert found.size_bytes == len(data)
        hidden = {char for char in found.text if not char.isprintable()} - {"\n", "\t"}
        assert {unicodedata.category(char) for char in hidden} <= {"Zs"}
