"""What a broker does by itself: `background_tasks` says who and when.

`copier` uploads, `janitor` deletes by what `retention` decides, `compactor` and `mirror` compact
both tiers, `rehydration` fetches what compaction wants local.
"""
