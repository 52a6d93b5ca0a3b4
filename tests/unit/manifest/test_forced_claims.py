from __future__ import annotations

import pytest

from tests.fakes.plain_store import Fault, PlainStore
from tierlog.manifest.forced_claims import (
    KIND_FORCED_CLAIM,
    MAX_CLAIM_BYTES,
    ForcedClaim,
    ForcedClaims,
)
from tierlog.manifest.keys import FORCED_CLAIMS
from tierlog.record_format import sealed_json


def claims(store: PlainStore) -> ForcedClaims:
    return ForcedClaims(store, pause=lambda s: None)


def test_claims_are_numbered_and_nothing_new_costs_one_head() -> None:
    store = PlainStore()
    assert claims(store).find_newer(0) == 0
    assert claims(store).write_forced_claim("t1", 0, "me") == 1
    assert claims(store).write_forced_claim("t2", 7, "me") == 2
    assert claims(store).find_newer(0) == 2
    assert claims(store).find_newer(1) == 2
    store.calls.clear()
    assert claims(store).find_newer(2) == 2
    assert store.calls == {"head": 1}


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE, Fault.CUT, Fault.CONFLICT])
def test_a_claim_is_written_despite_a_failed_put(fault: Fault) -> None:
    store, armed = PlainStore(), [fault]
    claims(store).write_forced_claim("t1", 0, "me")
    store.faults = lambda call, key: armed.pop() if armed and call == "put" else None
    number = claims(store).write_forced_claim("t1", 3, "me")
    assert claims(store).find_newer(1) == number
    (key,) = [one.key for one in store.list(FORCED_CLAIMS) if f"{number:020}" in one.key]
    body = store.get(key, max_bytes=MAX_CLAIM_BYTES)
    found = sealed_json.decode(body, kind=KIND_FORCED_CLAIM, file=key, document=ForcedClaim)
    assert (found.topic_id, found.partition, found.owner) == ("t1", 3, "me")
    assert store.overwritten == []
