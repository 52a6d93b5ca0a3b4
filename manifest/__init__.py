"""Which objects make up a partition. Stands on `record_format` alone, and names its own store port.

Read `state` first, then `transitions` (every change, pure), `invariants` and `store` (load, claim,
commit). Old entries lie in pages (`paging`); what nothing names any more goes by `garbage`.
"""
