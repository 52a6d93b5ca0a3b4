import asyncio
import json
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tierlog.api.serving import tokens
from tierlog.api.serving.grants import Grant, Scope
from tierlog.api.serving.tokens import TokensFile, create_token, read_entries, revoke_token
from tierlog.record_format.errors import ConfigurationError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "tokens.json"


def opened(path, *, required=False):
    file = TokensFile(path, required=required)
    asyncio.run(file.refresh())
    return file


def make(path, name, *scopes, topics=""):
    return create_token(path, name, scopes=scopes or (Scope.READ,), topics=topics, now_ms=7)


def test_a_token_grants_the_scopes_it_was_created_with(path):
    token = make(path, "a", Scope.READ, Scope.PRODUCE, Scope.READ, topics="orders.")
    file = opened(path)
    assert file.required
    assert file.grant_of(token) == Grant("a", frozenset((Scope.READ, Scope.PRODUCE)), "orders.")
    assert file.grant_of(token[:-1]) is None
    assert file.grant_of("") is None
    (entry,) = read_entries(path)
    assert (entry.scopes, entry.created_ms) == ((Scope.READ, Scope.PRODUCE), 7)


def test_tokens_are_unique_and_fit_into_a_header(path):
    made = {make(path, f"t{number}") for number in range(50)}
    assert len(made) == 50
    assert all(token.isascii() and token.isprintable() and " " not in token for token in made)


def test_tokens_created_concurrently_are_all_kept(path):
    def work(number):
        make(path, f"kept{number}")
        make(path, f"revoked{number}")
        revoke_token(path, f"revoked{number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.name for entry in read_entries(path)) == [f"kept{n}" for n in range(8)]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, "a\n", "é"])
def test_token_names_are_restricted(path, name):
    with pytest.raises(ConfigurationError):
        make(path, name)
    assert not path.exists()


def test_a_name_is_unique_until_its_token_is_revoked(path):
    first = make(path, "a")
    with pytest.raises(ConfigurationError, match="revoke"):
        make(path, "a")
    revoke_token(path, "a")
    second = make(path, "a")
    file = opened(path)
    assert file.grant_of(first) is None
    assert file.grant_of(second) is not None


def test_beyond_the_limit_of_tokens_nothing_is_changed(path, monkeypatch):
    monkeypatch.setattr(tokens, "MAX_TOKENS", 1)
    make(path, "a")
    before = path.read_bytes()
    for refused in (lambda: make(path, "b"), lambda: revoke_token(path, "b")):
        with pytest.raises(ConfigurationError):
            refused()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document | {"format_version": 2},
        lambda document: document | {"more": 1},
        lambda document: document["tokens"][0].update(scopes=["root"]) or document,
        lambda document: document["tokens"],
    ],
)
def test_an_invalid_tokens_file_is_refused_by_name_and_grants_nothing(path, change):
    token = make(path, "a")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ConfigurationError, match=r"tokens\.json"):
        read_entries(path)
    file = opened(path)
    assert file.required
    assert file.grant_of(token) is None


@pytest.mark.parametrize("name", ["", ".", "folder"])
def test_a_folder_is_no_tokens_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match="is a folder"):
        revoke_token(Path(name), "a")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_missing_tokens_file_requires_tokens_only_if_configured(path):
    assert not opened(path).required
    file = opened(path, required=True)
    assert file.required
    token = make(path, "a")
    asyncio.run(file.refresh())
    assert file.grant_of(token) is not None


def test_a_transient_read_error_of_the_tokens_file_is_retried(path):
    token = make(path, "a")
    file = opened(path)
    other = make(path, "b")

    async def refresh_without_descriptors():
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            await file.refresh()
            await file.refresh()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    asyncio.run(refresh_without_descriptors())
    assert file.grant_of(token) is None
    asyncio.run(file.refresh())
    assert file.grant_of(token) is not None
    assert file.grant_of(other) is not None


def test_the_file_counts_as_changed_until_its_tokens_are_known(path):
    """Else a request that comes meanwhile is judged by the tokens of before."""
    make(path, "a")
    file = opened(path)
    other = make(path, "b")
    seen_while_read = []

    class Watched(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            seen_while_read.append((file.is_changed(), file.grant_of(other)))
            return super().submit(*args, **kwargs)

    with Watched(1) as threads:
        asyncio.run(file.refresh(threads))
    assert len(seen_while_read) > 2  # stat, open, read, close
    assert set(seen_while_read) == {(True, None)}
    assert file.grant_of(other) is not None
    assert not file.is_changed()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_files_created_by_root_get_the_owner_of_their_folder(tmp_path):
    """And the folders, if the broker was never started."""
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 4711, 4712)
    make(data / "tierlog" / "own" / "tokens.json", "a")
    made = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in data.rglob("*")}
    names = ("tierlog", "own", "tokens.json", "tokens.json.lock", "tokens.json.scram")
    assert made == dict.fromkeys(names, (4711, 4712))
