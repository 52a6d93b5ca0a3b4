"""Random walks, and breadth-first search over all that may happen in a small world."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any, NamedTuple

from tests.model.checks import check, check_it_heals
from tests.model.rules import Rules
from tests.model.steps import Steps
from tests.model.world import Role, Violation, World

NOBODYS = ("land", "land_manifest", "collect", "land_wal", "land_wal_late", "collect_wal")
BY_ROLE = {
    Role.IDLE: ("look", "hear", "knock", "claim", "lead_alone", "flush", "crash", "lose_disk"),
    Role.FOLLOWER: (*("look", "hear", "fetch", "flush", "claim", "crash", "lose_disk", "give_up"),),
    Role.CANDIDATE: ("settle", "crash", "lose_disk"),
    Role.LEADER: (
        *("append", "flush", "hear_fetch", "advance", "change", "settle", "look"),
        *("resign", "reassign", "trim", "ask", "confirm", "claim_alone"),
        *("claim_manifest", "offload", "settle_manifest", "delete_local"),
        *("crash", "lose_disk"),
    ),
}
WITH_STORE = {
    Role.IDLE: ("begin_reading", "list_wal", "fence"),
    Role.FOLLOWER: ("begin_reading",),
    Role.CANDIDATE: (),
    Role.LEADER: ("write_wal", "read_wal", "new_chain"),
}
OFTEN = {"fetch": 8, "hear_fetch": 6, "advance": 5, "flush": 4, "append": 4, "land": 5}
OFTEN |= {"settle": 5, "start": 4, "write_wal": 4, "land_wal": 4, "read_wal": 4, "list_wal": 4}
SELDOM = {
    "crash": 0.4,
    "lose_disk": 0.3,
    "collect": 0.5,
    "land_wal_late": 0.4,
    "resign": 0.5,
    "reassign": 0.7,
}


NEEDS = {
    "append": "records",
    "ask": "reads",
    "change": "changes",
    "claim": "claims",
    "collect": "collections",
    "crash": "crashes",
    "claim_manifest": "offloads",
    "delete_local": "deletions",
    "give_up": "losses",
    "hear": "hints",
    "lead_alone": "alone",
    "lose_disk": "losses",
    "offload": "offloads",
    "reassign": "reassignments",
    "resign": "resignations",
    "trim": "trims",
    "write_wal": "wal_objects",
}
"""The steps that a budget bounds."""


class Found(NamedTuple):
    seed: int
    steps: int
    violation: str
    trace: tuple[str, ...]


class Result(NamedTuple):
    """`deep`: how many walks committed 3 records and saw 3 epochs."""

    walks: int
    steps: int
    deep: int
    found: Found | None


def moves(w: World) -> Iterator[tuple[str, int]]:
    """What may be tried next: by whose turn it is, and what the budget has left."""
    left = w.left._asdict()
    for name, node in _turns(w):
        if name not in NEEDS or left[NEEDS[name]]:
            yield name, node


def _turns(w: World) -> Iterator[tuple[str, int]]:
    for name in NOBODYS:
        if name != "land_manifest" or w.manifest_puts:
            yield name, 0
    for r in w.replicas:
        names = BY_ROLE[r.role] if r.alive else ("start",)
        if w.has_store and r.alive:
            names += WITH_STORE[r.role]
        for name in names:
            if name != "settle_manifest" or r.offered:
                yield name, r.node


def walk(
    first: World, rules: Rules, seed: int, *, steps_max: int, heals: bool
) -> tuple[World, int]:
    """One walk; raises Violation with its trace. Each seed prefers other steps."""
    random = Random(seed)
    weights: dict[str, float] = {}
    steps = Steps(rules, random.choice)
    w, taken, trace = first, 0, []
    try:
        for _ in range(steps_max):
            options = list(moves(w))
            likely = [
                weights.get(name) or weights.setdefault(name, _weight(name, random))
                for name, _ in options
            ]
            name, node = random.choices(options, likely)[0]
            after: World | None = getattr(steps, name)(w, w.replicas[node])
            if after is None or after == w:
                continue
            w, taken = after, taken + 1
            trace.append(f"{name} {w.replicas[node].me}")
            check(w, steps)
        if heals:
            trace.append("heals")
            check_it_heals(w, rules, late_puts_land=random.random() < 0.5)
    except Violation as found:
        found.trace = tuple(trace)  # type: ignore[attr-defined]
        raise
    return w, taken


def _weight(name: str, random: Random) -> float:
    return OFTEN.get(name, SELDOM.get(name, 1)) * random.choice([0.2, 1, 1, 3])


def walks(
    first: World,
    rules: Rules,
    *,
    seconds: float,
    first_seed: int = 0,
    steps_max: int = 250,
    heals: bool = True,
) -> Result:
    """Walks with one seed after the other, until one finds a violation or the time is up."""
    ends, taken, deep = time.process_time() + seconds, 0, 0
    for seed in count(first_seed):
        if time.process_time() > ends:
            return Result(seed - first_seed, taken, deep, None)
        try:
            w, steps = walk(first, rules, seed, steps_max=steps_max, heals=heals)
        except Violation as violation:
            trace: Any = violation.trace  # type: ignore[attr-defined]
            found = Found(seed, len(trace), str(violation), trace)
            return Result(seed - first_seed, taken, deep, found)
        taken += steps
        deep += len(w.committed) >= 3 and w.newest.epoch >= 3
    raise AssertionError


class _Scripted:
    """Takes the options that a script says, then the first, and notes how many there were."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self._script, self.counts = script, []

    def __call__(self, options: Any) -> Any:
        n = len(self.counts)
        self.counts.append(len(options))
        return options[self._script[n] if n < len(self._script) else 0]


def successors(w: World, rules: Rules, max_epoch: int) -> Iterator[tuple[str, World]]:
    """Every world that one step leads to, with all outcomes of what is left to chance."""
    for name, node in moves(w):
        scripts: list[tuple[int, ...]] = [()]
        while scripts:
            script = scripts.pop()
            pick = _Scripted(script)
            steps = Steps(rules, pick, max_epoch=max_epoch)
            after: World | None = getattr(steps, name)(w, w.replicas[node])
            for n in range(len(script), len(pick.counts)):
                head = (*script, *[0] * (n - len(script)))
                scripts += [(*head, other) for other in range(1, pick.counts[n])]
            if after is not None:
                yield f"{name} {w.replicas[node].me}", after


def without_dead(w: World) -> World:
    """Without what was sent and can have no effect any more: worlds that differ in nothing else go
    on alike. No number becomes free again while nothing is collected.
    """
    if w.collected or w.left.collections or w.left.alone:
        return w
    newest, leads = w.newest, [r.lead.epoch for r in w.replicas if r.lead]
    epochs = {newest.epoch, *leads, *(r.sent.epoch for r in w.replicas if r.sent)}
    lowest = min(epochs)
    return w._replace(
        puts=frozenset(put for put in w.puts if put.version > newest.version),
        manifest_puts=frozenset(m for m in w.manifest_puts if m.version > w.manifest.version),
        fetches=frozenset(
            one
            for one in w.fetches
            if one.epoch in epochs or one.epoch > newest.epoch or one.seen > lowest
        ),
    )


def search(
    first: World, rules: Rules, *, max_epoch: int, seconds: float, heals: bool = True
) -> tuple[int, bool]:
    """(worlds seen, whether those are all); raises Violation with the shortest trace to it."""
    ends = time.process_time() + seconds
    steps = Steps(rules, lambda options: options[0])
    seen, level = {first}, [(first, ())]
    while level:
        following = []
        for w, trace in level:
            if time.process_time() > ends:
                return len(seen), False
            try:
                for name, following_world in successors(w, rules, max_epoch):
                    after = without_dead(following_world)
                    if after in seen:
                        continue
                    seen.add(after)
                    following.append((after, (trace, name)))
                    check(after, steps)
                if heals:
                    check_it_heals(w, rules, late_puts_land=True)
            except Violation as violation:
                violation.trace = _unfolded(trace)  # type: ignore[attr-defined]
                raise
        level = following
    return len(seen), True


def _unfolded(trace: Any) -> tuple[str, ...]:
    names = []
    while trace:
        trace, name = trace
        names.append(name)
    return tuple(reversed(names))
