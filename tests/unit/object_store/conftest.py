import pytest

from tests.fakes.faulty_object_store import FaultyObjectStore
from tierlog.object_store.memory import MemoryStore


@pytest.fixture
def store():
    return FaultyObjectStore(MemoryStore())


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    """AWS's credential chain finds nothing."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
