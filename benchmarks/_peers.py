"""What people use besides: timm's PrefetchLoader and torchtnt's CudaDataPrefetcher.

Each ends with what the others do, normalised images in channels_last on the device, from uint8 in
pinned memory. But timm's is a pass over the images more: it normalises them as they come, and its
training script makes them channels_last after it. They are imported only when asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks._feeds import Feed, Setup
from benchmarks._models import IMAGE_MEAN, IMAGE_STD
from benchmarks._shards import endless

__all__ = ["PEERS", "absent", "timm", "torchtnt", "unfit"]

PEERS = {
    "timm": ("timm.data.loader", "PrefetchLoader"),
    "torchtnt": ("torchtnt.utils.data", "CudaDataPrefetcher"),
}
"""The peers, and where each has what is compared."""


def absent(name: str, device: torch.device) -> str | None:
    """Why `name` cannot be measured here; None if it can, or if it is no peer."""
    if name not in PEERS:
        return None
    if name == "torchtnt" and device.type != "cuda":
        return "needs a CUDA device"
    try:
        _class(name)
    except ModuleNotFoundError as error:
        return f"not installed: pip install {error.name if error.name != name else name}"
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"cannot be imported: {error}"
    return None


def unfit(name: str, augment: str) -> str | None:
    """Why `name` cannot do what `--augment` asks for; None if it can.

    Torchtnt's can: it moves what a dataclass holds, so images of different sizes too.
    """
    if name != "timm" or augment == "cpu":
        return None
    return "it normalises by itself, and takes images of one size: no recipe before that"


def _class(name: str) -> Callable[..., Iterable[Any]]:
    module, found = PEERS[name]
    peer: Callable[..., Iterable[Any]] = getattr(importlib.import_module(module), found)
    return peer


def timm(setup: Setup) -> Feed:
    """Timm's PrefetchLoader around a DataLoader with pin_memory; it normalises on its stream."""
    peer = _class("timm")(
        setup.source(pin_memory=setup.pins),
        mean=IMAGE_MEAN,
        std=IMAGE_STD,
        device=setup.device,
        img_dtype=setup.dtype,
    )
    return _feed(setup, peer, _as_channels_last, ahead=1)


def _as_channels_last(images: torch.Tensor) -> torch.Tensor:
    """What timm's own training script does after it, on the stream of the step."""
    return images.contiguous(memory_format=torch.channels_last)


def torchtnt(setup: Setup) -> Feed:
    """Torchtnt's CudaDataPrefetcher around a DataLoader with pin_memory, then the transform."""
    ahead = max(setup.prefetch_batches, 1)
    loader = _Lazily(setup.source(pin_memory=setup.pins))
    peer = _class("torchtnt")(loader, setup.device, ahead)
    return _feed(setup, peer, setup.transform, ahead)


class _Lazily:
    """An iterable whose passes begin at their first batch.

    CudaDataPrefetcher begins one when it is made and another when it is iterated over; the workers
    would fill their queues for the first, and the second would throw that away.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches


def _feed(
    setup: Setup, peer: Iterable[Any], after: Callable[[torch.Tensor], torch.Tensor], ahead: int
) -> Feed:
    def batches() -> Iterator[Any]:
        for images, labels in endless(peer):
            yield after(images), labels

    made: Any = batches()
    return Feed(made, setup.in_workers + ahead, made.close)
