"""Requests as in `kafka_fuzz`, searched for with atheris: `kafka_fuzz_search FOLDER SECONDS`.

What of the listener and the coordinators a request reaches guides it, so these are imported by its
hook.
"""

import sys
from importlib import import_module
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

atheris = import_module("atheris")  # it is no part of the test extra
with atheris.instrument_imports(include=["tierlog.api.kafka", "tierlog.broker"]):
    from tests.fakes import kafka_fuzz

OPTIONS = ("-timeout=60", "-rss_limit_mb=2048", "-len_control=0", "-max_len=4096")


def main() -> None:
    with kafka_fuzz.fuzzed(Path(sys.argv[1])) as target:

        @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def send(data: st.DataObject) -> None:
            api = data.draw(st.sampled_from(kafka_fuzz.SERVED))
            version = data.draw(st.integers(api.min_version, api.max_version))
            target.send(data.draw(target.requests(api, version)), version)

        options = [sys.argv[0], f"-max_total_time={sys.argv[2]}", *OPTIONS]
        atheris.Setup(options, send.hypothesis.fuzz_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
