"""`tierlog spark-zip`: tierlog's code as one file, for `spark-submit --py-files`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def spark_zip(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The zip to write.")] = Path(
        "tierlog.zip"
    ),
) -> None:
    """Write the code that executors import as one zip, without its dependencies."""
    from tierlog.spark_reader.jobs.package import build_zip

    typer.echo(build_zip(file))
