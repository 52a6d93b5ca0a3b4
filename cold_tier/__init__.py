"""Objects in a bucket, and checked chunks of them on local disk. Imports only `record_format`.

Read `object_store` first, the port that every store implements. A segment is uploaded by
`segment_uploader` and read by `cold_reader`, from chunks that `ranged_reader` fetches and
`chunk_cache` keeps. Only `s3_client` and its neighbours know boto3.
"""
