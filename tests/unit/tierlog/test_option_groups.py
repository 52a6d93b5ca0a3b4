import inspect
from dataclasses import dataclass

import pytest

from tierlog.cli.option_groups import takes, with_group


@dataclass(frozen=True, kw_only=True)
class Place:
    store: str
    region: str | None = None


def test_a_groups_fields_stand_behind_the_commands_own_options() -> None:
    @takes(Place)
    def command(place: Place, topic: str, *, apply: bool = False) -> None:
        raise AssertionError(f"{place} {topic} {apply}")

    assert str(inspect.signature(command)) == (
        "(*, topic: str, apply: bool = False, store: str, region: str | None = None)"
    )
    with pytest.raises(AssertionError, match=r"Place\(store='s', region='r'\) t True"):
        command(topic="t", store="s", region="r", apply=True)


def test_what_a_command_takes_may_be_made_of_the_group() -> None:
    seen = []

    def command(url: "KnownToTypeCheckers", topic: str) -> None:  # noqa: F821
        seen.append((url, topic))

    made = with_group(command, Place, lambda place, rest: rest(f"{place.store}/{place.region}"))
    made(topic="t", store="s", region=None)
    assert seen == [("s/None", "t")]
