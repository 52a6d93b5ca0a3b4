"""Damage to files."""

from pathlib import Path


def flip(path: Path, position: int) -> None:
    """Flip one bit. A negative `position` counts from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Remove the last byte."""
    path.write_bytes(path.read_bytes()[:-1])
