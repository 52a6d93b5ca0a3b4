"""The broker's background work; `background_tasks` starts and stops it.

`copier` uploads segments, `janitor` trims and deletes what `retention` decides, `deletions` removes
deleted topics; `compactor` compacts both tiers, `merger` merges what is in the bucket alone.
"""
