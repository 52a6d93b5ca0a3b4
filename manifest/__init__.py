"""Manifests: which objects in the bucket make up a partition.

Stands on `object_store` and `record_format`. Read `state` first, then `transitions` (every change,
pure), `invariants` and `store` (load, claim, commit). `codec` says which objects a manifest is in,
and `garbage` deletes what is no longer referenced.
"""
