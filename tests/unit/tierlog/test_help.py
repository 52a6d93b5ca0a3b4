"""Help in a terminal of the usual width."""

import pytest

from tierlog.cli.program import COMMANDS, load_command, run

WIDTH = 80


def commands():
    for name in COMMANDS:
        command = load_command(name)
        for part in getattr(command, "commands", {}).values():
            yield pytest.param([name, part.name], part, id=f"{name}-{part.name}")
        if not hasattr(command, "commands"):
            yield pytest.param([name], command, id=name)


def typed(parameter):
    """What of an option is typed as it stands."""
    yield from (one for one in parameter.opts if one.startswith("-"))
    yield from parameter.secondary_opts
    if parameter.envvar and parameter.show_envvar:
        yield parameter.envvar


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_nothing_that_is_typed_is_cut_or_broken(path, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "…" not in shown.replace("s3://…", "").replace("file:///…", "")
    for parameter in command.params:
        for word in typed(parameter):
            assert word in shown


def test_a_choice_is_not_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run(["consume", "--help"]) == 0
    assert "<read_uncommitted|read_committed>" in capsys.readouterr().out
