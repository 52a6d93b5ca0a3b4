import inspect
from dataclasses import dataclass

import pytest

from tierlog.cli.options import takes, with_group


@dataclass(frozen=True, kw_only=True)
class Location:
    store: str
    region: str | None = None


def test_a_groups_fields_follow_the_commands_own_options() -> None:
    @takes(Location)
    def command(location: Location, topic: str, *, apply: bool = False) -> None:
        raise AssertionError(f"{location} {topic} {apply}")

    assert str(inspect.signature(command)) == (
        "(*, topic: str, apply: bool = False, store: str, region: str | None = None)"
    )
    with pytest.raises(AssertionError, match=r"Location\(store='s', region='r'\) t True"):
        command(topic="t", store="s", region="r", apply=True)


def test_a_group_can_be_converted_to_a_commands_argument() -> None:
    seen = []

    def command(url: "KnownToTypeCheckers", topic: str) -> None:  # noqa: F821
        seen.append((url, topic))

    wrapped = with_group(
        command, Location, lambda location, rest: rest(f"{location.store}/{location.region}")
    )
    wrapped(topic="t", store="s", region=None)
    assert seen == [("s/None", "t")]
