"""From one shard's URL to its samples, by webdataset, and what is used of each.

A sample's files share the part of their names before the first dot behind the last slash, its key:
`a/7.jpg` and `a/7.cls` are one sample, and `n0.1.jpg` is the file `1.jpg` of a sample `n0`.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
from collections.abc import Callable, Iterator
from typing import Any

import webdataset
from typing_extensions import override
from webdataset.tariterators import group_by_keys, tar_file_expander

__all__ = ["ShardError", "fields", "read"]


class ShardError(RuntimeError):
    """A shard that cannot be read, or a sample that cannot be used; the message names it."""


_OPENERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""What unpacks a compressed shard, by its first bytes.

Python's tarfile could, too, but takes the end of truncated data for that of the tar."""


class _Pushed:
    """A stream, some of whose bytes were read and are given back."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size, rest = len(self._head), -1
        else:
            rest = max(size - len(self._head), 0)
        head, self._head = self._head[:size], self._head[size:]
        tail: bytes = self._stream.read(rest)
        return head + tail


class _Watched:
    """A shard's bytes, unpacked, as they are read, to tell whether they end as a tar does.

    Python's tarfile takes a cut between two files, or a broken header, for the end. A tar that is
    complete ends in blocks of zeros.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._head = self._tail = b""
        self._count = 0

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        self._head = self._head or data[:512]
        self._tail = (self._tail + data[-512:])[-512:]
        self._count += len(data)
        return data

    @property
    def whole(self) -> bool:
        return self._head[257:262] != b"ustar" or not any(self._tail)

    @override
    def __repr__(self) -> str:
        return f"byte {self._count}"  # webdataset says "... @ <the stream>" in its errors


def read(url: str) -> Iterator[dict[str, Any]]:
    """The samples of one shard: `__key__`, `__url__`, and bytes by extension, in lower case.

    Raises:
        ShardError: It is missing, truncated or broken, or has two files of one name.
    """
    try:
        yield from _to_its_end(url)
    except Exception as error:
        # webdataset appends to the arguments, and so to what str() shows.
        reason = error if isinstance(error, OSError) or not error.args else error.args[0]
        raise ShardError(f"shard {url}: {reason}") from error


def _to_its_end(url: str) -> Iterator[dict[str, Any]]:
    with contextlib.closing(webdataset.gopen(url)) as raw:
        stream = _Watched(_unpacked(raw))
        samples = group_by_keys(tar_file_expander([{"url": url, "stream": stream}]))
        # One is held back: the last may lack a file for no other reason than that the shard is cut.
        held: Any = next(samples, None)
        for sample in samples:
            yield held
            held = sample
        if not stream.whole:
            raise EOFError(f"no end of archive @ {stream}: truncated, or a broken header")
        while stream.read(1 << 16):  # to the checksum of a compressed one
            pass
        if held is not None:
            yield held


def _unpacked(raw: Any) -> Any:
    head = raw.read(max(map(len, _OPENERS)))
    stream = _Pushed(head, raw)
    opened = (unpack(stream) for magic, unpack in _OPENERS.items() if head.startswith(magic))
    return next(opened, stream)


def fields(sample: dict[str, Any]) -> tuple[bytes, int]:
    """The encoded image and the label of a sample.

    Raises:
        ValueError: It lacks one; the message lists what it has. Or the label is no whole number.
    """
    names = [name for name in ("jpg", "jpeg", "png") if name in sample]
    if not names or "cls" not in sample:
        found = ", ".join(sorted(f".{name}" for name in sample if not name.startswith("__")))
        raise ValueError(f"needs .jpg (or .jpeg, .png) and .cls, has {found or 'nothing'}")
    return sample[names[0]], int(sample["cls"])
