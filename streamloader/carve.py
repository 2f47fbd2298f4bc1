"""Tensors out of a block's bytes: many for little more than one.

Where the cuts go is data, made once for batches of the same shapes. `carve` then makes all tensors
of a dtype by one call, which for five hundred small ones is ten times faster than a call or two for
each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from streamloader.layout import Place, Spec

__all__ = ["ALIGNMENT", "Cut", "carve", "contiguous", "cuts"]

ALIGNMENT = 64
"""Bytes: a cache line, and more than any vectorised kernel asks of an address (16)."""


class Pick(NamedTuple):
    """A piece that becomes a tensor.

    Attributes:
        piece: Its number.
        number: The tensor's.
        shape: Of the tensor; None if it is the piece as it is.
        stride: Of the tensor; None if it is contiguous.
    """

    piece: int
    number: int
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None


class Cut(NamedTuple):
    """A range of a block that is cut into pieces of one dtype: tensors, and gaps between them.

    Attributes:
        block: The block's number.
        dtype: Of the pieces.
        start: Where the range begins, in elements from the block's start.
        sizes: Elements of each piece.
        picks: Those that become tensors.
    """

    block: int
    dtype: torch.dtype
    start: int
    sizes: Sequence[int]
    picks: Sequence[Pick]


def cuts(specs: Sequence[Spec], places: Sequence[Place]) -> tuple[Cut, ...]:
    """The cuts that make tensors of `specs` at `places`."""
    order = sorted(range(len(specs)), key=lambda n: (*places[n], specs[n].nbytes))
    made: list[Cut] = []
    sizes: list[int] = []  # of the last one
    picks: list[Pick] = []
    end = 0
    for number in order:
        spec, place = specs[number], places[number]
        start, size = place.offset // spec.dtype.itemsize, math.prod(spec.shape)
        last = made[-1] if made else None
        if last is None or (last.block, last.dtype) != (place.block, spec.dtype) or start < end:
            sizes, picks, end = [], [], start
            made.append(Cut(place.block, spec.dtype, start, sizes, picks))
        if start > end:
            sizes.append(start - end)
        picks.append(Pick(len(sizes), number, *_form(spec)))
        sizes.append(size)
        end = start + size
    return tuple(cut._replace(sizes=tuple(cut.sizes), picks=tuple(cut.picks)) for cut in made)


def _form(spec: Spec) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    if len(spec.shape) == 1:
        return None, None
    return spec.shape, None if spec.stride == contiguous(spec.shape) else spec.stride


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    sizes = [max(size, 1) for size in shape[1:]]
    steps = list(itertools.accumulate([1, *reversed(sizes)], int.__mul__))
    return tuple(steps[::-1][: len(shape)])


def carve(blocks: Sequence[Tensor], made: Sequence[Cut]) -> list[Tensor]:
    """The tensors, in order of their numbers, on the memory of uint8 `blocks`.

    None of them is a view of another tensor, nor shares its version counter: what is done to one in
    place says nothing of the others.
    """
    tensors: dict[int, Tensor] = {}
    for cut in made:
        pieces = torch.unsafe_split_with_sizes(_range(blocks[cut.block], cut), cut.sizes)
        for piece, number, shape, stride in cut.picks:
            tensor = pieces[piece]
            if stride is not None and shape is not None:
                tensor = tensor.as_strided(shape, stride).data
            elif shape is not None:
                tensor = tensor.view(shape).data
            tensors[number] = tensor
    return [tensors[number] for number in range(len(tensors))]


def _range(block: Tensor, cut: Cut) -> Tensor:
    """The elements that are cut: a tensor on the block's storage."""
    start = int(block.storage_offset()) // cut.dtype.itemsize + cut.start
    whole = torch.empty(0, dtype=cut.dtype, device=block.device)
    return whole.set_(block.untyped_storage(), start, (sum(cut.sizes),), (1,))
