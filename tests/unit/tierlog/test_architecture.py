"""The pages name files that there are; docs/architecture.md also functions, arrows, and how
many files a walk crosses.
"""

import ast
import re
from itertools import chain

from tests.fakes.architecture_page import PAGE, ROOT, WALK, functions_in

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"))
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
# A longer walk is a decision: what it is for goes into the commit that raises its number.
FILES_MAX = {
    "Kafka produce": 9,
    "Kafka fetch": 6,
    "Produce": 15,
    "Hot fetch": 13,
    "Cold fetch": 17,
    "Roll to manifest": 20,
    "Replicate": 10,
    "Hand over": 11,
    "Spark split to Arrow": 16,
}
PATH = re.compile(r"`([a-z_]+/[\w./]*)`")


def test_each_file_that_a_page_names_exists():
    for page in PAGES:
        named = [path for path in PATH.findall(page.read_text()) if is_ours(path)]
        assert [(page.name, path) for path in named if not (ROOT / path).exists()] == []


def test_each_function_stands_in_the_file_that_is_named_with_it():
    named = functions_in(PAGE)
    assert [(file, name) for file, name in named if name not in defined(file)] == []


def test_a_walk_says_how_many_files_it_crosses_and_grows_no_longer_by_chance():
    for title, text in WALK.findall(PAGE):
        stated = int(re.search(r"(\d+) files", text)[1])
        files = set(re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.M))
        assert (title, stated) == (title, len(files))
        assert (title, stated) <= (title, FILES_MAX[title])


def test_the_drawing_has_the_arrows_that_the_imports_have():
    edges = re.findall(r"^ {4}(\w+)(?:\[.+?\])? --> (\w+)", PAGE, re.M)
    drawn = {room: set(reachable(room, edges)) for room in chain.from_iterable(edges)}
    found = imports()
    assert {edge for edge in edges if edge not in found} == set(), "nothing imports this way"
    assert {(one, other) for one, other in found if other not in drawn[one]} == set()


def is_ours(path: str) -> bool:
    """Not a file below a data folder's `tierlog/`."""
    folder, _, rest = path.partition("/")
    return folder in FOLDERS and (folder != "tierlog" or rest.endswith(".py"))


def defined(file: str) -> set[str]:
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        names |= set(names_of(node))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for child in node.body for name in names_of(child)}
    return names


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def reachable(room: str, edges: list[tuple[str, str]]) -> set[str]:
    below = {other for one, other in edges if one == room}
    return below.union(*(reachable(other, edges) for other in below))


def imports() -> set[tuple[str, str]]:
    """Which room imports which; `tierlog` is all of its folder but the client."""
    rooms = [path for path in (ROOT / "tierlog").iterdir() if path.is_symlink()]
    rooms += [ROOT / "tierlog", ROOT / "pyspark_tierlog"]
    names = {path.name for path in rooms} | {"client"}
    found = set()
    for folder in rooms:
        for file in folder.resolve().rglob("*.py"):
            room = "client" if file.is_relative_to(ROOT / "tierlog" / "client") else folder.name
            for module in re.findall(r"^\s*(?:from|import) ([\w.]+)", file.read_text(), re.M):
                package, _, rest = module.partition(".")
                other = rest.split(".")[0] if package == "tierlog" else package
                if package == "tierlog" and other not in names:
                    other = "tierlog" if rest else ""  # the package itself is lazy
                if other in names and other != room:
                    found.add((room, other))
    return found
