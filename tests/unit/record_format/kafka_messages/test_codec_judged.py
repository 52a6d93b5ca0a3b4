"""Every message in every version, beside two libraries that others keep."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fakes.kafka_judges import KAFKA_PYTHON, KafkaPython, Kio, has_kio
from tests.fakes.kafka_values import leaves, leaves_of_version, messages
from tierlog.record_format.kafka_messages.codec import decode, encode
from tierlog.record_format.kafka_messages.definitions import definition, names
from tierlog.record_format.kafka_messages.messages import struct_types

# kafka-python reads it in version 0 whatever the version, if its error says so.
UNFIT = {"ApiVersionsResponse"}
# No library has the coordinators' records: test_codec.py has bytes of Kafka's own.
RECORDS = {name for name in names() if name.endswith(("Key", "Value"))}

each_value = settings(
    max_examples=3, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def judges(name, version):
    found = [Kio(name, version)] if has_kio(name, version) else []
    if name in KAFKA_PYTHON and name not in UNFIT:
        found.append(KafkaPython(name, version))
    return found


@pytest.mark.parametrize("name", names())
def test_what_we_write_others_read_and_write_back_and_we_read(name):
    for version in definition(name).versions:
        others = judges(name, version)
        assert others or name in RECORDS, version
        each_value(given(messages(name, version))(judged(name, version, others)))()


def judged(name, version, others):
    kind = struct_types(name)[name]

    def check(value):
        written = encode(value, version)
        for other in others:
            seen = other.decode(written)
            assert other.encode(seen) == written
            if isinstance(other, Kio):
                assert leaves(seen) == leaves_of_version(value, name, version)
        assert leaves(decode(kind, version, written)) == leaves(value)

    return check


def test_both_judges_know_nearly_all():
    known = {name for name in names() if has_kio(name, definition(name).versions[-1])}
    assert set(names()) - known == RECORDS
    assert len(KAFKA_PYTHON.keys() & names()) > 90
