"""The types of Kafka's messages: `from …kafka_messages.messages import FetchResponse`.

* One type for all versions of a message, as in Kafka: what a version lacks has its default after
  reading, and may not be anything else when written, unless Kafka says that it may be ignored.
* `msgspec.defstruct` makes them, at their first use: construction, comparison and `repr` in C, with
  keywords and defaults, and a module of 160 classes is neither written nor imported. mypy sees
  `messages.pyi`, which `stub` below writes and a test compares.
* A struct inside a message is an attribute of its type (`FetchResponse.PartitionData`): two
  messages use one name for different things.
* Bytes that were read are `bytes`, ids (uuid) are 16 bytes, and `records` are a memoryview of the
  frame: it is good for as long as the frame is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import msgspec

from tierlog.record_format.kafka_messages.definitions import Field, Struct, definition, names

_PYTHON: Final = {
    "bool": "bool",
    "float64": "float",
    "string": "str",
    "bytes": "Bytes",
    "records": "Records",
    "uuid": "bytes",
}
_STUB_HEAD: Final = '''\
"""Written by `python -m tierlog.record_format.kafka_messages.messages`."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from tierlog.record_format.kafka_messages.encoder import HasSize

Bytes: TypeAlias = bytes | bytearray | memoryview
Records: TypeAlias = Bytes | Sequence[HasSize]

def struct_types(name: str) -> dict[str, type[msgspec.Struct]]: ...
def stub() -> str: ...
'''


@cache
def struct_types(name: str) -> dict[str, type[msgspec.Struct]]:
    """The types in message `name` by their names, its own among them. Raises KeyError."""
    made: dict[str, type[msgspec.Struct]] = {}
    for struct in definition(name).struct.structs():
        if struct.name not in made:
            inside = dict(made) if struct.name == name else {}
            made[struct.name] = _make(struct, made, namespace=inside)
    return made


def _make(
    struct: Struct, made: dict[str, type[msgspec.Struct]], *, namespace: dict[str, Any]
) -> type[msgspec.Struct]:
    fields = [(field.name, Any, _default(field, made)) for field in struct.fields]
    # They never refer to what holds them, so the collector has nothing to look for.
    return msgspec.defstruct(
        struct.name, fields, namespace=namespace, module=__name__, gc=False, kw_only=False
    )


def _default(field: Field, made: dict[str, type[msgspec.Struct]]) -> Any:
    if field.is_array and field.default == ():
        return msgspec.field(default_factory=list)
    if field.struct is not None and field.is_empty_default:
        return msgspec.field(default_factory=made[field.struct.name])
    return field.default


def __getattr__(name: str) -> Any:
    try:
        found = struct_types(name)[name]
    except KeyError:
        raise AttributeError(name) from None
    globals()[name] = found
    return found


# --- for mypy -----------------------------------------------------------------------------------


def stub() -> str:
    """The text of `messages.pyi`."""
    return _STUB_HEAD + "".join(line + "\n" for name in names() for line in _stub_of(name))


def _stub_of(name: str) -> Iterator[str]:
    *inside, outer = {one.name: one for one in definition(name).struct.structs()}.values()
    yield f"\nclass {name}(msgspec.Struct):"
    for struct in inside:
        yield f"    class {struct.name}(msgspec.Struct):"
        yield from (f"        {_annotated(field, name)}" for field in struct.fields)
    yield from (f"    {_annotated(field, name)}" for field in outer.fields)
    if not outer.fields and not inside:
        yield "    ..."


def _annotated(field: Field, message: str) -> str:
    kind = f"{message}.{field.type}" if field.struct else _PYTHON.get(field.type, "int")
    if field.is_array:
        kind = f"list[{kind}]"
    may_be_null = field.nullable or (field.default is None and field.struct is None)
    return f"{field.name}: {kind}{' | None' if may_be_null else ''} = ..."


if __name__ == "__main__":
    from pathlib import Path

    Path(__file__).with_suffix(".pyi").write_text(stub())
