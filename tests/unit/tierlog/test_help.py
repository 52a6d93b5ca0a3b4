"""Help texts in a terminal 80 columns wide."""

import re

import pytest

from tierlog.cli.program import COMMANDS, load_command, run_command

WIDTH = 80


def commands():
    for name in COMMANDS:
        command = load_command(name)
        for part in getattr(command, "commands", {}).values():
            yield pytest.param([name, part.name], part, id=f"{name}-{part.name}")
        if not hasattr(command, "commands"):
            yield pytest.param([name], command, id=name)


def groups():
    for name in COMMANDS:
        if getattr(load_command(name), "commands", {}):
            yield name


@pytest.mark.parametrize("name", list(groups()))
def test_a_group_says_of_each_command_a_whole_sentence(name, capsys):
    assert run_command([name, "--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert "..." not in commands
    for line in re.split(r"^  (?=\w)", commands, flags=re.MULTILINE)[1:]:
        assert line.rstrip().endswith(".")


def words_to_type(parameter):
    """The parts of an option that users type literally."""
    yield from (name for name in parameter.opts if name.startswith("-"))
    yield from parameter.secondary_opts
    if parameter.envvar and parameter.show_envvar:
        yield parameter.envvar


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_option_names_are_neither_truncated_nor_wrapped(path, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run_command([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "…" not in shown.replace("s3://…", "").replace("file:///…", "")
    for parameter in command.params:
        for word in words_to_type(parameter):
            assert word in shown


def test_the_first_page_of_help_names_every_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(name in shown for name in (*COMMANDS, "--install-completion"))


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_each_option_is_shown_once_and_without_a_type_of_python(path, command, capsys):
    assert run_command([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"<\w+>|\b(bool|int|float|str|INTEGER|BOOLEAN)\b", shown)
    _, sections = re.split(r"\n\w[\w ]*:\n", shown, maxsplit=1)
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            name = re.escape(parameter.opts[0])
            assert (
                len(re.findall(rf"^  (-\w, )?(--\S+, )?{name}\b(?!-)", sections, re.MULTILINE)) == 1
            )


def test_the_options_of_all_clients_are_in_a_section_at_the_end(capsys):
    assert run_command(["topic", "alter", "--help"]) == 0
    own, common = capsys.readouterr().out.split("\nCommon options:\n")
    assert re.findall(r"^  (\S.*?)  ", common, re.MULTILINE) == [
        "--output FORM",
        "--server URL",
        "--token-file FILE",
        "--ca-file FILE",
        "-h, --help",
    ]
    assert "--server" not in own


def test_a_flag_is_shown_without_a_type(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run_command(["topic", "delete", "--help"]) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "--yes" in one)
    assert "bool" not in line
