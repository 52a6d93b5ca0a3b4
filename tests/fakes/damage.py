"""Files that went bad."""

from pathlib import Path


def flip(path: Path, position: int) -> None:
    """One bit is another. `position` counts from the end where it is negative."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """The last byte is gone."""
    path.write_bytes(path.read_bytes()[:-1])
