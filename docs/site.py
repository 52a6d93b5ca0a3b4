"""Build the documentation site: `make docs`, into .cache/site/html.

    python docs/site.py

The pages are those that the repository has, at the same places, so that a link works on a code
host, in an editor and here. A page that is in no section stops the build, and so does a link to
nothing: Zensical checks pages and headings, this file what it does not look at. Nothing may come
from another host when a page is viewed, so a page's flowchart is drawn here, not by the browser.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
flowchart = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["flowchart"]
BUILD = ROOT / ".cache" / "site"
SOURCES = ("docs/**/*", "*.md", "bench/README.md", "localstack/README.md")
EXAMPLES = ("examples/README.md", "examples/*/*")
NO_PAGES = {".py", ".pyc", ".toml"}

# A section takes the pages named, in this order, and then what its pattern matches.
SECTIONS = {
    "Home": ["README.md"],
    "Start": ["docs/guides/tour.md", "docs/concepts.md", "docs/comparison.md", "docs/glossary.md"],
    "Use": [
        "docs/reference/commands.md",
        "docs/reference/http.md",
        "docs/guides/python-client.md",
        "docs/guides/read-with-python.md",
        "docs/guides/sql.md",
        "docs/guides/tables.md",
        "docs/guides/schemas.md",
        "docs/spark.md",
        "docs/guides/kafka-clients.md",
        "docs/guides/coming-from-kafka.md",
        "docs/guides/from-kafka-source.md",
    ],
    "Examples": ["examples/README.md", "examples/*/README.md"],
    "Operate": [
        "docs/guides/running.md",
        "docs/guides/console.md",
        "docs/guides/containers.md",
        "docs/guides/kubernetes.md",
        "docs/guides/one-broker-on-kubernetes.md",
        "docs/guides/several-brokers.md",
        "docs/guides/sizing.md",
        "docs/guides/keeping-records.md",
        "docs/guides/upgrading.md",
        "docs/security.md",
        "docs/guides/verify.md",
        "docs/guides/restore.md",
        "docs/guides/disaster-drill.md",
        "docs/guides/adopt-a-kafka-folder.md",
        "docs/grafana/README.md",
        "docs/guides/*",
    ],
    "Reference": ["docs/reference/*", "docs/formats/*"],
    "Inside": [
        "docs/reliability.md",
        "docs/architecture.md",
        "docs/cluster.md",
        "docs/figures.md",
        "bench/README.md",
        "localstack/README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "*.md",
        "docs/*.md",
    ],
    "Decisions": ["docs/decisions/README.md", "docs/decisions/*"],
}
MERMAID = re.compile(r"^```mermaid\n.*?^```\n", re.M | re.S)
FOREIGN = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^ >]*")
LINK = re.compile(r"(\]\()([^)#\s]+)")


def main() -> int:
    pages = BUILD / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for path in sources():
        copied = pages / path
        copied.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = as_page((ROOT / path).read_text(), path)
            if chart := MERMAID.search(text):
                drawn = copied.with_suffix(".svg")
                drawn.write_text(flowchart(chart[0]))
                text = text.replace(chart[0], f"![the same as a drawing]({drawn.name})\n")
            copied.write_text(text)
        else:
            shutil.copy(ROOT / path, copied)
    (pages / "README.md").rename(pages / "index.md")
    settings = (ROOT / "docs" / "zensical.toml").read_text()
    (BUILD / "zensical.toml").write_text(settings.replace("nav = []", f"nav = {navigation()}"))
    command = [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict"]
    subprocess.run([*command, "-f", BUILD / "zensical.toml"], check=True)  # noqa: S603
    for built in (BUILD / "html").rglob("*.html"):
        if found := FOREIGN.search(built.read_text()):
            raise SystemExit(f"{built}: {found[0]} comes from another host")
    return 0


def sources() -> list[Path]:
    """What the site is made of, relative to the repository."""
    found = {
        path for pattern in (*SOURCES, *EXAMPLES) for path in ROOT.glob(pattern) if path.is_file()
    }
    return sorted(path.relative_to(ROOT) for path in found if path.suffix not in NO_PAGES)


def navigation() -> str:
    """The sections as a TOML value."""
    sections = ", ".join(
        f'{{ "{title}" = [{", ".join(repr(as_url(page)) for page in pages)}] }}'
        for title, pages in sections_with_pages()
    )
    return f"[{sections}]"


def sections_with_pages() -> Iterator[tuple[str, list[str]]]:
    """Each page once, where it is named first; a name without a page is refused."""
    left = [str(path) for path in sources() if path.suffix == ".md"]
    named = {page for patterns in SECTIONS.values() for page in patterns if "*" not in page}
    if missing := named.difference(left):
        raise SystemExit(f"docs/site.py: no such page: {', '.join(sorted(missing))}")
    for title, patterns in SECTIONS.items():
        taken = []
        for pattern in patterns:
            deep = pattern.count("/")
            found = [page for page in left if fnmatch(page, pattern) and page.count("/") == deep]
            taken += [page for page in found if page == pattern or page not in named]
            left = [page for page in left if page not in taken]
        yield title, taken
    if left:
        raise SystemExit(f"docs/site.py: in no section: {', '.join(left)}")


def as_url(page: str) -> str:
    return "index.md" if page == "README.md" else page


def as_page(text: str, path: Path) -> str:
    """Its links as the site has them: a folder is its README, files of no page are refused."""

    def link(match: re.Match[str]) -> str:
        before, target = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        found = Path(os.path.normpath(path.parent / target))
        if (ROOT / found / "README.md").exists():
            found /= "README.md"
        if found not in known:
            raise SystemExit(f"{path}: the site has no {target}")
        return before + os.path.relpath(as_url(str(found)), path.parent)

    known = set(sources())
    return LINK.sub(link, text)


if __name__ == "__main__":
    sys.exit(main())
