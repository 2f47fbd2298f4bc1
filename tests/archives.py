"""Tars that tests of shards share."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["write"]


def write(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    """A tar at `path` with `files`, each a name and its content."""
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path
