from tierlog.object_store.memory import named_store
from tierlog.object_store.open import open_store
from tierlog.record_format.segment_entry import new_unique


def test_a_memory_store_is_found_by_its_name():
    name = new_unique()
    open_store(f"memory://{name}").put("k", b"x")
    assert named_store(name).get("k", max_bytes=1) == b"x"
    assert open_store(f"memory://{name}").url == f"memory://{name}"
