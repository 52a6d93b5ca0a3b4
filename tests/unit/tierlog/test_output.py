import io

import pytest

from tierlog.cli.output import cell, print_table

COLUMNS = ("topic", "high watermark", "size")
ROWS = [("orders", 117_014, "79.1 KiB"), ("a", None, "0 B")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines(monkeypatch):
    """Print a table in a terminal of this width, None for a pipe; return its lines."""
    monkeypatch.setenv("NO_COLOR", "1")

    def printed(width, columns, rows, **more):
        out = io.StringIO() if width is None else Terminal()
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(more.pop("title", ""), columns, rows, **more)
        return out.getvalue().splitlines()

    return printed


def test_numbers_are_right_aligned_without_trailing_blanks(lines) -> None:
    assert lines(80, COLUMNS, ROWS, title="all", caption="two") == [
        "all",
        "topic   high watermark  size",
        "orders          117014  79.1 KiB",
        "a                    -  0 B",
        "two",
    ]


def test_headings_are_bold_in_a_terminal(lines, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert lines(80, ("topic",), [("a",)]) == ["\x1b[1mtopic\x1b[0m", "a"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert lines(80, ("topic",), [("a",)]) == ["topic", "a"]


def test_a_pipe_gets_lines_of_any_length(lines) -> None:
    long = "word " * 100 + "end"
    assert lines(None, ("topic", "id"), [(long, 1)])[1] == f"{long}   1"


def test_text_and_headings_wrap_in_a_narrow_window_and_numbers_do_not(lines) -> None:
    rows = [("orders of the year", 10**11, "x" * 30)]
    shown = lines(45, ("topic", "high watermark", "id"), rows)
    assert max(map(len, shown)) <= 45
    assert any(str(10**11) in line for line in shown)
    assert "".join(line[33:].strip() for line in shown[2:]).count("x") <= 30
    assert sum(line.count("x") for line in shown) == 30


def test_rows_too_wide_for_a_table_are_lists_of_names_and_values(lines) -> None:
    assert lines(32, ("high watermark", "log end"), [(10**15, 10**15), (1, 2)]) == [
        "high watermark  1000000000000000",
        "log end         1000000000000000",
        "",
        "high watermark  1",
        "log end         2",
    ]


def test_wide_characters_take_two_columns(lines) -> None:
    assert lines(80, ("", ""), [("日本", 1), ("e\u0301", 2)]) == ["日本  1", "e\u0301     2"]


def test_members_have_no_heading_and_no_rows_give_only_the_heading(lines) -> None:
    assert lines(80, ("", ""), [("store", "s3://bucket")]) == ["store  s3://bucket"]
    assert lines(80, ("group", "lag"), []) == ["group  lag"]
    assert lines(80, ("", ""), []) == []


def test_control_characters_and_markup_are_escaped(lines) -> None:
    assert cell("\x1b[31mred\x1b[0m [bold]\n") == "\\x1b[31mred\\x1b[0m [bold]\\n"
    assert lines(80, ("",), [("[bold]:smile:",)]) == ["[bold]:smile:"]
