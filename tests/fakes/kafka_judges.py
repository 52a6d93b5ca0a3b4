"""Two libraries that read and write Kafka's messages, as judges: they are no part of the broker.

kio's decoder reserves memory for the count that a frame claims before it reads, so it is given only
what we wrote.
"""

import importlib
import io
import warnings

from kio.schema.index import schema_name_map
from kio.serial import entity_reader, entity_writer

from tierlog.record_format.kafka_messages.definitions import snake_case


class Kio:
    """kio: one class per version."""

    def __init__(self, name, version):
        of_version = schema_name_map[_kio_name(name)][version].values()
        entity = next(path for path in of_version if path.endswith(f":{name}"))
        module, _, class_name = entity.partition(":")
        kind = getattr(importlib.import_module(module), class_name)
        self._read, self._write = entity_reader(kind), entity_writer(kind)

    def decode(self, data):
        value, end = self._read(data, 0)
        assert end == len(data)
        return value

    def encode(self, value):
        out = io.BytesIO()
        self._write(out, value)
        return out.getvalue()


def _kio_name(name):
    short = name.removesuffix("Request").removesuffix("Response")
    return snake_case(name if name in ("RequestHeader", "ResponseHeader") else short)


def has_kio(name, version):
    try:
        Kio(name, version)
    except (KeyError, StopIteration):
        return False
    return True


def _kafka_python_classes():
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        for module in "producer", "consumer", "metadata", "admin", "sasl":
            importlib.import_module(f"kafka.protocol.{module}")
        base = importlib.import_module("kafka.protocol.api_message").ApiMessage
    return {kind.__name__: kind for kind in base.__subclasses__()}


KAFKA_PYTHON = _kafka_python_classes()


class KafkaPython:
    """kafka-python: one class for all versions, compiled from the same definitions."""

    def __init__(self, name, version):
        self._kind, self._version = KAFKA_PYTHON[name], version

    def decode(self, data):
        return self._kind.decode(data, version=self._version)

    def encode(self, value):
        value._header = None
        return bytes(value.encode(version=self._version))
