"""Requests by path and status, out of lines in the common log format."""

import os

import pyarrow as pa
import pyarrow.compute as pc

import tierlog

LINE = r'^(?P<host>\S+) .*?"(?P<method>[A-Z]+) (?P<path>\S+) [^"]*" (?P<status>\d{3})'
SERVER = os.environ.get("TIERLOG_SERVER", "http://127.0.0.1:8640")

records = tierlog.read_arrow("access", server=SERVER, columns=["value"]).read_all()
found = pc.extract_regex(records["value"].cast("string").combine_chunks(), LINE)
found = found.drop_null()  # lines that are no requests
requests = pa.Table.from_arrays(found.flatten(), names=[field.name for field in found.type])
counts = requests.group_by(["status", "path"]).aggregate([([], "count_all")])
for row in counts.sort_by([("status", "ascending"), ("path", "ascending")]).to_pylist():
    print(row["status"], row["path"], row["count_all"])
