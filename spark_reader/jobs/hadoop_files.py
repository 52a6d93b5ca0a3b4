"""Access to a folder through Hadoop's file systems: `file:`, `s3a:`, `hdfs:` or any other.

* Goes through the JVM, so that a job's state is stored beside its rows, with the same credentials.
* A file is written under a temporary name and renamed, so that readers never see half of it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierlog.spark_reader.workarounds import hadoop_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class HadoopFolder:
    """One folder and its contents; names are relative to it."""

    def __init__(self, session: SparkSession, url: str) -> None:
        hadoop = hadoop_of(session)
        assert hadoop is not None, "jobs run in a session with a JVM"
        self._path_class: Any = hadoop.jvm.org.apache.hadoop.fs.Path
        self._root = self._path_class(url)
        self._files = self._root.getFileSystem(hadoop.conf)

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk of this machine, or mounted there."""
        return str(self._files.getScheme()) == "file"

    def url(self, name: str = "") -> str:
        return str(self._files.makeQualified(self._path(name)).toString())

    def exists(self, name: str = "") -> bool:
        return bool(self._files.exists(self._path(name)))

    def names(self, name: str = "") -> list[str]:
        """The names directly in a folder, sorted; empty if it does not exist."""
        if not self.exists(name):
            return []
        return sorted(one.getPath().getName() for one in self._files.listStatus(self._path(name)))

    def walk(self, name: str) -> list[str]:
        """Every file below `name`, relative to it, sorted."""
        found: list[str] = []
        for one in self._files.listStatus(self._path(name)):
            child = one.getPath().getName()
            if one.isDirectory():
                found += [f"{child}/{below}" for below in self.walk(f"{name}/{child}")]
            else:
                found.append(child)
        return sorted(found)

    def read_text(self, name: str) -> str:
        stream = self._files.open(self._path(name))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold a file that nobody else then can: on a disk of this machine by a lock that ends with
        the process, elsewhere by creating the file, which is deleted afterwards. Raises
        FileExistsError, with its URL.
        """
        path = self._path(name)
        if self.is_local:
            self._files.mkdirs(path.getParent())
            with Path(self._files.makeQualified(path).toUri().getPath()).open("ab") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise FileExistsError(self.url(name)) from error
                yield
            return
        if not self._files.createNewFile(path):
            raise FileExistsError(f"{self.url(name)}; if it was killed, delete this file")
        try:
            yield
        finally:
            self._files.delete(path, False)

    def write_text(self, name: str, text: str) -> None:
        writing = f"{name}.writing"
        stream = self._files.create(self._path(writing), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self.move(writing, name)

    def move(self, name: str, to: str) -> None:
        """Rename a file, replacing an existing one.

        An interrupted move can be repeated, even if a rename is a copy and a delete.
        """
        source, target = self._path(name), self._path(to)
        self._files.mkdirs(target.getParent())
        if self._files.exists(target):
            self._files.delete(target, False)
        if not self._files.rename(source, target):
            raise OSError(f"could not rename {self.url(name)} to {self.url(to)}")

    def delete(self, name: str) -> None:
        self._files.delete(self._path(name), True)

    def _path(self, name: str) -> Any:
        if not name:
            return self._root
        return self._path_class(self._root, name)
