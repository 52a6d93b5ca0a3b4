"""Which objects make up a partition. Imports only `record_format`, and names its own store port.

Read `state` first, then `transitions` (every change, pure), `invariants` and `store` (load, claim,
commit). Old entries are in pages (`paging`); `garbage` deletes what nothing names any more.
"""
