"""The cold tier: objects in a bucket, and a disk cache of their verified chunks.

Read `object_store` first, the interface of every store. `segment_uploader` uploads segments;
`cold_reader` reads them, from chunks that `ranged_reader` fetches and `chunk_cache` keeps. Only
the `s3` modules import boto3. This package imports only `record_format`.
"""
