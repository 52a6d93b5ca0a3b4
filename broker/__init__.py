"""The two tiers as one log, and what moves between them.

Read `broker` first, then `partition` (which tier serves a read). What runs in the background begins
at `background.chores`; `ownership` keeps a former owner from writing; `groups` is how far each
group has read; `mending` verifies, repairs and restores.
"""
