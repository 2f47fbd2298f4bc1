"""The other launch thread: the loader thread launches what it has packed, for comparison only.

python -m benchmarks.launch_thread --loaders stream,thread ...     as imagenet_shards.py
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from typing_extensions import override

from benchmarks._loaders import RECIPES, Feed, Setup
from benchmarks.imagenet_shards import main
from streamloader import loader as loader_module
from streamloader.batch import Batch
from streamloader.device import POLL_SECONDS
from streamloader.epoch import Epoch
from streamloader.source import End


class ThreadEpoch(Epoch):
    """An `Epoch` whose loader thread waits for the ask, launches, and takes slabs back."""

    def __init__(self, iterator: Iterator[Any], first: list[Any], **legs: Any) -> None:
        self._packer = legs["pack"]
        self._packer.take = self._take
        super().__init__(iterator, first, **(legs | {"pack": self._pack_and_launch}))

    def _take(self, nbytes: int, until: Callable[[], bool]) -> Tensor | None:
        while not until():
            with self.slabs.changed:
                self.slabs._wanted = nbytes  # noqa: SLF001
            self.slabs.serve()
            with self.slabs.changed:
                self.slabs._wanted = None  # noqa: SLF001
                if (place := self.slabs._best(nbytes)) is not None:  # noqa: SLF001
                    return self.slabs._free.pop(place)  # noqa: SLF001
            time.sleep(POLL_SECONDS)
        return None

    def _pack_and_launch(self, number: int, value: Any, closed: Callable[[], bool]) -> Batch | None:
        batch: Batch | None = self._packer(number, value, closed)
        while batch is not None and not self._admitted(batch):
            if closed():
                return None
            time.sleep(POLL_SECONDS)
        if batch is not None:
            self._launch(batch)
        return batch

    @override
    def _due(self) -> Batch | End:
        while (item := self.source.take(lambda _: True)) is None:
            seconds = self.source.wait(lambda: self.source.peek() is not None, None)
            self._meter.waited(source=seconds)
        return item if isinstance(item, End) else self._launched.popleft()


@contextmanager
def in_loader_thread() -> Iterator[None]:
    """Passes that start in here launch in the loader thread."""
    vars(loader_module)["Epoch"] = ThreadEpoch
    try:
        yield
    finally:
        vars(loader_module)["Epoch"] = Epoch


def _in_thread(setup: Setup) -> Feed:
    """StreamLoader as it is, but for the thread that launches."""
    with in_loader_thread():
        feed = RECIPES["stream"](setup)
        first = next(feed.batches)
    return dataclasses.replace(feed, batches=itertools.chain([first], feed.batches))


if __name__ == "__main__":
    RECIPES["thread"] = _in_thread
    main()
