"""`tierlog dump`: a log's files, in the format of kafka-dump-log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer

from tierlog.cli.offline import EndpointOption, RegionOption
from tierlog.cli.output import FOUND_PROBLEMS, Output, for_stdout, note, print_json, write

app = typer.Typer(add_completion=False)


class Found(NamedTuple):
    """A file to read, and its name for the user."""

    file: Path
    shown: str


@app.command()
def dump(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Segment files, checkpoints, a partition's folder, or URLs of a bucket's objects.",
        ),
    ],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Print problems only; exit 3 if there are any.")
    ] = False,
    records: Annotated[
        bool, typer.Option("--records/--batches-only", help="Print each record, or only batches.")
    ] = True,
    data: Annotated[
        bool, typer.Option("--print-data-log", help="Print keys and values too, as text.")
    ] = False,
    output: Annotated[
        Output, typer.Option(help="text, or json: one object per line.")
    ] = Output.TEXT,
    s3_endpoint: EndpointOption = None,
    s3_region: RegionOption = None,
) -> None:
    """Print what a log's files hold, as kafka-dump-log does, or verify them."""
    from tierlog.dump.reading import kind_of

    bring = partial(_bring, endpoint=s3_endpoint, region=s3_region, with_log=verify)
    with ExitStack() as stack:
        found = [one for argument in files for one in _found(argument, bring, stack)]
        for file, _ in found:
            if not file.exists():
                raise FileNotFoundError(2, "no such file", str(file))
            kind_of(file)
        if verify:
            raise typer.Exit(_verify(found, as_json=output is Output.JSON))
        for one in found:
            _print(one, records=records, data=data, as_json=output is Output.JSON)


def _is_url(name: str) -> bool:
    return "://" in name


def _bring(
    name: str, folder: Path, *, endpoint: str | None, region: str | None, with_log: bool
) -> list[Path]:
    """The files of an object in the bucket, or of a local `.indexes` bundle."""
    from tierlog.dump import objects

    if _is_url(name):
        return objects.bring(name, folder, endpoint=endpoint, region=region, with_log=with_log)
    bundle = Path(name)
    beside = bundle.with_suffix(".log")
    if beside.exists():
        (folder / beside.name).symlink_to(beside.absolute())
    return objects.take_apart(bundle, folder)


def _found(
    argument: str, bring: Callable[[str, Path], list[Path]], stack: ExitStack
) -> list[Found]:
    """The files of an argument: an object's files are named by its key, not by their local copy."""
    if _is_url(argument) or argument.endswith(".indexes"):
        copies = Path(stack.enter_context(TemporaryDirectory(prefix="tierlog-dump-")))
        place = argument.rpartition("/")[0]
        shown = f"{place}/" if place else ""
        return [Found(file, f"{shown}{file.name}") for file in bring(argument, copies)]
    path = Path(argument)
    return [Found(file, str(file)) for file in (_known_files(path) if path.is_dir() else [path])]


def _known_files(path: Path) -> list[Path]:
    """A folder's log files, without those that are about to be unlinked.

    Raises FileNotFoundError if it has none: say, a data folder instead of a partition's.
    """
    from tierlog.dump.reading import UnknownFileKind, kind_of

    known = []
    for file in sorted(path.iterdir()):
        try:
            kind_of(file)
        except UnknownFileKind:
            continue
        if file.suffix != ".deleted":
            known.append(file)
    if not known:
        inside = next(
            (one for one in sorted(path.iterdir()) if (one / "partition.metadata").exists()), None
        )
        near = f"; a partition's folder is {inside}" if inside else ""
        raise FileNotFoundError(2, f"has no log files{near}", str(path))
    return known


def _print(found: Found, *, records: bool, data: bool, as_json: bool) -> None:
    from tierlog.dump.json_lines import to_json_line
    from tierlog.dump.reading import read_items
    from tierlog.dump.text import to_text

    safe = for_stdout()
    for item in read_items(found.file, with_records=records):
        if as_json:
            line = to_json_line(found.shown, item, with_data=data)
        else:
            line = to_text(item, with_data=data).encode() + b"\n"
        write(safe(line))


def _verify(files: list[Found], *, as_json: bool) -> int:
    problems = list(_problems(files))
    if as_json:
        print_json({"ok": not problems, "files": len(files), "problems": problems})
    else:
        for problem in problems:
            sys.stdout.write(f"{problem['file']}: {problem['detail']}\n")
        note(f"{len(files)} files, {len(problems)} problems")
    return FOUND_PROBLEMS if problems else 0


def _problems(files: list[Found]) -> Iterator[dict[str, Any]]:
    from tierlog.dump.checks import find_problems

    for file, shown in files:
        for problem in find_problems(file):
            yield {"file": shown, "detail": problem.detail}
