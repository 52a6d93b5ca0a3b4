"""SaslHandshake and SaslAuthenticate: a client proves that it has a token. And which tokens have
SCRAM's verifiers, for DescribeUserScramCredentials.

| mechanism | user | secret |
|---|---|---|
| PLAIN (RFC 4616) | the token's name | the token |
| OAUTHBEARER (RFC 7628) | | the token as the bearer token |
| SCRAM-SHA-256, SCRAM-SHA-512 | the token's name | the token |

* PLAIN and OAUTHBEARER show the token itself, so they are offered over TLS and on loopback only.
* What failed is answered after `connection.failed.authentication.delay.ms`, and ends the
  connection. The log has the client's address and the reason, never what was sent.
* A client may authenticate again (KIP-368), with the same mechanism and the same token's name.
* SaslHandshake 0 is not served: after it, Kafka's clients send tokens without a request around
  them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final, TypeVar

import msgspec
import structlog

from tierlog.api.kafka.access import may_show_secret
from tierlog.api.kafka.calls import Call, EndConnection, Exchange, Session
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.partitions import ADMINISTERING, refusal_of
from tierlog.api.serving.scram import HASHES, ScramError, ScramServer, Verifier
from tierlog.api.serving.tokens import TokenEntry, TokensFile
from tierlog.record_format.kafka_messages.messages import (
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

log = structlog.get_logger(__name__)

Refusal = TypeVar("Refusal", bound=msgspec.Struct)
_PLAIN, _BEARER = "PLAIN", "OAUTHBEARER"
_SHOWING: Final = (_PLAIN, _BEARER)  # the token itself
_PLAIN_PARTS: Final = 3
_NUMBERS: Final = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}  # in Kafka's messages
_WRONG: Final = "invalid credentials"


class AuthenticationFailed(Exception):
    pass


class _Shown:
    """PLAIN, OAUTHBEARER: one message, which has the token."""

    def __init__(self, mechanism: str, tokens: TokensFile) -> None:
        self.mechanism, self._tokens = mechanism, tokens
        self.token: TokenEntry | None = None

    def answer(self, message: bytes) -> bytes:
        user, secret = (_of_plain if self.mechanism == _PLAIN else _of_bearer)(message)
        token = self._tokens.entry_of(secret)
        if token is None or user not in (None, token.name):
            raise AuthenticationFailed(_WRONG)
        self.token = token
        return b""


def _of_plain(message: bytes) -> tuple[str | None, str]:
    parts = _text(message).split("\0")
    if len(parts) != _PLAIN_PARTS or parts[0] not in ("", parts[1]):
        raise AuthenticationFailed("not a message of PLAIN, or for another user's sake")
    return parts[1], parts[2]


def _of_bearer(message: bytes) -> tuple[str | None, str]:
    head, *pairs = _text(message).split("\1")
    given = dict(pair.partition("=")[::2] for pair in pairs)
    scheme, _, secret = given.get("auth", "").partition(" ")
    if not head.startswith("n,") or scheme.lower() != "bearer":
        raise AuthenticationFailed("not a message of OAUTHBEARER")
    user = head.removeprefix("n,").strip(",").removeprefix("a=")
    return user or None, secret.strip()


def _text(message: bytes) -> str:
    try:
        return message.decode()
    except UnicodeDecodeError as error:
        raise AuthenticationFailed("the message is not UTF-8") from error


class _Scram:
    def __init__(self, mechanism: str, tokens: TokensFile) -> None:
        self.mechanism, self._tokens = mechanism, tokens
        self._named: TokenEntry | None = None
        self._server = ScramServer(mechanism, self._verifier)
        self.token: TokenEntry | None = None

    def _verifier(self, name: str) -> Verifier:
        self._named = token = self._tokens.entry_named(name)
        if token is None:
            raise ScramError(_WRONG)
        found = self._tokens.verifier(token, self.mechanism)
        if found is None:
            raise ScramError(
                "this token has no SCRAM verifier, as it is older than they are: use PLAIN, or "
                "create another token"
            )
        return found

    def answer(self, message: bytes) -> bytes:
        try:
            answer = self._server.answer(message)
        except ScramError as error:
            raise AuthenticationFailed(str(error)) from error
        if self._server.is_done:
            self.token = self._named
        return answer


async def _refused(call: Call, refusal: Refusal, reason: str) -> Refusal:
    """Answered late, so that guessing is slow, and the last answer of its connection."""
    session, context = call.session, call.context
    context.counts.failed_authentications += 1
    log.warning(
        "Kafka client is not authenticated",
        client=session.address,
        client_id=call.head.client_id,
        reason=reason,
    )
    session.exchange, session.is_refused = None, True
    await asyncio.sleep(context.settings.failed_authentication_delay_ms / 1000)
    return refusal


# --- the handlers ---------------------------------------------------------------------------------


async def sasl_handshake(call: Call, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
    session, access = call.session, call.context.access
    if call.version < call.head.api.advertised_min_version:
        raise EndConnection("SaslHandshake 0 is followed by what is no request: it is not served")
    if not access.requires_tokens():
        return SaslHandshakeResponse(error_code=Code.ILLEGAL_SASL_STATE, mechanisms=[])
    assert access.tokens is not None, "they are required"
    offered = [name for name in (*_SHOWING, *HASHES) if _is_offered(name, session)]
    mechanism = request.mechanism
    if mechanism not in offered:
        refusal = SaslHandshakeResponse(
            error_code=Code.UNSUPPORTED_SASL_MECHANISM, mechanisms=offered
        )
        return await _refused(call, refusal, f"its mechanism is not one of {', '.join(offered)}")
    kind = _Shown if mechanism in _SHOWING else _Scram
    session.exchange = kind(mechanism, access.tokens)
    return SaslHandshakeResponse(mechanisms=offered)


def _is_offered(mechanism: str, session: Session) -> bool:
    return mechanism not in _SHOWING or may_show_secret(session)


async def sasl_authenticate(
    call: Call, request: SaslAuthenticateRequest
) -> SaslAuthenticateResponse:
    session, exchange = call.session, call.session.exchange
    if exchange is None:
        refusal = SaslAuthenticateResponse(
            error_code=Code.ILLEGAL_SASL_STATE, error_message="no SaslHandshake came before"
        )
        return await _refused(call, refusal, "SaslAuthenticate before SaslHandshake")
    try:
        answer = exchange.answer(bytes(request.auth_bytes))
        if exchange.token is None:
            return SaslAuthenticateResponse(auth_bytes=answer)
        _check_same(session, exchange)
    except AuthenticationFailed as error:
        refusal = SaslAuthenticateResponse(
            error_code=Code.SASL_AUTHENTICATION_FAILED,
            error_message=f"Authentication failed with {exchange.mechanism}: {error}",
        )
        return await _refused(call, refusal, str(error))
    session.mechanism = exchange.mechanism
    lifetime_ms = call.context.access.admit(session, exchange.token)
    return SaslAuthenticateResponse(auth_bytes=answer, session_lifetime_ms=lifetime_ms)


def _check_same(session: Session, exchange: Exchange) -> None:
    """Raises AuthenticationFailed."""
    before = session.token
    assert exchange.token is not None, "the client has proved that it has it"
    if before is not None and (before.name, session.mechanism) != (
        exchange.token.name,
        exchange.mechanism,
    ):
        raise AuthenticationFailed("a connection keeps its user and its mechanism")


# --- whose verifiers there are --------------------------------------------------------------------


def describe_user_scram_credentials(
    call: Call, request: DescribeUserScramCredentialsRequest
) -> DescribeUserScramCredentialsResponse:
    """Of the users that are named; of all that have some if none is."""
    if refusal := refusal_of(call, ADMINISTERING):
        return DescribeUserScramCredentialsResponse(
            error_code=Code.CLUSTER_AUTHORIZATION_FAILED, error_message=refusal
        )
    named = Counter(one.name for one in request.users or ())
    tokens = call.context.access.tokens
    users = named or Counter(tokens.names_with_verifiers() if tokens is not None else ())
    return DescribeUserScramCredentialsResponse(
        results=[_credentials(tokens, user, times=times) for user, times in users.items()]
    )


def _credentials(
    tokens: TokensFile | None, user: str, *, times: int
) -> DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult:
    result = DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult(user=user)
    found = tokens.verifiers_of(user) if tokens is not None else ()
    if times > 1:
        result.error_code = Code.DUPLICATE_RESOURCE
        result.error_message = f"the user is named twice in one request: {user}"
    elif not found:
        result.error_code = Code.RESOURCE_NOT_FOUND
        result.error_message = f"there is no such user credential: {user}"
    else:
        result.credential_infos = [
            DescribeUserScramCredentialsResponse.CredentialInfo(
                _NUMBERS[one.mechanism], one.iterations
            )
            for one in found
        ]
    return result
