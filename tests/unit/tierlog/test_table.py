from tierlog.cli.table import cell, lay_out

COLUMNS = ("topic", "high watermark", "size")
ROWS = [("orders", 117_014, "79.1 KiB"), ("a", None, "0 B")]


def test_numbers_are_right_aligned_without_trailing_blanks() -> None:
    assert lay_out(COLUMNS, ROWS, width=80) == (
        ["topic   high watermark  size"],
        [
            "orders          117014  79.1 KiB",
            "a                    -  0 B",
        ],
    )


def test_a_narrow_window_wraps_headings_first() -> None:
    narrow = lay_out(COLUMNS, ROWS, width=30)
    assert narrow == (
        [
            "             high",
            "topic   watermark  size",
        ],
        [
            "orders     117014  79.1 KiB",
            "a               -  0 B",
        ],
    )


def test_text_wraps_at_separators_if_headings_are_not_enough() -> None:
    rows = [("orders-of-the-year.2026", 117_014, "2026-11-25T20:49:41Z", "79.1 KiB")]
    assert lay_out(("topic", "end", "to", "size"), rows, width=43) == (
        ["topic          end  to           size"],
        [
            "orders-of-  117014  2026-11-25T  79.1 KiB",
            "the-year.           20:49:41Z",
            "2026",
        ],
    )


def test_text_without_separators_is_wrapped_completely() -> None:
    rows = lay_out(("topic", "id"), [("a", "x" * 70)], width=40).rows
    assert max(map(len, rows)) <= 40
    assert "".join(row.removeprefix("a").strip() for row in rows) == "x" * 70


def test_rows_too_wide_for_a_table_are_lists_of_names_and_values() -> None:
    assert lay_out(("high watermark", "log end"), [(10**15, 10**15), (1, 2)], width=32) == (
        [],
        [
            "high watermark  1000000000000000",
            "log end         1000000000000000",
            "",
            "high watermark  1",
            "log end         2",
        ],
    )


def test_wide_characters_take_two_columns() -> None:
    assert lay_out(("", ""), [("日本", 1), ("e\u0301", 2)], width=80).rows == [
        "日本  1",
        "e\u0301     2",
    ]


def test_members_have_no_heading_and_no_rows_give_only_the_heading() -> None:
    assert lay_out(("", ""), [("store", "s3://bucket")], width=80) == ([], ["store  s3://bucket"])
    assert lay_out(("group", "lag"), [], width=80) == (["group  lag"], [])


def test_control_characters_and_markup_are_escaped() -> None:
    assert cell("\x1b[31mred\x1b[0m [bold]\n") == "\\x1b[31mred\\x1b[0m [bold]\\n"
