"""What `StreamLoader` accepts, what it warns of, and what it finds in the loader it wraps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

__all__ = [
    "advice",
    "advise",
    "dataloader",
    "draws_apart",
    "epoch_setters",
    "iterable",
    "second_pass",
    "size",
    "warn_of_seed",
    "whole",
]


def iterable(loader: Any) -> Any:
    """`loader`, if it can be iterated over.

    Raises:
        TypeError: It cannot, or is a dataset that is not in batches yet.
    """
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"loader must be an iterable of batches, got {type(loader).__name__}, a dataset: wrap "
            f"it first, as in StreamLoader(DataLoader(dataset, batch_size=...))"
        )
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise TypeError(f"loader must be an iterable of batches, got {loader!r}")
    return loader


def whole(name: str, value: Any) -> int:
    """`value`, if it is a whole number from 0.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is negative.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return value


def size(name: str, value: Any, default: Callable[[], int]) -> int:
    """Bytes: 0 for False, `default()` for True, else the number that it is.

    Raises:
        TypeError: It is neither a bool nor a whole number.
        ValueError: It is negative.
    """
    if isinstance(value, bool):
        return default() if value else 0
    if not isinstance(value, int):
        raise TypeError(f"{name} must be True, False or a number of bytes, got {value!r}")
    return whole(name, value)


def draws_apart(loader: Any) -> bool:
    """Whether pulling a batch draws nothing from this process's generators.

    Then transforms may seed and restore them while the loader thread pulls. (A sampler that draws
    from them for each batch is not noticed; torch's own draw before the first.)
    """
    if isinstance(loader, (list, tuple)):
        return True
    inner = dataloader(loader)
    return inner is not None and inner.num_workers > 0


def dataloader(loader: Any) -> DataLoader[Any] | None:
    """The `DataLoader` that `loader` is, or that a `WebLoader` begins with."""
    if type(loader).__name__ == "WebLoader":
        loader = loader.pipeline[0]
    return loader if isinstance(loader, DataLoader) else None


def epoch_setters(loader: Any) -> list[Callable[[int], None]]:
    """`set_epoch` of the loader, or else of each of its parts that has one, once."""
    own = getattr(loader, "set_epoch", None)
    if callable(own):
        return [own]
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts: list[Any] = [
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    unlike = {id(part): part for part in parts}.values()
    return [part.set_epoch for part in unlike if callable(getattr(part, "set_epoch", None))]


def second_pass(loader: object) -> str:
    """The message for a second pass over a loader that has one iterator."""
    return (
        f"a second pass over this {type(loader).__name__} cannot start while the first is live, "
        f"since both would share its one iterator: finish the first, or close() its iterator"
    )


_UNPREPARED = "prepare the DataLoader with device_placement=False"
_MOVERS = {
    "accelerate.data_loader.DataLoaderShard": _UNPREPARED,
    "accelerate.data_loader.DataLoaderDispatcher": _UNPREPARED,
    "timm.data.loader.PrefetchLoader": "build the loader with use_prefetcher=False",
    "torchtnt.utils.data.data_prefetcher.CudaDataPrefetcher": "wrap the loader that it wraps",
    "streamloader.loader.StreamLoader": "wrap the DataLoader once, with all transforms in a list",
}
"""Loaders that move batches to the device themselves, and what to do instead."""


def advise(loader: object) -> None:
    """Warns of a loader that moves batches to the device itself: nothing is left to do ahead."""
    for kind in type(loader).__mro__:
        advice = _MOVERS.get(f"{kind.__module__}.{kind.__name__}")
        idle = advice is _UNPREPARED and getattr(loader, "device", loader) is None
        if advice is not None and not idle:
            warnings.warn(
                f"{type(loader).__name__} moves batches to the device itself, before StreamLoader "
                f"can do it ahead of the step: {advice}",
                stacklevel=3,
            )
            return


def advice(error: RuntimeError) -> str | None:
    """What to add to a source's error, if anything. Torch's own advice on this one is to spawn."""
    if "CUDA in forked subprocess" not in str(error):
        return None
    return (
        "a worker cannot use the GPU that this process uses: take that code out of the dataset and "
        "collate_fn, and pass it to StreamLoader as transform=..., which runs in this process"
    )


def warn_of_seed(loader: object) -> None:
    """Warns that transforms cannot be seeded: the loader thread may draw at the same time."""
    if not draws_apart(loader):
        warnings.warn(
            f"seed does not reach the transforms: {type(loader).__name__} may draw from torch's "
            f"generators in this process while they run. Use a DataLoader with num_workers >= 1, "
            f"or prefetch_batches=0",
            stacklevel=3,
        )
