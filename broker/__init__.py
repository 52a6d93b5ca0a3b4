"""The two tiers as one log, and what moves between them.

Start with `broker`, then `partition`, which decides the tier that serves a read. Background work
starts in `background.background_tasks`. `ownership` fences former owners, `groups` keeps consumer
group offsets, and `repair` verifies, repairs and restores.
"""
