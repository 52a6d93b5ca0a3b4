"""What a broker does by itself: `chores` says who and when.

`copier` uploads, `janitor` deletes by what `retention` decides, `compactor` and `mirror` compact
both tiers, `bring_back` fetches what compaction wants local.
"""
