"""The tokens file: the hashes of the tokens, and what each may do.

    {"format_version": 1,
     "tokens": [{"name", "hash": "sha256:<64 hex>", "scopes": [...], "topics", "created_ms"}]}

* A token is 256 random bits, so one round of SHA-256 is as good as a slow hash. It is shown once
  and not stored; neither it nor its hash is ever logged.
* Only the command line writes the file: as a whole, by a rename, readable by its owner only.
* `TokensFile` reloads the file. If it cannot be read, or was deleted, all requests are refused: a
  broker that has required tokens never stops requiring them.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import aiofiles
import aiofiles.os
import msgspec
import structlog

from tierlog.api.serving.grants import Grant, Scope
from tierlog.host.durable_file import REAL_DISK
from tierlog.host.medium import sync_all
from tierlog.record_format.errors import ConfigurationError
from tierlog.record_format.workarounds import decode_json

log = structlog.get_logger(__name__)

FORMAT_VERSION: Final = 1
MAX_FILE_BYTES: Final = 1 << 20
MAX_TOKENS: Final = 1000
_PREFIX: Final = "tierlog_"
_HASH: Final = "sha256:"
_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}\Z", re.ASCII)
_TOPICS: Final = re.compile(r"[a-zA-Z0-9._-]{0,249}\Z", re.ASCII)


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`topics`: the prefix of topic names; empty for all."""

    name: str
    hash: str
    scopes: tuple[Scope, ...]
    topics: str = ""
    created_ms: int = 0

    @property
    def grant(self) -> Grant:
        return Grant(self.name, frozenset(self.scopes), self.topics)


class _Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format_version: int
    tokens: tuple[TokenEntry, ...]


def hash_of(token: str) -> str:
    return _HASH + hashlib.sha256(token.encode()).hexdigest()


def read_entries(path: Path) -> tuple[TokenEntry, ...]:
    """Raises ConfigurationError if the file is not a tokens file, OSError if it cannot be read."""
    with path.open("rb") as file:
        return _decode(path, file.read(MAX_FILE_BYTES + 1))


def _decode(path: Path, data: bytes) -> tuple[TokenEntry, ...]:
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        document = decode_json(data, _Document)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is not a tokens file: {error}") from error
    if document.format_version != FORMAT_VERSION:
        raise ConfigurationError(
            f"{path}: unknown format version {document.format_version}; only {FORMAT_VERSION} is "
            "supported"
        )
    return document.tokens


def create_token(
    path: Path, name: str, *, scopes: tuple[Scope, ...], topics: str = "", now_ms: int
) -> str:
    """Add a token to the file, which need not exist. Returns the token, which is shown only here.

    Raises ConfigurationError.
    """
    if not _NAME.match(name):
        raise ConfigurationError(
            f"a token's name has 1 to 64 of the characters A-Z a-z 0-9 . _ @ -, not {name!r}"
        )
    if not _TOPICS.match(topics):
        raise ConfigurationError(f"no topic's name can begin with {topics!r}")
    if not scopes:
        raise ConfigurationError("a token needs at least one scope: read, produce or admin")
    token = _PREFIX + secrets.token_urlsafe(32)
    entry = TokenEntry(
        name=name,
        hash=hash_of(token),
        scopes=tuple(dict.fromkeys(scopes)),
        topics=topics,
        created_ms=now_ms,
    )
    with _editing(path) as entries:
        if any(known.name == name for known in entries):
            raise ConfigurationError(f"token {name!r} already exists: revoke it first")
        if len(entries) >= MAX_TOKENS:
            raise ConfigurationError(f"the limit of {MAX_TOKENS} tokens is reached: revoke some")
        entries.append(entry)
    return token


def revoke_token(path: Path, name: str) -> None:
    """Remove a token; running brokers refuse it within milliseconds. Raises ConfigurationError."""
    with _editing(path) as entries:
        kept = [entry for entry in entries if entry.name != name]
        if len(kept) == len(entries):
            raise ConfigurationError(f"there is no token {name!r}")
        entries[:] = kept


@contextmanager
def _editing(path: Path) -> Iterator[list[TokenEntry]]:
    """Yields the entries, to be changed in place, under a lock; written if the block succeeds."""
    if path.is_dir():  # also an empty path, which is the working folder's
        raise ConfigurationError(f"{path} is a folder, not a tokens file")
    _make_folder(path.parent)
    lock = _open(path.with_name(path.name + ".lock"), path.parent)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = list(read_entries(path)) if path.exists() else []
        yield entries
        document = _Document(format_version=FORMAT_VERSION, tokens=tuple(entries))
        _write(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    finally:
        os.close(lock)


def _make_folder(path: Path) -> None:
    """Create a folder; if root creates it, it gets the owner of its parent."""
    if not path.exists():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        if os.geteuid() == 0:
            owner = path.parent.stat()
            os.chown(path, owner.st_uid, owner.st_gid)


def _open(path: Path, owner_of: Path) -> int:
    """Create or truncate a file with mode 0600; root gives it the owner of `owner_of`."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    if os.geteuid() == 0:
        owner = owner_of.stat()
        os.fchown(fd, owner.st_uid, owner.st_gid)
    return fd


def _write(path: Path, data: bytes) -> None:
    """Replace the file; if root writes it, it keeps its owner, or gets that of the folder."""
    temporary = path.with_name(path.name + ".tmp")
    fd = _open(temporary, path if path.exists() else path.parent)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
        sync_all(fd)
    finally:
        os.close(fd)
    temporary.rename(path)
    REAL_DISK.sync_folder(path.parent)


class TokensFile:
    """The tokens of a running broker, once `refresh` has read them."""

    def __init__(self, path: Path, *, required: bool) -> None:
        self._path, self._name = path, str(path)
        self._seen: tuple[int, ...] | None = ()  # of the file that was read; None without one
        self._entries: tuple[TokenEntry, ...] = ()
        self._logged = ""  # why the file cannot be read, as last logged
        self._refreshing = asyncio.Lock()
        self.required = required

    def is_changed(self) -> bool:
        """Whether the file is another one than was read. Every few requests ask."""
        try:
            return _identity(os.stat(self._name)) != self._seen  # noqa: PTH116  a Path is slower
        except OSError:
            return self._seen is not None

    async def refresh(self, threads: Executor | None = None) -> None:
        """Read the file again if it has changed. Whoever comes meanwhile waits."""
        async with self._refreshing:
            if not self.is_changed():
                return
            try:
                seen = _identity(await aiofiles.os.stat(self._name, executor=threads))
            except OSError as error:
                self._lost(error)
                return
            self.required = True
            try:
                async with aiofiles.open(self._name, "rb", executor=threads) as file:
                    data = await file.read(MAX_FILE_BYTES + 1)
                self._entries = _decode(self._path, data)
            except (ConfigurationError, OSError) as error:
                self._refuse_all(error)
                if isinstance(error, OSError):
                    seen = ()  # a disk error or a lack of descriptors may be transient: read again
            else:
                self._logged = ""
                log.info("tokens read", tokens=[entry.name for entry in self._entries])
            self._seen = seen  # only now: until then, no request may be judged by the old entries

    def _lost(self, error: OSError) -> None:
        if self.required and self._seen:
            log.error("tokens file is gone: all requests are refused", error=error.strerror)
        elif not isinstance(error, FileNotFoundError):
            self.required = True
        self._seen, self._entries = None, ()

    def _refuse_all(self, error: ConfigurationError | OSError) -> None:
        self._entries = ()
        if str(error) != self._logged:
            log.error("tokens file cannot be read: all requests are refused", error=str(error))
        self._logged = str(error)

    def grant_of(self, token: str) -> Grant | None:
        """Compares with every hash in constant time, even after a match."""
        presented = hash_of(token).encode()
        found: Grant | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.hash.encode(), presented):
                found = entry.grant
        return found


def _identity(file: os.stat_result) -> tuple[int, ...]:
    return (file.st_ino, file.st_mtime_ns, file.st_size)
