"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677): the server's side, and what it has to know.

* A verifier is what a server keeps instead of a password, in the form of RFC 5803:
  `SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>`. With it nobody can log in.
* It does no I/O: `ScramServer` is given the client's two messages, and gives back the answers.
* There is no channel binding: Kafka's clients do not offer any.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Final, NamedTuple

HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
ITERATIONS: Final = 4096  # Kafka's clients accept no fewer; a token is random, so no more help
_SALT_BYTES: Final = 24
_BASE64: Final = r"[A-Za-z0-9+/]+=*"
_VERIFIER: Final = re.compile(
    rf"(SCRAM-SHA-(?:256|512))\$(\d{{4,7}}):({_BASE64})\$({_BASE64}):({_BASE64})", re.ASCII
)
_FIRST: Final = re.compile(r"([ny],(?:a=[^,]*)?,)(n=([^,]*),r=([!-+\--~]+)(?:,.*)?)")
_LAST: Final = re.compile(rf"(c=({_BASE64}),r=([^,]+)(?:,.*)?),p=({_BASE64})")


class ScramError(Exception):
    """The client is not who it says, or its message is not one."""


class Verifier(NamedTuple):
    mechanism: str
    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    def __str__(self) -> str:
        salt, stored, server = (b64encode(one).decode() for one in self[2:])
        return f"{self.mechanism}${self.iterations}:{salt}${stored}:{server}"


def parse_verifier(text: str) -> Verifier:
    """Raises ValueError."""
    found = _VERIFIER.fullmatch(text)
    if found is None:
        raise ValueError("not a SCRAM verifier")
    salt, stored, server = (b64decode(found[part], validate=True) for part in (3, 4, 5))
    return Verifier(found[1], int(found[2]), salt, stored, server)


def make_verifier(mechanism: str, password: str) -> Verifier:
    """For a password of ASCII characters, which SASLprep leaves as it is."""
    kind, salt = HASHES[mechanism], secrets.token_bytes(_SALT_BYTES)
    salted = hashlib.pbkdf2_hmac(kind, password.encode("ascii"), salt, ITERATIONS)
    client_key = hmac.digest(salted, b"Client Key", kind)
    server_key = hmac.digest(salted, b"Server Key", kind)
    return Verifier(mechanism, ITERATIONS, salt, hashlib.new(kind, client_key).digest(), server_key)


class ScramServer:
    """One exchange. `find` gives the verifier of a user, or raises ScramError."""

    def __init__(self, mechanism: str, find: Callable[[str], Verifier]) -> None:
        self._kind, self._find = HASHES[mechanism], find
        self._verifier: Verifier | None = None
        self._header = self._nonce = self._said = ""
        self.is_done = False

    def answer(self, message: bytes) -> bytes:
        """Raises ScramError."""
        try:
            text = message.decode()
        except UnicodeDecodeError as error:
            raise ScramError("the message is not UTF-8") from error
        return (self._first(text) if self._verifier is None else self._last(text)).encode()

    def _first(self, text: str) -> str:
        found = _FIRST.fullmatch(text)
        if found is None:
            raise ScramError("not a client's first message, or it asks for channel binding")
        self._header, bare, user = found[1], found[2], found[3]
        self._verifier = verifier = self._find(user)
        self._nonce = found[4] + secrets.token_urlsafe(24)
        salt = b64encode(verifier.salt).decode()
        said = f"r={self._nonce},s={salt},i={verifier.iterations}"
        self._said = f"{bare},{said}"
        return said

    def _last(self, text: str) -> str:
        found, verifier = _LAST.fullmatch(text), self._verifier
        assert verifier is not None, "the first message came before"
        if found is None or found[3] != self._nonce or _decoded(found[2]) != self._header.encode():
            raise ScramError("not the final message of this exchange")
        said = f"{self._said},{found[1]}".encode()
        signature = hmac.digest(verifier.stored_key, said, self._kind)
        proof = _decoded(found[4])
        key = bytes(a ^ b for a, b in zip(proof, signature, strict=False))
        stored = hashlib.new(self._kind, key).digest()
        if len(proof) != len(signature) or not hmac.compare_digest(stored, verifier.stored_key):
            raise ScramError("wrong password")
        self.is_done = True
        return "v=" + b64encode(hmac.digest(verifier.server_key, said, self._kind)).decode()


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise ScramError("not base64") from error
