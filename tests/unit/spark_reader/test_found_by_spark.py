import subprocess
import sys

LOOK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numba", "pyarrow", "httpx", "boto3"}:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Refuse())
import pyspark_tierlog
print(pyspark_tierlog.DefaultSource.name(), pyspark_tierlog.DefaultSource({"token": "hunter2"}))
"""


def test_spark_learns_the_name_without_importing_what_does_the_work():
    told = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.split() == ["tierlog", "tierlog"]
