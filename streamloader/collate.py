"""What runs in a worker: the user's collate function, with its tensors made in shared memory.

`default_collate` in a worker makes new shared memory for each tensor: new pages, a descriptor, and
all of that undone in the trainer. While a batch is collated here, it stacks into the worker's slab
instead, also where a collate function of the user's calls it; whatever else that returns is copied
into the slab afterwards (sent.py). Nothing here knows of a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from streamloader.layout import MEDIUM, plain
from streamloader.sent import packed
from streamloader.shared import Shared, empty, filling

__all__ = ["Collate"]


class Collate:
    """A `DataLoader`'s collate function, put in front of its own while its workers start.

    Args:
        collate_fn: Its own.
        shared: Where to put batches.

    Attributes:
        shared: Likewise.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], shared: Shared) -> None:
        self._collate_fn = collate_fn
        self.shared = shared

    def __call__(self, samples: Any) -> Any:
        """The batch, in a slab if one is free, else as it is."""
        worker = get_worker_info()
        apart = worker is not None and os.getpid() != self.shared.owner  # no thread of it
        slab = self.shared.take(worker.id) if worker is not None and apart else None
        if slab is None:
            return self._collate_fn(samples)
        if default_collate_fn_map.get(Tensor) is collate_tensor_fn:
            default_collate_fn_map[Tensor] = _stack
        with filling(slab):
            value = self._collate_fn(samples)
        return packed(value, slab, self.shared)


def _stack(samples: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    """`default_collate` of tensors, into the slab where torch would make new shared memory."""
    first = samples[0]
    if all(_alike(sample, first) for sample in samples):
        if first.nbytes * len(samples) < MEDIUM:  # to be copied, together with other small ones
            return torch.stack(tuple(samples))
        out = empty((len(samples), *first.shape), first.dtype)
        if out is not None:
            return torch.stack(tuple(samples), out=out)
    stacked: Tensor = collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
    return stacked


def _alike(sample: Tensor, first: Tensor) -> bool:
    return (
        type(sample) is Tensor
        and plain(sample)
        and not sample.requires_grad
        and (sample.dtype, sample.shape) == (first.dtype, first.shape)
    )
