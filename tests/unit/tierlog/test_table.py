from tierlog.cli.table import cell, lay_out

COLUMNS = ("topic", "high watermark", "size")
ROWS = [("orders", 117_014, "79.1 KiB"), ("a", None, "0 B")]


def test_numbers_stand_to_the_right_and_nothing_trails() -> None:
    assert lay_out(COLUMNS, ROWS, width=80) == (
        ["topic   high watermark  size"],
        [
            "orders          117014  79.1 KiB",
            "a                    -  0 B",
        ],
    )


def test_a_narrow_window_wraps_headings_and_cuts_nothing() -> None:
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
    assert lay_out(COLUMNS, ROWS, width=5) == narrow


def test_wide_characters_take_two_columns() -> None:
    assert lay_out(("", ""), [("日本", 1), ("e\u0301", 2)], width=80).rows == [
        "日本  1",
        "e\u0301     2",
    ]


def test_members_have_no_heading_and_no_rows_are_no_table() -> None:
    assert lay_out(("", ""), [("store", "s3://bucket")], width=80) == ([], ["store  s3://bucket"])
    assert lay_out(("group", "lag"), [], width=80) == (["group  lag"], [])


def test_what_others_wrote_is_shown_and_not_obeyed() -> None:
    assert cell("\x1b[31mred\x1b[0m [bold]\n") == "\\x1b[31mred\\x1b[0m [bold]\\n"
