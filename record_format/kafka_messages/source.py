"""Writes and compiles straight-line Python, and says for each line which field it is about.

* A line is only ever made of names that we chose, numbers, and constants passed in beside it:
  nothing of a frame becomes source.
* The code that runs carries no paths: when it fails, the number of the line that failed is looked
  up here. So a good frame pays nothing for a bad frame's message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

from tierlog.record_format.errors import RequestError

INT_MAX: Final = (1 << 31) - 1
FORMATS: Final[Mapping[str, str]] = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}


class MessageError(RequestError):
    """A message that is not what its definition says, read or about to be written.

    `message` and `version` are the definition's, `field` the path in it, such as
    `topics[].partitions[].records`; empty if it is about the whole.
    """

    def __init__(self, problem: str, *, message: str, version: int, field: str = "") -> None:
        where = f"{message} v{version}" + (f", {field}" if field else "")
        super().__init__(f"{where}: {problem}")
        self.message, self.version, self.field = message, version, field


class Refused(ValueError):
    """Raised by compiled code; whoever called it makes a MessageError of it."""


class Compiled:
    """A function, and which field each of its lines is about."""

    __slots__ = ("_file_name", "_paths", "call", "message", "version")

    def __init__(self, source: Source, call: Callable[..., Any]) -> None:
        self.call, self.message, self.version = call, source.message, source.version
        self._file_name, self._paths = source.file_name, source.paths

    def error(self, cause: Exception) -> MessageError:
        """What `cause`, which came out of `call`, means."""
        return MessageError(
            _in_words(cause),
            message=self.message,
            version=self.version,
            field=self._field(cause.__traceback__),
        )

    def _field(self, trace: TracebackType | None) -> str:
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file_name:
                return self._paths[trace.tb_lineno - 1]
            trace = trace.tb_next
        return ""


def _in_words(cause: Exception) -> str:
    match cause:
        case UnicodeDecodeError():
            return "it is not UTF-8"
        case UnicodeEncodeError():
            return "it cannot be UTF-8"
        case IndexError():
            return "the frame ends inside it"
        case struct.error() if "unpack_from requires" in str(cause):
            return "the frame ends inside it"
    return str(cause)


class Source:
    """The lines of one function, and the constants they name."""

    def __init__(self, message: str, version: int, *, verb: str) -> None:
        self.message, self.version = message, version
        self.file_name = f"<{verb} {message} v{version}>"
        self.paths: list[str] = []
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {"Refused": Refused}
        self._depth = self._variables = 0

    def line(self, text: str, path: str = "") -> None:
        self._lines.append(f"{' ' * self._depth}{text}")
        self.paths.append(path)

    @contextmanager
    def block(self, head: str, path: str = "") -> Iterator[None]:
        self.line(head, path)
        self._depth += 1
        yield
        self._depth -= 1

    def variable(self) -> str:
        self._variables += 1
        return f"v{self._variables}"

    def constant(self, value: Any, name: str = "") -> str:
        """The name of `value` in the function."""
        name = name or f"C{len(self._constants)}"
        self._constants[name] = value
        return name

    def method(self, formats: str, verb: str) -> str:
        """The name of `unpack_from` or `pack` of a big-endian layout."""
        name = f"{verb}_{formats.replace('?', 'T')}"
        if name not in self._constants:
            self._constants[name] = getattr(struct.Struct(f">{formats}"), verb)
        return name

    def compile(self, name: str) -> Compiled:
        """Compile the lines, which define the function `name`."""
        found = dict(self._constants)
        code = compile("\n".join(self._lines), self.file_name, "exec")
        exec(code, found)  # noqa: S102  made of our definitions alone
        return Compiled(self, found[name])
