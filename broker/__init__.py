"""The two tiers as one log, and what moves between them.

Read `broker` first, then `partition` (which tier serves a read). What runs in the background is in
`chores`: `copier` uploads, `janitor` deletes, `compactor` and `mirror` compact both tiers.
`ownership` and `fences` keep a former owner from writing; `take_over`, `restore` and `repair` are
for bad days.
"""
