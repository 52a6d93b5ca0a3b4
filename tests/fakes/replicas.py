"""A leader's log and a follower's in one process, and what goes from one to the other."""

from contextlib import closing

from tierlog.hot_tier.log import PartitionLog


def begin_to_lead(log: PartitionLog, *, epoch: int = 1) -> PartitionLog:
    """A log that was just opened leads now."""
    log.replicate(log.flushed_end)
    log.begin_term(epoch)
    return log


def begin_to_follow(log: PartitionLog) -> PartitionLog:
    log.replicate(0)
    return log


def copy_once(leader: PartitionLog, follower: PartitionLog, *, max_bytes: int = 1 << 20) -> bool:
    """One fetch of a follower, without its flush; whether something came."""
    before = (follower.log_end_offset, follower.active_base_offset)
    with closing(leader.read_for_replica(before[0], max_bytes=max_bytes)) as read:
        body = b"".join(piece.read() for piece in read.slices)
        if read.segment_base_offset > follower.active_base_offset:
            follower.roll_at(read.segment_base_offset)
        follower.append_replicated(memoryview(body))
    return before != (follower.log_end_offset, follower.active_base_offset)


def catch_up(leader: PartitionLog, follower: PartitionLog, *, max_bytes: int = 1 << 20) -> None:
    """Until the follower has all, flushed, and both know that it is committed."""
    while copy_once(leader, follower, max_bytes=max_bytes):
        pass
    leader.writer.flush()
    for log in (follower, leader):
        log.commit_up_to(min(follower.writer.flush(), leader.flushed_end))


def files_of(log: PartitionLog) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log.folder.iterdir()}
