"""The tokens file: the hashes of the tokens, and what each may do.

    {"format_version": 1,
     "tokens": [{"name", "hash": "sha256:<64 hex>", "scopes": [...], "topics", "created_ms"}]}

    FILE.scram: {"format_version": 1, "verifiers": [{"hash", "scram": [<RFC 5803>, ...]}]}

* The verifiers stand in a file of their own, which no version has to know: of a token that the
  tokens file has, by its hash. They are written first, so whoever finds a token finds its own.
* A token is 256 random bits, so one round of SHA-256 is as good as a slow hash. It is shown once
  and not stored; neither it nor its hash is ever logged.
* Only the command line writes the file: as a whole, by a rename, readable by its owner only.
* A running broker looks at the file at most every five milliseconds.
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
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import aiofiles
import aiofiles.os
import msgspec
import structlog

from tierlog.api.serving import scram
from tierlog.api.serving.grants import Grant, Scope
from tierlog.api.serving.scram import Verifier, make_verifier, parse_verifier
from tierlog.host.durable_file import REAL_DISK
from tierlog.host.medium import sync_all
from tierlog.record_format.errors import ConfigurationError
from tierlog.record_format.workarounds import decode_json

log = structlog.get_logger(__name__)

FORMAT_VERSION: Final = 1
MAX_FILE_BYTES: Final = 1 << 20
MAX_TOKENS: Final = 1000
CHECK_INTERVAL_S: Final = 0.005
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


class _Verifiers(msgspec.Struct, frozen=True, kw_only=True):
    hash: str  # of the token
    scram: tuple[str, ...]


class _ScramDocument(msgspec.Struct, kw_only=True):
    format_version: int
    verifiers: tuple[_Verifiers, ...]


Document = TypeVar("Document", _Document, _ScramDocument)


def hash_of(token: str) -> str:
    return _HASH + hashlib.sha256(token.encode()).hexdigest()


def read_entries(path: Path) -> tuple[TokenEntry, ...]:
    """Raises ConfigurationError if the file is not a tokens file, OSError if it cannot be read."""
    with path.open("rb") as file:
        return _decode(path, file.read(MAX_FILE_BYTES + 1))


def _decode(path: Path, data: bytes) -> tuple[TokenEntry, ...]:
    return _document(path, data, _Document).tokens


def _document(path: Path, data: bytes, kind: type[Document]) -> Document:
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        document = decode_json(data, kind)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is not a tokens file: {error}") from error
    if document.format_version != FORMAT_VERSION:
        raise ConfigurationError(
            f"{path}: unknown format version {document.format_version}; only {FORMAT_VERSION} is "
            "supported"
        )
    return document


def _scram_path(path: Path) -> Path:
    return path.with_name(path.name + ".scram")


def _decode_verifiers(path: Path, data: bytes) -> dict[str, tuple[Verifier, ...]]:
    """By the hash of their token."""
    try:
        return {
            one.hash: tuple(map(parse_verifier, one.scram))
            for one in _document(path, data, _ScramDocument).verifiers
        }
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _read_verifiers(path: Path) -> dict[str, tuple[Verifier, ...]]:
    try:
        with path.open("rb") as file:
            return _decode_verifiers(path, file.read(MAX_FILE_BYTES + 1))
    except FileNotFoundError:
        return {}


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
        raise ConfigurationError(
            "a token needs at least one scope: read, produce, admin or cluster"
        )
    token = _PREFIX + secrets.token_urlsafe(32)
    entry = TokenEntry(
        name=name,
        hash=hash_of(token),
        scopes=tuple(dict.fromkeys(scopes)),
        topics=topics,
        created_ms=now_ms,
    )
    made = tuple(make_verifier(mechanism, token) for mechanism in scram.HASHES)
    with _editing(path, {entry.hash: made}) as entries:
        if any(known.name == name for known in entries):
            raise ConfigurationError(f"token {name!r} already exists: revoke it first")
        if len(entries) >= MAX_TOKENS:
            raise ConfigurationError(f"the limit of {MAX_TOKENS} tokens is reached: revoke some")
        entries.append(entry)
    return token


def revoke_token(path: Path, name: str) -> None:
    """Remove a token; running brokers refuse it within milliseconds. Raises ConfigurationError."""
    with _editing(path, {}) as entries:
        kept = [entry for entry in entries if entry.name != name]
        if len(kept) == len(entries):
            raise ConfigurationError(f"there is no token {name!r}")
        entries[:] = kept


@contextmanager
def _editing(path: Path, verifiers: dict[str, tuple[Verifier, ...]]) -> Iterator[list[TokenEntry]]:
    """Yields the entries, to be changed in place, under a lock; written if the block succeeds, with
    the verifiers of new ones.
    """
    if path.is_dir():  # also an empty path, which is the working folder's
        raise ConfigurationError(f"{path} is a folder, not a tokens file")
    _make_folder(path.parent)
    lock = _open(path.with_name(path.name + ".lock"), path.parent)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = list(read_entries(path)) if path.exists() else []
        yield entries
        known = _read_verifiers(_scram_path(path)) | verifiers
        kept = tuple(
            _Verifiers(hash=entry.hash, scram=tuple(map(str, known[entry.hash])))
            for entry in entries
            if entry.hash in known
        )
        if known:
            document = _ScramDocument(format_version=FORMAT_VERSION, verifiers=kept)
            _write(_scram_path(path), document)
        _write(path, _Document(format_version=FORMAT_VERSION, tokens=tuple(entries)))
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


def _write(path: Path, document: msgspec.Struct) -> None:
    """Replace the file; if root writes it, it keeps its owner, or gets that of the folder."""
    data = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
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
        self._verifiers: dict[str, tuple[Verifier, ...]] = {}
        self._logged = ""  # why the file cannot be read, as last logged
        self._refreshing = asyncio.Lock()
        self._next_check_s, self._is_current = 0.0, False
        self.required = required
        self.generation = 0  # rises whenever the tokens may have become others

    def is_current(self) -> bool:
        """Whether requests can be judged now; otherwise `refresh` first. Never blocks."""
        now_s = time.monotonic()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_INTERVAL_S
            self._is_current = not self.is_changed()
        return self._is_current

    def is_changed(self) -> bool:
        """Whether the file is another one than was read. Every few requests ask."""
        try:
            return _identity(os.stat(self._name)) != self._seen  # noqa: PTH116  a Path is slower
        except OSError:
            return self._seen is not None

    async def refresh(self, threads: Executor | None = None) -> None:
        """Read the file again if it has changed. Whoever comes meanwhile waits."""
        async with self._refreshing:
            if self.is_changed():
                await self._read(threads)
                self.generation += 1
            self._is_current = True

    async def _read(self, threads: Executor | None) -> None:
        try:
            seen = _identity(await aiofiles.os.stat(self._name, executor=threads))
        except OSError as error:
            self._lost(error)
            return
        self.required = True
        try:
            async with aiofiles.open(self._name, "rb", executor=threads) as file:
                data = await file.read(MAX_FILE_BYTES + 1)
            entries = _decode(self._path, data)
            verifiers = await self._read_verifiers(threads)
            self._entries, self._verifiers = entries, verifiers
        except (ConfigurationError, OSError) as error:
            self._refuse_all(error)
            if isinstance(error, OSError):
                seen = ()  # a disk error or a lack of descriptors may be transient: read again
        else:
            self._logged = ""
            log.info("tokens read", tokens=[entry.name for entry in self._entries])
        self._seen = seen  # only now: until then, no request may be judged by the old entries

    async def _read_verifiers(self, threads: Executor | None) -> dict[str, tuple[Verifier, ...]]:
        """Whatever is wrong with their file, the other mechanisms go on."""
        path = _scram_path(self._path)
        try:
            async with aiofiles.open(path, "rb", executor=threads) as file:
                return _decode_verifiers(path, await file.read(MAX_FILE_BYTES + 1))
        except FileNotFoundError:
            pass  # no token was made since there are verifiers
        except (ConfigurationError, OSError) as error:
            log.error("no SCRAM: its verifiers cannot be read", error=str(error))
        return {}

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
        entry = self.entry_of(token)
        return None if entry is None else entry.grant

    @property
    def entries(self) -> tuple[TokenEntry, ...]:
        return self._entries

    def entry_of(self, token: str) -> TokenEntry | None:
        """Compares with every hash in constant time, even after a match."""
        presented = hash_of(token).encode()
        found: TokenEntry | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.hash.encode(), presented):
                found = entry
        return found

    def entry_named(self, name: str) -> TokenEntry | None:
        return next((entry for entry in self._entries if entry.name == name), None)

    def verifier(self, entry: TokenEntry, mechanism: str) -> Verifier | None:
        """None for a token that was made before there were verifiers."""
        found = self._verifiers.get(entry.hash, ())
        return next((one for one in found if one.mechanism == mechanism), None)

    def verifiers_of(self, name: str) -> tuple[Verifier, ...]:
        """Of the token with this name."""
        entry = self.entry_named(name)
        return () if entry is None else self._verifiers.get(entry.hash, ())

    def names_with_verifiers(self) -> list[str]:
        return [entry.name for entry in self._entries if entry.hash in self._verifiers]


def _identity(file: os.stat_result) -> tuple[int, ...]:
    return (file.st_ino, file.st_mtime_ns, file.st_size)
