from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.fakes.manifests import claim, entry, manifest_store, run_of
from tests.fakes.plain_store import PlainStore
from tierlog.manifest.codec import (
    INLINE_MAX,
    PAGE_ENTRIES,
    REMOVED_MAX,
    RUN_MAX,
    SMALL_PAGE,
    PageCache,
    encode_manifest,
    mergeable_pages,
)
from tierlog.manifest.keys import base_offset_of
from tierlog.manifest.state import (
    Manifest,
    PageRef,
    RemovedPageKind,
    live_size_bytes,
    references_object,
)
from tierlog.manifest.store import ManifestStore
from tierlog.manifest.transitions import add_segments, drop_expired, replace_segments, trim
from tierlog.object_store.store import ObjectStat
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptManifest, MissingObject


@pytest.fixture
def store() -> PlainStore:
    return PlainStore()


def filled(store: PlainStore, count: int, *, step: int = 1) -> tuple[ManifestStore, Manifest]:
    manifests = manifest_store(store)
    state = manifests.claim_manifest(claim(), log_start_offset=0)
    for start in range(0, count, step):
        run = run_of(min(step, count - start), start=start * 100)
        state = manifests.commit_manifest(state, lambda s, run=run: add_segments(s, run))
    return manifests, state


def test_few_entries_stay_inline(store: PlainStore) -> None:
    _, state = filled(store, INLINE_MAX)
    assert (len(state.segments), state.pages) == (INLINE_MAX, ())


class PageLosingStore(PlainStore):
    """Stores zeros in place of pages, and returns what `reported` makes of them."""

    def __init__(self, reported: Callable[[bytes], int | None]) -> None:
        super().__init__()
        self.reported = reported

    def put(self, key: str, body: bytes | memoryview, **options: bool) -> ObjectStat:
        kept = bytes(len(body)) if "/pages/" in key else bytes(body)
        return super().put(key, kept, **options)._replace(crc32c=self.reported(kept))


@pytest.mark.parametrize("reported", [lambda _: None, crc32c_of], ids=["none", "crc32c"])
def test_a_page_that_was_stored_wrong_is_never_referenced(
    reported: Callable[[bytes], int | None],
) -> None:
    store = PageLosingStore(reported)
    with pytest.raises(CorruptManifest, match="differs from what was sent"):
        filled(store, INLINE_MAX + 1, step=64)
    loaded = manifest_store(store).load_manifest()
    assert loaded is not None
    assert loaded.pages == ()


def merged(manifests: ManifestStore, state: Manifest) -> Manifest:
    while run := mergeable_pages(state):
        state = manifests.commit_manifest(state, manifests.write_merged_page(run))
    return state


def test_overflow_moves_to_small_pages_which_merge_into_full_ones(store: PlainStore) -> None:
    manifests, state = filled(store, PAGE_ENTRIES * 2 + 500, step=30)
    assert {page.entry_count for page in state.pages} == {SMALL_PAGE}
    before = list(manifests.iter_entries(state))
    small = {page.key for page in state.pages if isinstance(page, PageRef)}
    state = merged(manifests, state)
    counts = [page.entry_count for page in state.pages]
    assert counts[:2] == [PAGE_ENTRIES, PAGE_ENTRIES]
    assert len(counts) < 2 + RUN_MAX
    assert list(manifests.iter_entries(state)) == before
    assert {removed.key for removed in state.removed} < small
    assert manifest_store(store).load_manifest() == state
    assert store.overwritten == []


def test_a_search_by_time_reads_no_older_pages(store: PlainStore) -> None:
    _, state = filled(store, INLINE_MAX + 4 * SMALL_PAGE, step=64)
    assert len(state.pages) == 4
    entries = list(manifest_store(store).iter_entries(state))
    for number in (0, SMALL_PAGE - 1, SMALL_PAGE, 3 * SMALL_PAGE, len(entries) - 1):
        wanted = entries[number].max_timestamp
        manifests = manifest_store(store)
        store.calls.clear()
        found = manifests.iter_entries(state, since_ms=wanted)
        assert next(e for e in found if e.max_timestamp >= wanted) == entries[number]
        assert store.calls["get"] == (number < 4 * SMALL_PAGE)


def test_a_commit_takes_at_most_two_small_puts(store: PlainStore) -> None:
    manifests, state = filled(store, PAGE_ENTRIES - 200, step=100)
    for i in range(PAGE_ENTRIES - 200, PAGE_ENTRIES + 200):
        store.calls.clear()
        before = set(store.objects)
        state = manifests.commit_manifest(state, lambda s, i=i: add_segments(s, [entry(i * 100)]))
        assert sum(store.calls.values()) <= 2
        assert sum(len(store.objects[key]) for key in set(store.objects) - before) <= 256 * 1024


def test_pages_changed_during_their_merge_are_not_replaced(store: PlainStore) -> None:
    manifests, state = filled(store, PAGE_ENTRIES + INLINE_MAX, step=100)
    merging = manifests.write_merged_page(mergeable_pages(state))
    state = manifests.commit_manifest(state, lambda s: trim(s, 550, pages=manifests, now_ms=7))
    assert manifests.commit_manifest(state, merging) is state
    state = merged(manifests, state)
    assert next(iter(manifests.iter_entries(state))).base_offset == 500
    assert state.segment_count == PAGE_ENTRIES + INLINE_MAX - 5


def test_lookup_finds_entries_in_pages(store: PlainStore) -> None:
    _, state = filled(store, 5000, step=100)
    cold = manifest_store(store)
    rng = random.Random(1)
    for offset in [0, 99, 100, 499_999, *rng.sample(range(500_000), 200)]:
        found = cold.find_segment(state, offset)
        assert found is not None
        assert found.base_offset == offset // 100 * 100
    assert cold.find_segment(state, 500_000) is None
    assert [e.base_offset for e in cold.iter_entries(state, from_offset=4_321)][:2] == [4300, 4400]
    assert sum(1 for _ in cold.iter_entries(state)) == 5000


def test_a_page_is_loaded_once(store: PlainStore) -> None:
    _, state = filled(store, 2000, step=100)
    cold = manifest_store(store)
    for offset in range(0, 100_000, 1000):
        cold.find_segment(state, offset)
    assert store.calls["get"] <= len(state.pages) + 1


def test_the_cache_is_bounded_by_entries() -> None:
    cache = PageCache(max_entries=10)
    for i in range(5):
        cache.keep_page(str(i), tuple(run_of(4)))
    assert [cache.cached_page(str(i)) is not None for i in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_a_page_with_other_contents_is_refused(store: PlainStore) -> None:
    _, state = filled(store, 1000, step=100)
    page = state.pages[0]
    assert isinstance(page, PageRef)
    other = state.pages[1]
    assert isinstance(other, PageRef)
    store.objects[page.key] = store.objects[other.key]
    with pytest.raises(CorruptManifest, match=page.key):
        manifest_store(store).find_segment(state, 0)
    del store.objects[page.key]
    with pytest.raises(MissingObject):
        manifest_store(store).find_segment(state, 0)


def test_a_trim_narrows_the_page_it_hits_and_drops_the_pages_below(store: PlainStore) -> None:
    manifests, state = filled(store, 1000, step=100)
    first, second = state.pages[0], state.pages[1]
    assert isinstance(first, PageRef)
    inside = manifests.commit_manifest(state, lambda s: trim(s, 1_050, pages=manifests, now_ms=7))
    assert inside.pages[0].base_offset == 1_000
    assert inside.pages[0].entry_count == first.entry_count - 10
    assert len(inside.removed) == 20
    assert next(iter(manifests.iter_entries(inside))).base_offset == 1_000
    beyond = manifests.commit_manifest(
        inside, lambda s: trim(s, second.base_offset, pages=manifests, now_ms=8)
    )
    assert beyond.pages[0] == second
    assert [(p.key, p.kind) for p in beyond.removed_pages] == [
        (first.key, RemovedPageKind.SEGMENTS)
    ]
    assert manifest_store(store).load_manifest() == beyond


def test_a_trim_to_the_last_record_of_a_page_keeps_its_segment(store: PlainStore) -> None:
    manifests, state = filled(store, 1000, step=100)
    last_offset = state.pages[0].last_offset
    after = manifests.commit_manifest(
        state, lambda s: trim(s, last_offset, pages=manifests, now_ms=7)
    )
    assert next(iter(manifests.iter_entries(after))).last_offset == last_offset


def test_a_page_of_removed_objects_has_the_time_of_its_newest(store: PlainStore) -> None:
    manifests, state = filled(store, 600, step=600)
    for before, now_ms in (10_000, 7), (20_000, 8), (30_000, 9):
        state = manifests.commit_manifest(
            state,
            lambda s, before=before, now_ms=now_ms: trim(s, before, pages=manifests, now_ms=now_ms),
        )
    pages = [page for page in state.removed_pages if page.kind is RemovedPageKind.REMOVED]
    assert {r.removed_ms for r in manifests.objects_removed_with(pages[0])} == {7, 8, 9}
    assert pages[0].removed_ms == 9


def test_many_removed_objects_move_to_a_page(store: PlainStore) -> None:
    manifests, state = filled(store, 600, step=600)
    state = manifests.commit_manifest(state, lambda s: trim(s, 59_000, pages=manifests, now_ms=7))
    assert len(state.removed) <= REMOVED_MAX
    paged = [
        r
        for p in state.removed_pages
        if p.kind is RemovedPageKind.REMOVED
        for r in manifests.objects_removed_with(p)[:-1]
    ]
    dropped = [
        e
        for p in state.removed_pages
        if p.kind is RemovedPageKind.SEGMENTS
        for e in manifests.page_entries(p)
    ]
    assert len(dropped) * 2 + len(paged) + len(state.removed) == 590 * 2


def test_compaction_replaces_entries_in_pages_and_inline(store: PlainStore) -> None:
    manifests, state = filled(store, 1000, step=100)
    everything = list(manifests.iter_entries(state))
    old = everything[100:900]
    new = [entry(e.base_offset, records=200, unique="c") for e in old[::2]]
    after = manifests.commit_manifest(
        state, lambda s: replace_segments(s, old, new, pages=manifests, now_ms=3)
    )
    assert list(manifests.iter_entries(after)) == [*everything[:100], *new, *everything[900:]]
    assert after.end_offset == state.end_offset
    assert manifest_store(store).load_manifest() == after
    again = manifests.commit_manifest(
        after, lambda s: replace_segments(s, old, new, pages=manifests, now_ms=4)
    )
    assert again is after


def test_a_single_record_segment_at_the_end_of_a_page_is_replaced_there(store: PlainStore) -> None:
    run = [*run_of(SMALL_PAGE - 1), entry((SMALL_PAGE - 1) * 100, records=1)]
    manifests = manifest_store(store)
    state = manifests.claim_manifest(claim(), log_start_offset=0)
    more = run_of(INLINE_MAX, start=run[-1].next_offset)
    state = manifests.commit_manifest(state, lambda s: add_segments(s, [*run, *more]))
    assert state.pages[0].last_offset == run[-1].base_offset
    new = replace(run[-1], log_key=run[-1].log_key.replace("-a.", "-b."))
    after = manifests.commit_manifest(
        state, lambda s: replace_segments(s, run[-1:], [new], pages=manifests, now_ms=3)
    )
    assert list(manifests.iter_entries(after)) == [*run[:-1], new, *more]


def test_referenced_keys_are_found_by_their_base_offset(store: PlainStore) -> None:
    manifests, state = filled(store, 1000, step=100)
    page = state.pages[0]
    assert isinstance(page, PageRef)
    segment = manifests.find_segment(state, 4_200)
    assert segment is not None
    for key in (*segment.keys, page.key):
        base = base_offset_of(key)
        assert base is not None
        assert references_object(state, key, base_offset=base, pages=manifests)
    foreign_key = segment.log_key.replace("-a.", "-b.")
    assert not references_object(state, foreign_key, base_offset=4_200, pages=manifests)


def test_a_manifest_of_a_million_segments_fits_in_256_kib(store: PlainStore) -> None:
    _, state = filled(store, 400, step=100)
    page = state.pages[0]
    assert isinstance(page, PageRef)
    many = tuple(
        replace(page, base_offset=i * 409_600, last_offset=(i + 1) * 409_600 - 1)
        for i in range(245)
    )
    start = 245 * 409_600
    full = replace(
        state,
        pages=many,
        segments=tuple(run_of(INLINE_MAX, start=start)),
        end_offset=start + INLINE_MAX * 100,
    )
    assert len(encode_manifest(full)) <= 256 * 1024


def test_retention_drops_entries_in_pages(store: PlainStore) -> None:
    manifests, state = filled(store, 1000, step=100)
    assert live_size_bytes(state) == 1_000_000
    for before in (0, 100, 50_100, 100_000):
        after = drop_expired(state, before, pages=manifests, now_ms=0)
        assert after.segment_count == 1000 - before // 100
        assert live_size_bytes(after) == 1_000_000 - before * 10
