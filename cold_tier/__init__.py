"""The cold tier: objects in a bucket, and a disk cache of their verified chunks.

`segment_uploader` writes segments and `segment_check` verifies them; `cold_reader` reads them, from
chunks that `ranged_reader` fetches and `chunk_cache` keeps. Stands on `object_store`.
"""
