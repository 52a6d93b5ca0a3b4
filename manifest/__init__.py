"""Manifests: which objects in the bucket make up a partition.

Imports only `record_format`, and declares its own object store port (`versions.ObjectStore`). Read
`state` first, then `transitions` (every change, pure), `invariants` and `store` (load, claim,
commit). Old entries are in pages (`paging`); `garbage` deletes what is no longer referenced.
"""
