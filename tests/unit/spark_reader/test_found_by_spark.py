import subprocess
import sys

from tests.fakes.bucket import put_topic
from tierlog.object_store.open import open_store

CODE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numba", "pyarrow", "httpx2", "boto3"}:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Refuse())
import pyspark_tierlog
print(pyspark_tierlog.DefaultSource.name(), pyspark_tierlog.DefaultSource({"token": "hunter2"}))
"""


def test_registering_the_source_imports_no_optional_package():
    completed = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout.split() == ["tierlog", "tierlog"]


PLAN = """
import sys
from tierlog.spark_reader.source import TierlogSource
def loaded():
    return {name for name in sys.modules if name.startswith("tierlog.")}
source = TierlogSource({"store": sys.argv[1], "subscribe": "t", "tier": "cold"})
before = loaded()
schema = source.schema()
assert loaded() == before, loaded() - before
assert source.reader(schema).partitions()[0].splits
print(*sorted({"structlog", "asyncio", "numba", "boto3", "httpx2"}.intersection(sys.modules)))
"""


def test_planning_a_read_loads_no_more_than_it_needs(tmp_path):
    """Spark plans each query in new processes: what they load is what a small query waits for."""
    put_topic(open_store(url := tmp_path.as_uri()), "t", {0: "codec-lz4-0"})
    completed = subprocess.run(
        [sys.executable, "-c", PLAN, url], capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout.split() == []
