"""The broker's background work; `background_tasks` starts and stops it.

`copier` uploads segments, `janitor` deletes what `retention` decides, and trims (`bucket_trims`);
`deletions` removes deleted topics; `compactor` and `mirror` compact both tiers, `rehydration`
downloads segments that compaction needs on local disk.
"""
