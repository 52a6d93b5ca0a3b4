"""What must hold after every step, and what must come about once everything is well.

| I1 | a member of the set in force has, flushed, all that is committed, and each answered trim |
| I2 | the leader in force has all that is committed, and what the manifest names (I5)          |
| I3 | what any leader shows is a beginning of what is committed: in `Steps.advance`            |
| I4 | an offset is given once in each epoch: in `Steps.append`                                 |
| R3 | the set is never made smaller than the minimum                                           |
| H8 | a linearizable read sees what was committed when it began: in `Steps.confirm`            |
| H2 | with every broker and the bucket well, a record is committed: `check_it_heals`           |
"""

from __future__ import annotations

from tests.model.rules import Rules
from tests.model.steps import Steps
from tests.model.turns import gone
from tests.model.world import Budget, Replica, Role, Violation, World, agreed, node_of
from tierlog.broker.replication.election import Doubt, may_try
from tierlog.broker.replication.in_sync import STORE, change_in_sync, refuses_acks_all

ROUNDS = 14
TIMEOUT_MS = 6000
PLENTY = Budget(*[99] * len(Budget._fields))


def check(w: World, steps: Steps) -> None:
    sets = [version.in_sync for version in w.chain[-2:]]
    if len(sets[-1]) < min(w.min_in_sync, len(sets[0])):
        raise Violation(f"the set {sorted(sets[-1])} is smaller than {w.min_in_sync}")
    for member in w.newest.in_sync:
        if member == STORE:
            _check_store(w, steps)
        elif (r := w.replicas[node_of(member)]).me == member:
            _check_member(w, r)
    _check_manifest(w)
    in_force = w.newest
    for r in w.replicas:
        if r.lead and (r.lead.epoch, r.me) == (in_force.epoch, in_force.leader):
            _check_leader(w, r)


def _check_manifest(w: World) -> None:
    known = {(one.epoch, one.leader) for one in w.chain}
    for one in (w.manifest, *w.manifest_puts):
        if w.committed[: len(one.cold)] != one.cold:
            raise Violation(f"a manifest names {one.cold}, committed is {w.committed}")
        if one.owner and (one.epoch, one.owner) not in known:
            raise Violation(f"{one.owner} claims the manifest under {one.epoch}, and never led it")
    for r in w.replicas:
        if agreed(w.cold, r.log) < r.local_start:
            raise Violation(f"{r.me} deleted up to {r.local_start}, the manifest has {w.cold}")


def _check_member(w: World, r: Replica) -> None:
    if r.log[: min(r.flushed, len(w.committed))] != w.committed:
        raise Violation(f"{r.me} is in sync with {r.log[: r.flushed]}, committed is {w.committed}")
    if r.log_start < w.trimmed:
        raise Violation(f"{r.me} is in sync and begins at {r.log_start}, trimmed to {w.trimmed}")


def _check_leader(w: World, r: Replica) -> None:
    if r.log[: len(w.committed)] != w.committed:
        raise Violation(f"{r.me} leads with {r.log}, committed is {w.committed}")
    if agreed(r.log, w.cold) < len(w.cold):
        raise Violation(f"{r.me} leads with {r.log}, the manifest names {w.cold}")


def _check_store(w: World, steps: Steps) -> None:
    if w.manifest.log_start < w.trimmed:
        raise Violation(f"the store begins at {w.manifest.log_start}, trimmed to {w.trimmed}")
    log = steps.store_log(w, w.newest, w.cold)
    if log[: len(w.committed)] != w.committed:
        raise Violation(f"the store is in sync with {log}, committed is {w.committed}")


# --- liveness -------------------------------------------------------------------------------------


def check_it_heals(w: World, rules: Rules, *, late_puts_land: bool) -> None:
    """From here on nothing fails, and each does what its time-outs tell it: a record is committed.

    Excused: nobody is left who has what was committed.
    """
    steps = Steps(rules, lambda options: options[-1])
    w = w._replace(left=PLENTY)
    while late_puts_land and (landed := steps.land(w)):
        w = landed
    w = w._replace(puts=frozenset(v for v in w.puts if any(r.sent == v for r in w.replicas)))
    at = len(w.committed)
    for _ in range(ROUNDS):
        for node in range(len(w.replicas)):
            w = _turn(w, node, steps)
            check(w, steps)
        if len(w.committed) > at + 1:
            return
    if _is_somebody_left(w):
        raise Violation(f"nothing is committed although all is well: {w.newest} {w.replicas}")


def _is_somebody_left(w: World) -> bool:
    there = {r.me for r in w.replicas}
    return bool(w.newest.in_sync & (there | {STORE}))


def _turn(w: World, node: int, steps: Steps) -> World:
    """What one broker does in a round. Each step is taken if it can be."""
    r = w.replicas[node]
    if not r.alive:
        w = steps.start(w, r) or w
    for name in ("settle", "land", "settle", "look", "claim_alone"):
        w = _taken(w, node, steps, name)
    r = w.replicas[node]
    if r.role in (Role.IDLE, Role.FOLLOWER) and (r.reading or _tries(w, r)):
        for name in ("claim", "begin_reading", *["list_wal", "fence"] * 9):
            if not w.replicas[node].sent:
                w = _taken(w, node, steps, name)
        for name in ("land", "settle"):
            w = _taken(w, node, steps, name)
    for name in (*["fetch", "flush"] * 9, "fetch", "knock"):
        w = _taken(w, node, steps, name)
    if w.replicas[node].lead:
        w = _lead_a_turn(w, node, steps)
    return w


def _tries(w: World, r: Replica) -> bool:
    """All time-outs have passed, and all brokers beat."""
    in_force = w.newest
    leads = any(
        x.lead and (x.lead.epoch, x.me) == (in_force.epoch, in_force.leader) for x in w.replicas
    )
    waits = any(x.sent and x.role is Role.CANDIDATE for x in w.replicas)
    doubt = Doubt(TIMEOUT_MS, refused=not leads and not waits, beats=True)
    is_candidate = r.me in in_force.in_sync or STORE in in_force.in_sync
    return is_candidate and may_try(in_force, doubt, session_timeout_ms=TIMEOUT_MS)


def _lead_a_turn(w: World, node: int, steps: Steps) -> World:
    for fetch in sorted(w.fetches):
        one = Steps(steps.rules, lambda _, fetch=fetch: fetch)
        r = w.replicas[node]
        if r.lead and fetch.node != node:
            w = one.hear_fetch(w, r) or w
    for name in (
        "flush",
        "new_chain",
        "land",
        "settle",
        *["write_wal", "land_wal", "read_wal"] * 9,
    ):
        w = _taken(w, node, steps, name)
    w = _change_set(w, node, steps)
    r = w.replicas[node]
    lagging = gone(w)
    if r.lead and not refuses_acks_all(r.lead, lagging=lagging, min_in_sync=w.min_in_sync):
        for name in ("append", "flush", *["write_wal", "land_wal", "read_wal"] * 3):
            w = _taken(w, node, steps, name)
    decided = ("land_manifest", "settle_manifest")
    for name in ("advance", *decided, "claim_manifest", *decided):
        w = _taken(w, node, steps, name)
    return w


def _change_set(w: World, node: int, steps: Steps) -> World:
    r = w.replicas[node]
    if r.lead is None or r.sent:
        return w
    lagging = gone(w) | {m for m, _ in r.lead.progress if m != STORE and not _is_there(w, m)}
    members = steps.next_members(w, r, frozenset(lagging))
    if members is None:
        return w
    after = change_in_sync(r.lead, members)
    w = steps.send(w, r, after)
    for name in ("land", "settle"):
        w = _taken(w, node, steps, name)
    return w


def _is_there(w: World, member: str) -> bool:
    return w.replicas[node_of(member)].me == member


def _taken(w: World, node: int, steps: Steps, name: str) -> World:
    r = w.replicas[node]
    return (getattr(steps, name)(w, r) or w) if r.alive else w
