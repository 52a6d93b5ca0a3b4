"""`tierlog dump`: a log's files, in the format of kafka-dump-log.

* An object of the bucket is downloaded whole into a temporary folder, and read as a local file.
* An `.indexes` bundle is unpacked into the files from which it was made, named after the bundle.
  Its producer snapshot is of the END of the segment; Kafka's `.snapshot` of that name is of its
  start.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from tierlog.cli.dump_checks import find_problems
from tierlog.cli.dump_formats import to_json_line, to_text
from tierlog.cli.dump_reader import UnknownFileKind, kind_of, read_items
from tierlog.cli.options import BucketOptions, EndpointOption, RegionOption
from tierlog.cli.output import FOUND_PROBLEMS, Output, for_stdout, note, print_json, write

if TYPE_CHECKING:
    from tierlog.object_store.store import ObjectStore

BUNDLE: Final = ".indexes"
PART_BYTES: Final = 8 * 1024 * 1024


class Source(NamedTuple):
    """A file to read, and the name under which it is reported."""

    file: Path
    name: str


def dump(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Segment files, checkpoints, a partition's folder, or URLs of objects.",
        ),
    ],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Print only problems; exit 3 if there are any.")
    ] = False,
    records: Annotated[
        bool, typer.Option("--records/--batches-only", help="Print each record, or only batches.")
    ] = True,
    data: Annotated[
        bool, typer.Option("--print-data-log", help="Also print keys and values, as text.")
    ] = False,
    output: Annotated[
        Output, typer.Option(metavar="FORM", help="text, or json: one object per line.")
    ] = Output.TEXT,
    s3_endpoint: EndpointOption = None,
    s3_region: RegionOption = None,
) -> None:
    """Print the contents of a log's files, as kafka-dump-log does, or verify them."""
    fetch = partial(_fetch, endpoint=s3_endpoint, region=s3_region, with_log=verify)
    with ExitStack() as stack:
        sources = [one for argument in files for one in _sources(argument, fetch, stack)]
        for file, _ in sources:
            if not file.exists():
                raise FileNotFoundError(2, "no such file", str(file))
            kind_of(file)
        if verify:
            raise typer.Exit(_verify(sources, as_json=output is Output.JSON))
        for source in sources:
            _print(source, records=records, data=data, as_json=output is Output.JSON)


def _is_url(name: str) -> bool:
    return "://" in name


def _fetch(
    name: str, folder: Path, *, endpoint: str | None, region: str | None, with_log: bool
) -> list[Path]:
    """Download an object in the bucket, or unpack a local `.indexes` bundle; return the files."""
    if _is_url(name):
        url, _, key = name.rpartition("/")
        with BucketOptions(store=url, endpoint=endpoint, region=region).opened() as store:
            return _download(store, key, folder, with_log=with_log)
    bundle = Path(name)
    log = bundle.with_suffix(".log")
    if log.exists():
        (folder / log.name).symlink_to(log.absolute())
    return _unpack(bundle, folder)


def _download(store: ObjectStore, name: str, folder: Path, *, with_log: bool) -> list[Path]:
    """The files of an object; `with_log`: a bundle's segment too.

    Raises FileNotFoundError, StoreUnavailable, CorruptObject.
    """
    file = _download_object(store, name, folder)
    if not name.endswith(BUNDLE):
        return [file]
    if with_log:
        _download_object(store, name.removesuffix(BUNDLE) + ".log", folder)
    return _unpack(file, folder)


def _download_object(store: ObjectStore, key: str, folder: Path) -> Path:
    from tierlog.cold_tier.ranged_reader import read_range

    stat = store.head(key)
    if stat is None:
        raise FileNotFoundError(errno.ENOENT, "no such object", f"{store.url}/{key}")
    file = folder / key
    with file.open("wb") as out:
        for start in range(0, stat.size_bytes, PART_BYTES):
            out.write(read_range(store, key, start, min(start + PART_BYTES, stat.size_bytes)))
    return file


def _unpack(bundle: Path, folder: Path) -> list[Path]:
    """Raises CorruptObject."""
    from tierlog.cold_tier.index_bundle import parse_bundle

    parts = parse_bundle(bundle.read_bytes(), file=bundle.name)
    files = {".index": parts.offset_index, ".timeindex": parts.time_index}
    # Kafka omits these two if they are empty.
    if parts.txn_index:
        files[".txnindex"] = parts.txn_index
    if parts.producer_snapshot:
        files[".snapshot"] = parts.producer_snapshot
    stem = bundle.name.removesuffix(BUNDLE)
    for suffix, content in files.items():
        (folder / f"{stem}{suffix}").write_bytes(content)
    return [folder / f"{stem}{suffix}" for suffix in files]


def _sources(
    argument: str, fetch: Callable[[str, Path], list[Path]], stack: ExitStack
) -> list[Source]:
    """The files of an argument; those of an object are named by its URL, not their local copy."""
    if _is_url(argument) or argument.endswith(BUNDLE):
        copies = Path(stack.enter_context(TemporaryDirectory(prefix="tierlog-dump-")))
        parent = argument.rpartition("/")[0]
        prefix = f"{parent}/" if parent else ""
        return [Source(file, f"{prefix}{file.name}") for file in fetch(argument, copies)]
    path = Path(argument)
    return [Source(file, str(file)) for file in (_known_files(path) if path.is_dir() else [path])]


def _known_files(path: Path) -> list[Path]:
    """A folder's log files, without those that are marked `.deleted`.

    Raises FileNotFoundError if it has none, such as a data folder.
    """
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
        near = f"; the folder of a partition is {inside}" if inside else ""
        raise FileNotFoundError(2, f"has no log files{near}", str(path))
    return known


def _print(source: Source, *, records: bool, data: bool, as_json: bool) -> None:
    safe = for_stdout()
    for item in read_items(source.file, with_records=records):
        if as_json:
            line = to_json_line(source.name, item, with_data=data)
        else:
            line = to_text(item, with_data=data).encode() + b"\n"
        write(safe(line))


def _verify(files: list[Source], *, as_json: bool) -> int:
    problems = [
        {"file": name, "detail": problem.detail}
        for file, name in files
        for problem in find_problems(file)
    ]
    if as_json:
        print_json({"ok": not problems, "files": len(files), "problems": problems})
    else:
        for problem in problems:
            sys.stdout.write(f"{problem['file']}: {problem['detail']}\n")
        note(f"{len(files)} files, {len(problems)} problems")
    return FOUND_PROBLEMS if problems else 0
