"""Whether a data folder may register as a node of the cluster: pure, from what it recorded itself
and what the bucket has.

* `tierlog/node.json` is written before each registration is sent. So the bucket is never ahead of
  the folder that registered last: a folder that it is ahead of is an older copy, whose logs may
  lack what its successor acknowledged.
* A folder that was copied or moved has a new id (`DataFolder`), but the record of the old one.
"""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tierlog.broker.data_folder.data_folder import Document, unusable
from tierlog.record_format.errors import ConfigurationError

if TYPE_CHECKING:
    from tierlog.manifest.registrations import Registration


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`version`: the highest that was ever sent. `joined`: the bucket had one of this folder.
    `draining`: an operator's order, which outlives restarts.
    """

    node_id: int
    folder_id: str
    incarnation: int
    version: int
    joined: bool
    draining: bool = False


NODE: Final = Document("node.json", "node", NodeRecord)


class Standing(Enum):
    """What the newest registration of a node id is to a folder."""

    FREE = auto()  # there is none, or another folder's that was removed
    OURS = auto()
    MOVED = auto()  # ours, of before the folder was copied or moved
    OLDER = auto()  # ours, but newer than what the folder recorded: this is an older copy
    REPLACED = auto()  # another folder's, where this one was registered before
    ANOTHERS = auto()
    REMOVED = auto()  # ours, and an operator removed it


def standing_of(
    newest: Registration | None, record: NodeRecord | None, *, folder_id: str
) -> Standing:
    """`record`: of the same node id; None if the folder has none."""
    ids = {folder_id} if record is None else {folder_id, record.folder_id}
    recorded_version = 0 if record is None else record.version
    if newest is None:
        return Standing.FREE
    if newest.folder_id not in ids:
        if newest.state == "removed":
            return Standing.FREE
        was_here = record is not None and record.joined
        return Standing.REPLACED if was_here else Standing.ANOTHERS
    if newest.state == "removed":
        return Standing.REMOVED
    if newest.version > recorded_version:
        return Standing.OLDER
    return Standing.OURS if newest.folder_id == folder_id else Standing.MOVED


_ELSE: Final = "start an empty folder with --join"
_TAKE_OVER: Final = f"{_ELSE}, or, if that one is lost, this folder with --take-over"


def refusal(standing: Standing, newest: Registration, *, data_dir: object, is_live: bool) -> str:
    """Why the folder does not start as this node, and what to do."""
    node, where = f"node {newest.node_id}", f"the broker at {newest.url}"
    folder = f"data folder {data_dir}"
    if standing is Standing.REMOVED:
        return f"{folder}: {node} was removed from the cluster: {_ELSE}"
    if is_live and standing is Standing.ANOTHERS:
        return (
            f"{where} is {node}, with another data folder: stop it, or start this one with another "
            "--node-id"
        )
    if is_live:
        return f"{folder} is a copy: {where} runs as {node} on another: stop that, or {_ELSE}"
    if standing is Standing.OLDER:
        return f"{folder} is an older copy of that of {node}, which has started since: {_TAKE_OVER}"
    return f"{folder}: another folder has since been started as {node}: {_TAKE_OVER}"


def check_has_not_joined(data_dir: Path) -> None:
    """Raise ConfigurationError. Called before a folder is served without the cluster, whose other
    brokers may own its topics by now.
    """
    try:
        has_joined = NODE.path(data_dir).exists()
    except OSError as error:
        raise unusable(data_dir, error) from error
    if has_joined:
        raise ConfigurationError(
            f"data folder {data_dir} is of a broker of a cluster: start it with --join"
        )
