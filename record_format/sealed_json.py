"""JSON documents with a length and checksum: manifests, pages, topic objects, chunk tables.

    {"format_version":1,"kind":"manifest","length":123,"crc32c":"0a1b2c3d","document":{...}}

`length` and `crc32c` (Castagnoli, 8 hex digits) cover the bytes of the document as they are in the
object, from its opening to its closing brace (docs/formats/sealed-json.md).

Rules that keep it honest:

* Nothing in a document is trusted before its length, checksum and kind are verified.
* An unknown version is refused by its number, before anything else is read.
* The document's bytes are preserved: sealing the result of `unseal` gives the same object.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from tierlog.record_format.batch import Buffer
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptManifest, UnknownFormatVersion
from tierlog.record_format.workarounds import decode_json

_Document = TypeVar("_Document")

_FORMAT_VERSION: Final = 1
# What msgspec raises for bad syntax, bad UTF-8 and excessive nesting.
_NOT_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Version(msgspec.Struct):
    format_version: int


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    format_version: int
    kind: str
    length: int
    crc32c: str
    document: msgspec.Raw


_raw_decoder = msgspec.json.Decoder(msgspec.Raw)
_HEADER: Final = re.compile(
    rb'\{"format_version":\d+,"kind":"[^"]*","length":(\d{1,19}),"crc32c":"[0-9a-f]{8}","document":'
)


_ANY_HEADER: Final = b'{"format_version":1,"kind":"","length":1,"crc32c":"00000000","document":'
_version_decoder = msgspec.json.Decoder(_Version)
_decoder = msgspec.json.Decoder(_Sealed)
_encoder = msgspec.json.Encoder()


def encode(value: object, *, kind: str) -> bytes:
    """Encode and seal `value`, which msgspec must encode as a JSON object."""
    return seal(msgspec.json.encode(value), kind=kind)


def decode(data: Buffer, *, kind: str, file: str, document: type[_Document]) -> _Document:
    """`unseal` and decode as a `document`. Raises CorruptManifest also if it has another shape."""
    raw = unseal(data, kind=kind, file=file)
    try:
        return decode_json(raw, document)
    except msgspec.DecodeError as problem:
        raise CorruptManifest(str(problem), file=file) from problem


def seal(document: bytes, *, kind: str) -> bytes:
    """Wrap `document`, the UTF-8 text of one JSON object, as `msgspec.json.encode` returns it."""
    assert document[:1] == b"{", "a sealed document is one JSON object"
    assert document[-1:] == b"}", "a sealed document is one JSON object"
    sealed = _Sealed(
        format_version=_FORMAT_VERSION,
        kind=kind,
        length=len(document),
        crc32c=f"{crc32c_of(document):08x}",
        document=msgspec.Raw(document),
    )
    return _encoder.encode(sealed)


def unseal(data: Buffer, *, kind: str, file: str) -> bytes:
    """Verify a sealed object and return its document's bytes.

    Raises UnknownFormatVersion for another version, and CorruptManifest for an object that is
    truncated, altered, or of another kind. `file` names the object in the error.
    """
    try:
        version = _version_decoder.decode(data).format_version
    except _NOT_JSON as error:
        raise CorruptManifest(f"not a sealed JSON document: {error}", file=file) from error
    if version != _FORMAT_VERSION:
        raise UnknownFormatVersion(
            f"unknown format version {version} of {kind!r} (this tierlog knows {_FORMAT_VERSION}); "
            "it was written by another version of tierlog",
            file=file,
        )
    try:
        sealed = _decoder.decode(data)
    except _NOT_JSON as error:
        raise CorruptManifest(f"not a sealed JSON document: {error}", file=file) from error
    document = bytes(sealed.document)
    problem = _mismatch(sealed, document, kind)
    if problem:
        raise CorruptManifest(problem, file=file)
    return document


def is_truncated(data: bytes) -> bool:
    """Whether `data` is a proper prefix of a sealed object: an interrupted upload.

    An object that has all its bytes but fails its checks is not truncated but corrupt.
    """
    try:
        _raw_decoder.decode(data)
    except _NOT_JSON:
        pass
    else:
        return False  # a proper prefix of a JSON object is never JSON
    header = _HEADER.match(data)
    if header is None:
        rests = (_ANY_HEADER[at:] for at in range(len(_ANY_HEADER)))
        return any(_HEADER.fullmatch(data + rest) for rest in rests)
    return len(data) < header.end() + int(header[1]) + len(b"}")


def _mismatch(sealed: _Sealed, document: bytes, kind: str) -> str:
    if sealed.kind != kind:
        return f"kind is {sealed.kind!r}, expected {kind!r}"
    if sealed.length != len(document):
        return f"document length is {len(document)}, expected {sealed.length}"
    found = f"{crc32c_of(document):08x}"
    if sealed.crc32c != found:
        return f"document checksum is {found}, expected {sealed.crc32c}"
    return ""
