"""Under which (owner, epoch) pairs a folder asked the bucket to be the owner.

* Noted, fsynced, before the claim is sent: one whose answer never came, or that a crash kept from
  being noted, is known again when it is found in force.
* An epoch that the folder took and asked for nothing under says nothing: the folder that it is an
  older copy of takes the same numbers, under the same owner where the copy is of the whole disk.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from manifest.state import Manifest
from record_format import sealed_json, typed_json
from record_format.errors import CorruptDataError

log = structlog.get_logger(__name__)

KIND = "sent-claims"

Pairs = frozenset[tuple[str, int]]


class _Sent(msgspec.Struct, frozen=True):
    claims: tuple[tuple[str, int], ...]


def sent_path(copy_path: Path) -> Path:
    """The file is beside the copy of the manifest that was last seen in force."""
    return copy_path.with_suffix(".claims")


def read_sent(copy_path: Path) -> Pairs:
    path = sent_path(copy_path)
    if not path.exists():
        return frozenset()
    try:
        document = sealed_json.unseal(path.read_bytes(), kind=KIND, file=str(path))
        return frozenset(typed_json.decode(document, _Sent).claims)
    except CorruptDataError as error:  # the manifest noted last still speaks for the folder
        log.warning("noted claims unreadable", file=str(path), error=str(error))
        return frozenset()


def encode_sent(sent: Pairs) -> bytes:
    document = msgspec.json.encode(_Sent(tuple(sorted(sent))))
    return sealed_json.seal(document, kind=KIND)


def recorded_pairs(copy: Manifest | None, sent: Pairs) -> Pairs:
    """The (owner, epoch) pairs that a folder asked for itself, or saw in force last."""
    return sent | {(copy.owner, copy.leader_epoch)} if copy else sent
