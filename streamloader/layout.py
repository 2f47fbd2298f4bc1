"""What of a batch is sent how: which tensors share a copy, and where each lies. Pure.

`layout(specs)` turns the shapes of a batch's tensors into a recipe:

    tensor 0   38.5 MB     block 0  [tensor 0                  ]   one allocation, one copy
    tensor 1    2.0 kB     block 1  [tensor 1 | tensor 2 |     ]   one allocation, one copy
    tensor 2     256 B

Large tensors have a block of their own, so that keeping one never keeps another. Small ones share
one, however many there are: crossing to the device costs some ten microseconds whatever is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from streamloader.carve import ALIGNMENT, Cut, cuts

__all__ = [
    "ALIGNMENT",
    "EMPTY",
    "MEDIUM",
    "Block",
    "Layout",
    "Place",
    "Spec",
    "dense",
    "layout",
    "merged",
    "plain",
    "runs",
]

LARGE = 1 << 20
"""Bytes from which a tensor always has a block of its own."""

MEDIUM = 1 << 14
"""Bytes from which a tensor has one while the batch has few: a kept label must not keep images."""

FEW = 8
"""How many tensors of at least MEDIUM bytes have blocks of their own."""


class Spec(NamedTuple):
    """One tensor of a batch on the host.

    Attributes:
        shape: Sizes.
        stride: Strides, in elements, of a dense tensor: its bytes are one range.
        dtype: Its dtype.
        nbytes: Bytes of that range.
        pinned: Whether it is sent from where it lies instead of from the slab.
        shares: Whether it goes with the small ones up to LARGE: it is not handed to the user.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    pinned: bool
    shares: bool = False


class Block(NamedTuple):
    """One device allocation and the one copy that fills it.

    Attributes:
        nbytes: Bytes to allocate and to copy.
        offset: Where it lies in the slab, in bytes; None if it is sent from where it lies.
        first: The number of its first tensor.
        shared: Whether the slab is one that a worker filled, instead of this process's.
    """

    nbytes: int
    offset: int | None
    first: int
    shared: bool = False


class Place(NamedTuple):
    """Where one tensor lies: which block, and how many bytes into it."""

    block: int
    offset: int


class Layout(NamedTuple):
    """The recipe of a batch.

    Attributes:
        blocks: Device allocations, each filled by one copy.
        places: One for each tensor, in the batch's order.
        slab: Bytes of pinned host memory that it needs.
        cuts: How the tensors are cut out of the blocks.
    """

    blocks: tuple[Block, ...]
    places: tuple[Place, ...]
    slab: int
    cuts: tuple[Cut, ...]


EMPTY = Layout((), (), 0, ())
"""Of a batch without tensors that travel."""


@functools.lru_cache(maxsize=64)
def layout(specs: tuple[Spec, ...]) -> Layout:
    """The recipe for a batch of such tensors."""
    blocks: list[Block] = []
    places: dict[int, Place] = {}
    slab = 0
    alone, others = runs(specs)
    for group in [*([number] for number in alone), others]:
        if not group:
            continue
        end = offset = 0
        for number in group:
            places[number] = Place(len(blocks), offset)
            end = offset + specs[number].nbytes
            offset = _aligned(end)
        in_place = specs[group[0]].pinned and group[0] in alone
        blocks.append(Block(end, None if in_place else slab, group[0]))
        slab += 0 if in_place else offset
    ordered = tuple(places[number] for number in range(len(specs)))
    return Layout(tuple(blocks), ordered, slab, cuts(specs, ordered))


def merged(
    there: Layout, here: Layout, numbers: Sequence[int | None], specs: Sequence[Spec]
) -> Layout:
    """One recipe for tensors that have two.

    Args:
        there: Of some.
        here: Of the others, in order; its blocks follow those of the first.
        numbers: Of each tensor, its number among those of `there`; None if it is another.
        specs: Of all.
    """
    if not here.places and list(numbers) == list(range(len(there.places))):
        return there._replace(slab=here.slab)
    shifted = [block._replace(first=block.first + len(there.places)) for block in here.blocks]
    others = (Place(place.block + len(there.blocks), place.offset) for place in here.places)
    places = tuple(next(others) if n is None else there.places[n] for n in numbers)
    return Layout((*there.blocks, *shifted), places, here.slab, cuts(specs, places))


def runs(specs: Sequence[Spec]) -> tuple[list[int], list[int]]:
    """The numbers of the tensors that have a block of their own, and those of the others."""
    alone = _alone(specs)
    taken = set(alone)
    return alone, [number for number in range(len(specs)) if number not in taken]


def _alone(specs: Sequence[Spec]) -> list[int]:
    by_size = sorted(range(len(specs)), key=lambda number: -specs[number].nbytes)
    return sorted(
        number
        for rank, number in enumerate(by_size)
        if specs[number].nbytes >= (MEDIUM if rank < FEW and not specs[number].shares else LARGE)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's elements fill one range of memory, each place once.

    So do contiguous, channels_last and transposed tensors; slices and expanded ones do not.
    """
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def plain(tensor: Tensor) -> bool:
    """Whether a tensor is its bytes: they can travel apart, and be dressed again on arrival."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
