import random

import pytest

from tierlog.hot_tier.indexes import IndexColumns
from tierlog.record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY, pack_entries

LAYOUTS = pytest.mark.parametrize("layout", [OFFSET_ENTRY, TIME_ENTRY])


def entries_of(layout):
    """Some entries of an index, with values of both small and all bits."""
    largest = 2**31 if layout is OFFSET_ENTRY else 2**63
    rising = random.Random(7)
    first = [*sorted(rising.sample(range(100), 20)), largest - 2, largest - 1]
    second = [*sorted(rising.sample(range(100), 20)), 2**31 - 2, 2**31 - 1]
    return list(zip(first, second, strict=True))


@LAYOUTS
def test_columns_have_the_entries_of_a_file_and_write_the_same_bytes(layout):
    entries = entries_of(layout)
    columns = IndexColumns(layout, pack_entries(layout, entries[:5]))
    for entry in entries[5:]:
        columns.append(*entry)
    assert [columns[number] for number in range(len(columns))] == entries
    assert columns.image() == pack_entries(layout, entries)
    assert columns.image(5) == pack_entries(layout, entries[5:])
    assert columns.size_bytes == len(columns.image())


@LAYOUTS
def test_a_look_up_finds_the_last_entry_at_or_below_its_target(layout):
    entries = entries_of(layout)
    columns = IndexColumns(layout, pack_entries(layout, entries))
    for target in range(-1, 101):
        for column in (0, 1):
            below = [entry for entry in entries if entry[column] <= target]
            found = columns.floor(column=column, target=target)
            assert found == (below[-1] if below else None)
        floor, following = columns.around(target)
        assert floor == columns.floor(column=0, target=target)
        above = next(entry for entry in entries if entry[0] > target)
        assert following == (None if floor and floor[0] == target else above)


def test_an_entry_of_which_only_the_second_column_is_written_is_not_found():
    columns = IndexColumns(OFFSET_ENTRY, pack_entries(OFFSET_ENTRY, [(0, 0)]))
    columns._columns[1].append(50)  # as far as `append` has come when another thread looks
    assert len(columns) == 1
    assert columns.floor(column=1, target=60) == (0, 0)
    assert columns.around(60) == ((0, 0), None)


def test_truncated_columns_keep_the_entries_up_to_a_target():
    columns = IndexColumns(TIME_ENTRY, pack_entries(TIME_ENTRY, [(10, 1), (10, 5), (11, 9)]))
    columns.truncate(column=1, target=5)
    assert columns.image() == pack_entries(TIME_ENTRY, [(10, 1), (10, 5)])
    columns.truncate(column=1, target=-1)
    assert len(columns) == 0
