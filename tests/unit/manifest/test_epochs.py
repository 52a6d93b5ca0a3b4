from __future__ import annotations

from tierlog.manifest.state import (
    MAX_EPOCHS,
    EpochStart,
    append_epoch,
    divergence_offset,
    prune_epochs,
)


def history(*starts: tuple[int, int] | tuple[int, int, str]) -> tuple[EpochStart, ...]:
    return tuple(EpochStart(s[0], s[1], s[2] if len(s) > 2 else "a") for s in starts)


def test_an_epoch_without_records_leaves_no_trace() -> None:
    assert append_epoch(history((1, 0), (2, 50)), EpochStart(3, 50, "a")) == history(
        (1, 0), (3, 50)
    )


def test_an_epoch_that_starts_below_earlier_ones_replaces_them() -> None:
    assert append_epoch(history((1, 0), (2, 50)), EpochStart(3, 20, "a")) == history(
        (1, 0), (3, 20)
    )


def test_the_history_is_bounded() -> None:
    starts: tuple[EpochStart, ...] = ()
    for epoch in range(MAX_EPOCHS + 10):
        starts = append_epoch(starts, EpochStart(epoch, epoch * 10, "a"))
    assert len(starts) == MAX_EPOCHS
    assert starts[0].epoch == 10


def test_pruning_keeps_the_epoch_of_the_log_start() -> None:
    full = history((1, 0), (2, 50), (3, 80))
    assert prune_epochs(full, 49) == full
    assert prune_epochs(full, 50) == full[1:]
    assert prune_epochs(full, 1000) == full[2:]


def test_equal_histories_diverge_at_the_smaller_end() -> None:
    epochs = history((1, 0), (2, 50))
    assert divergence_offset(epochs, epochs, local_end=90, remote_end=70) == 70


def test_histories_diverge_where_the_first_differing_epoch_starts() -> None:
    local = history((1, 0), (2, 50))
    remote = history((1, 0), (3, 60, "b"))
    assert divergence_offset(local, remote, local_end=90, remote_end=100) == 50


def test_the_same_epoch_of_two_owners_differs() -> None:
    local = history((1, 0), (2, 50, "a"))
    remote = history((1, 0), (2, 50, "b"))
    assert divergence_offset(local, remote, local_end=90, remote_end=90) == 50


def test_a_prefix_diverges_where_the_next_epoch_of_the_other_starts() -> None:
    local = history((1, 0))
    remote = history((1, 0), (2, 60, "b"))
    assert divergence_offset(local, remote, local_end=90, remote_end=100) == 60
    assert divergence_offset(local, remote, local_end=40, remote_end=100) == 40


def test_without_a_common_epoch_histories_diverge_at_zero() -> None:
    assert divergence_offset(history((1, 0)), history((2, 0, "b")), local_end=9, remote_end=9) == 0
