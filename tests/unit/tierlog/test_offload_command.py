"""`tierlog storage offload` of all topics."""

from types import SimpleNamespace

from tierlog.cli.storage import _offload_all
from tierlog.record_format.errors import UnknownTopic


def test_a_topic_that_is_deleted_meanwhile_does_not_stop_the_others() -> None:
    def offload(name: str, *, wait_ms: int | None) -> str:
        if name == "deleted":
            raise UnknownTopic(name)
        return f"{name} within {wait_ms}"

    listed = [SimpleNamespace(name=name) for name in ("a", "deleted", "b")]
    client = SimpleNamespace(list_topics=lambda **_: listed, offload=offload)
    found = dict(_offload_all(client, 500))  # type: ignore[arg-type]
    assert found == {"a": "a within 500", "b": "b within 500"}
