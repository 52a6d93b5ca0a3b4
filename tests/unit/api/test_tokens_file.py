import json
import os
import resource
import threading

import pytest

from api.http.access import tokens
from api.http.access.grants import Grant, Scope
from api.http.access.tokens import TokensFile, create_token, read_entries, revoke_token
from record_format.errors import ConfigurationError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "tokens.json"


def make(path, name, *scopes, topics=""):
    return create_token(path, name, scopes=scopes or (Scope.READ,), topics=topics, now_ms=7)


def test_a_token_grants_what_it_was_made_for(path):
    token = make(path, "a", Scope.READ, Scope.PRODUCE, Scope.READ, topics="orders.")
    file = TokensFile(path, required=False)
    assert file.required
    assert file.grant_of(token) == Grant("a", frozenset((Scope.READ, Scope.PRODUCE)), "orders.")
    assert file.grant_of(token[:-1]) is None
    assert file.grant_of("") is None
    (entry,) = read_entries(path)
    assert (entry.scopes, entry.created_ms) == ((Scope.READ, Scope.PRODUCE), 7)


def test_tokens_are_never_alike_and_fit_a_header(path):
    made = {make(path, f"t{number}") for number in range(50)}
    assert len(made) == 50
    assert all(token.isascii() and token.isprintable() and " " not in token for token in made)


def test_makers_at_the_same_time_do_not_lose_each_others_tokens(path):
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
def test_names_are_plain(path, name):
    with pytest.raises(ConfigurationError):
        make(path, name)
    assert not path.exists()


def test_a_name_is_used_once_and_free_again_when_revoked(path):
    first = make(path, "a")
    with pytest.raises(ConfigurationError, match="revoke"):
        make(path, "a")
    revoke_token(path, "a")
    second = make(path, "a")
    file = TokensFile(path, required=False)
    assert file.grant_of(first) is None
    assert file.grant_of(second) is not None


def test_there_is_a_limit_and_a_refusal_changes_nothing(path, monkeypatch):
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
def test_a_file_of_another_form_is_refused_by_name_and_lets_nobody_in(path, change):
    token = make(path, "a")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ConfigurationError, match=r"tokens\.json"):
        read_entries(path)
    file = TokensFile(path, required=False)
    assert file.required
    assert file.grant_of(token) is None


def test_a_file_that_was_never_there_is_asked_for_only_when_told(path):
    assert not TokensFile(path, required=False).required
    file = TokensFile(path, required=True)
    assert file.required
    token = make(path, "a")
    file.refresh()
    assert file.grant_of(token) is not None


def test_a_file_that_could_not_be_read_for_a_moment_is_read_at_the_next_look(path):
    token = make(path, "a")
    file = TokensFile(path, required=False)
    other = make(path, "b")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        file.refresh()
        file.refresh()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert file.grant_of(token) is None
    file.refresh()
    assert file.grant_of(token) is not None
    assert file.grant_of(other) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_what_root_makes_belongs_to_whom_the_folder_does(tmp_path):
    """Also the folders, where the broker has yet to be started."""
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 4711, 4712)
    make(data / "tierlog" / "own" / "tokens.json", "a")
    made = {one.name: (one.stat().st_uid, one.stat().st_gid) for one in data.rglob("*")}
    names = ("tierlog", "own", "tokens.json", "tokens.json.lock")
    assert made == dict.fromkeys(names, (4711, 4712))
