"""One port, `store.ObjectStore`, and its stores: S3, a folder, memory; the probe that checks them.

It knows keys and bytes, and nothing of segments or manifests.
"""
