"""The loaders that are compared, each a recipe in a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from benchmarks import _peers
from benchmarks._feeds import Feed, Setup, Waits
from benchmarks._shards import endless
from streamloader import StreamLoader, on

__all__ = ["RECIPES"]


def _plain(setup: Setup) -> Feed:
    """DataLoader, `.to(device)`, transform: what most scripts do."""
    return _moving(setup, pinned=False)


def _pinned(setup: Setup) -> Feed:
    """DataLoader with pin_memory, `.to(device, non_blocking=True)`, transform."""
    return _moving(setup, pinned=setup.pins)


def _moving(setup: Setup, *, pinned: bool) -> Feed:
    batches = _moved(setup, setup.source(pin_memory=pinned), non_blocking=pinned)
    return Feed(batches, setup.in_workers, batches.close)


def _moved(setup: Setup, loader: Any, *, non_blocking: bool) -> Any:
    for images, labels in endless(loader):
        images = images.to(setup.device, non_blocking=non_blocking)  # noqa: PLW2901  # as in scripts
        labels = labels.to(setup.device, non_blocking=non_blocking)  # noqa: PLW2901
        images = setup.transform(images)  # noqa: PLW2901
        yield images, labels


def _stream(setup: Setup) -> Feed:
    """StreamLoader around a DataLoader that does not pin; it is iterated anew every epoch."""
    return _streaming(setup, shared_memory=True)


def _unshared(setup: Setup) -> Feed:
    """The same, but batches come out of workers as torch sends them."""
    return _streaming(setup, shared_memory=False)


def _streaming(setup: Setup, *, shared_memory: bool) -> Feed:
    loader: StreamLoader[Any] = StreamLoader(
        setup.source(pin_memory=False),
        setup.device,
        transform=on(0, setup.transform),
        prefetch_batches=setup.prefetch_batches,
        shared_memory=shared_memory,
    )

    def waits() -> Waits:
        total = loader.stats.total
        return total.source_seconds, total.device_seconds

    ahead = setup.prefetch_batches + 2  # those launched, those packed
    return Feed(endless(loader), setup.in_workers + ahead, loader.close, waits)


def _alone(setup: Setup) -> Feed:
    """The DataLoader, drained as fast as it goes: no copy, no step. What the workers can give."""
    batches: Any = endless(setup.source(pin_memory=False))
    return Feed(batches, setup.in_workers, batches.close, trains=False)


def _ceiling(setup: Setup) -> Feed:
    """The bare step, always on the same batch."""
    return Feed(itertools.repeat(setup.resident), 0, lambda: None)


RECIPES: dict[str, Callable[[Setup], Feed]] = {
    "plain": _plain,
    "pinned": _pinned,
    "stream": _stream,
    "unshared": _unshared,
    "timm": _peers.timm,
    "torchtnt": _peers.torchtnt,
    "alone": _alone,
    "ceiling": _ceiling,
}
