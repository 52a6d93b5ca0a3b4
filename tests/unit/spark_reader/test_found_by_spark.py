import subprocess
import sys

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
