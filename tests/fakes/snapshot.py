"""A folder as it is, to show that nothing in it was changed."""

from pathlib import Path


def snapshot(root: Path) -> dict[str, tuple[bytes | None, int]]:
    """Contents and modification times of all files and folders."""
    return {
        str(path.relative_to(root)): (
            path.read_bytes() if path.is_file() else None,
            path.stat().st_mtime_ns,
        )
        for path in sorted(root.rglob("*"))
    }
