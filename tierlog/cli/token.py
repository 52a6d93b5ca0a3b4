"""`tierlog token`: who may call a broker. Works on the broker's tokens file, not through its API.

A running broker watches the file: changes take effect immediately.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.cli.options import OutputOption, setting_option
from tierlog.cli.output import Output, format_time, note, print_json, write
from tierlog.host.clock import wall_clock_ms

if TYPE_CHECKING:
    from tierlog.api.serving.tokens import TokenEntry

app = typer.Typer(
    help="Create, list and revoke tokens. With a tokens file, every call requires a token.",
    no_args_is_help=True,
    add_completion=False,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The token's name.")]
DataDir = Annotated[Path | None, setting_option("data.dir", help="The broker's data folder.")]
TokensFile = Annotated[
    Path | None,
    setting_option(
        "tokens.file",
        help="The broker's tokens.file; by default tierlog/tokens.json in its data folder.",
    ),
]


@app.command("create")
def create(
    name: Name,
    *,
    scope: Annotated[
        list[str],
        typer.Option(
            "--scope",
            metavar="read|produce|admin|cluster",
            help="Permission; may be repeated. admin includes the others; cluster is for what the "
            "brokers of a cluster ask of each other.",
        ),
    ],
    topics: Annotated[
        str, typer.Option(metavar="PREFIX", help="Only topics with this prefix.")
    ] = "",
    data_dir: DataDir = None,
    tokens_file: TokensFile = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Create a token and print it, once: only its hash is stored."""
    from tierlog.api.serving.grants import Scope
    from tierlog.api.serving.tokens import create_token

    unknown = [one for one in scope if one not in list(Scope)]
    if unknown:
        raise typer.BadParameter(
            f"a scope must be read, produce, admin or cluster, not {unknown[0]!r}"
        )
    scopes = tuple(Scope(one) for one in scope)
    path = _path(data_dir, tokens_file)
    if data_dir is not None and not data_dir.exists():
        note(f"{data_dir} does not exist, and is created; a broker may be started on it")
    now_ms = wall_clock_ms()
    token = create_token(path, name, scopes=scopes, topics=topics, now_ms=now_ms)
    if output.is_json:
        print_json({"name": name, "token": token, "scopes": scopes, "topics": topics or None})
        return
    write(token.encode() + b"\n")
    note(f"created {name} in {path}; the token cannot be shown again")


@app.command("list")
def list_tokens(
    data_dir: DataDir = None,
    tokens_file: TokensFile = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """List the tokens' names, scopes and topics, not the tokens themselves."""
    from tierlog.api.serving.tokens import read_entries

    path = _path(data_dir, tokens_file)
    _check_folder(data_dir)
    entries = read_entries(path) if path.exists() else ()
    rows = [
        (one.name, ", ".join(one.scopes), one.topics or "all", format_time(one.created_ms))
        for one in entries
    ]
    document = {"tokens": [_to_json(entry) for entry in entries]}
    output.table(document, ("name", "scopes", "topics", "created"), rows)


@app.command("revoke")
def revoke(
    name: Name,
    data_dir: DataDir = None,
    tokens_file: TokensFile = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Revoke a token. The broker refuses it from the next request on."""
    from tierlog.api.serving.tokens import revoke_token

    path = _path(data_dir, tokens_file)
    _check_folder(data_dir)
    revoke_token(path, name)
    output.report({"revoked": name}, f"revoked {name}")


def _path(data_dir: Path | None, tokens_file: Path | None) -> Path:
    if tokens_file is not None:
        return tokens_file
    if data_dir is None:
        raise typer.BadParameter("give the broker's --data-dir DIR, or --tokens-file FILE")
    return data_dir / "tierlog" / "tokens.json"


def _check_folder(data_dir: Path | None) -> None:
    if data_dir is not None and not data_dir.exists():
        raise typer.BadParameter(f"data folder {data_dir} does not exist")


def _to_json(entry: TokenEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "scopes": entry.scopes,
        "topics": entry.topics or None,
        "created_ms": entry.created_ms,
    }
