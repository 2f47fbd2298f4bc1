"""From a host batch to one that can be sent: its bytes in a pinned slab.

What a worker has put into shared memory is sent from there, if that can be pinned.

Runs in the loader thread. It reads the source's memory before the next pull and never after it
(rule 5), and does as little Python as it can: one memmove a tensor, which for large ones releases
the interpreter lock and, unlike `Tensor.copy_`, starts no thread pool.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from streamloader import tree
from streamloader.batch import GONE, Batch, Dress
from streamloader.device import Device
from streamloader.layout import Layout, Spec, dense, layout, merged, plain
from streamloader.region import Region
from streamloader.sent import Sent
from streamloader.transforms import Tabled

__all__ = ["Packer", "fresh", "owned", "size"]

_memmove = ctypes.memmove  # releases the interpreter lock
_memmove_locked = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)

_UNLOCK_BYTES = 1 << 18
"""Below this a copy (some 20 us) is shorter than getting the interpreter lock back may be."""


def fresh(loader: object, iterator: object) -> bool:
    """Whether each batch of a pass is in memory that its source does not write again.

    True of a `DataLoader` that collates by itself or in workers, and whose pass is one of torch's
    own classes; a `collate_fn` or an `__iter__` of the user's that runs in this process may fill
    the same buffer each time.

    Args:
        loader: What the user passed.
        iterator: What its `iter()` returned.
    """
    if not isinstance(loader, DataLoader) or type(iterator).__module__ != DataLoader.__module__:
        return False
    return loader.num_workers > 0 or loader.collate_fn is default_collate


def owned(value: Any, device: Device, *, fresh: bool) -> Any:
    """`value`, but for what would be the source's own memory even on the device: copied."""
    if fresh:
        return value

    def visit(leaf: Any) -> Any:
        stays = isinstance(leaf, Tensor) and not (device.host and device.holds(leaf))
        return leaf if stays else _copied(leaf)

    return tree.replace(visit, tree.copied(value))


def size(value: Any) -> int:
    """Bytes of the tensors in `value`, those within opaque objects and sparse ones left out."""
    return sum(map(_bytes, tree.leaves(value)))


def _bytes(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, Tensor) and leaf.layout == torch.strided else 0


@dataclass
class Packer:
    """Packs the batches of one pass.

    Args:
        device: Where they go.
        take: Gives a pinned slab of at least so many bytes; None when what it is given next became
            true first.
        fresh: See `fresh`.
        pinned: Whether large tensors that are pinned are sent from where they lie.
        plan: Makes the table that travels with a batch: `Pipeline.planner`. None if nothing is
            planned, so that nobody here has to see a batch's tensors.
        region: Shared memory that batches may come in.
    """

    device: Device
    take: Callable[[int, Callable[[], bool]], Tensor | None]
    fresh: bool
    pinned: bool
    plan: Callable[[int, Any], Tensor] | None = None
    region: Region | None = None

    def __call__(self, number: int, value: Any, closed: Callable[[], bool]) -> Batch | None:
        """The batch that carries `value`, or None when the pass was `closed()` meanwhile."""
        found = _Leaves(self.device, self.fresh, self.pinned)
        if isinstance(value, Sent):
            stays = self._stays(value)
            if stays and value.whole and self.plan is None:
                return _as_it_lies(number, value)
            value = self._opened(value, found, stays=stays)
        table = None if self.plan is None else self.plan(number, value)
        if not found.fresh:
            value = tree.copied(value)
        if table is not None:
            found.table, value = table, Tabled(value, table)
        batch = Batch(number, tree.emptied(found.visit, value))
        batch.leaves, batch.opaque, batch.nbytes = found.leaves, found.opaque, found.nbytes
        batch.memory = found.present if found.fresh else self._present(value)
        if batch.memory:
            batch.made = self.device.record(self.device.current())
        batch.shared = found.shared
        batch.specs, batch.dresses, batch.sent = tuple(found.specs), found.dresses, found.sent
        return batch if self._fill(batch, found, closed) else None

    def _stays(self, sent: Sent) -> bool:
        """Whether it is sent from the shared memory that it lies in."""
        if self.region is None:
            return False
        self.region.noticed(sent)
        stays = not self.device.host and not self.region.refused
        if stays:
            sent.shared.populate(sent.number, sent.recipe.used)
        return stays

    def _opened(self, sent: Sent, found: _Leaves, *, stays: bool) -> Any:
        """The value of a batch in shared memory, which nobody else writes to while it is held.

        On the host it is handed out as it lies there, but for what would leave workers too little,
        and what another StreamLoader over the same workers has pinned.
        """
        found.fresh = found.shared = True
        recipe = sent.recipe
        short = self.region is not None and self.region.short
        if self.device.host and (short or sent.pinned):
            standing = recipe.copies(sent.memory)
        elif not stays or sent.checked or self.plan is not None:
            standing = recipe.views(sent.memory)
        else:
            standing = _stand_ins(len(recipe.specs))
        if stays:
            found.sent, found.there = sent, {id(tensor): n for n, tensor in enumerate(standing)}
        return sent.value(standing)

    def _present(self, value: Any) -> list[Tensor]:
        """What is on the device already, also within objects of any kind."""
        if self.device.host:
            return []
        return [tensor for tensor in tree.reachable(value) if self.device.holds(tensor)]

    def _fill(self, batch: Batch, found: _Leaves, closed: Callable[[], bool]) -> bool:
        """Lays the batch out, and copies what is not in shared memory."""
        batch.layout = here = layout(tuple(found.here))
        before = 0
        if batch.sent is not None:
            there = batch.sent.recipe.layout
            before = len(there.places)
            batch.layout = merged(there, here, found.numbers, batch.specs)
        batch.direct = {
            b.first + before: found.tensors[b.first] for b in here.blocks if b.offset is None
        }
        if here.slab:
            batch.slab = self.take(here.slab, closed)
            if batch.slab is None:
                return False
            _write(here, found.tensors, batch.slab.data_ptr())
        return True


def _stand_ins(count: int) -> list[Tensor]:
    """What stands for a batch's tensors until they are visited: empty ones, the same for all."""
    _empty.extend(torch.empty(0, device="cpu") for _ in range(count - len(_empty)))
    return _empty[:count]


_empty: list[Tensor] = []


def _as_it_lies(number: int, sent: Sent) -> Batch:
    """A batch that is all in shared memory: its value is made when its tensors are."""
    recipe = sent.recipe
    return Batch(number, sent, layout=recipe.layout, sent=sent, shared=True, nbytes=recipe.nbytes)


def _write(plan: Layout, tensors: list[Tensor], address: int) -> None:
    for tensor, place in zip(tensors, plan.places, strict=True):
        offset = plan.blocks[place.block].offset
        if offset is not None:
            move = _memmove if tensor.nbytes >= _UNLOCK_BYTES else _memmove_locked
            move(address + offset + place.offset, tensor.data_ptr(), tensor.nbytes)


@dataclass
class _Leaves:
    """The leaves of one batch, sorted by how they get to the device.

    `specs`, `dresses` and `numbers` are of all that travel, `here` and `tensors` of those that are
    not in shared memory.
    """

    device: Device
    fresh: bool
    pinned: bool
    table: Tensor | None = None
    sent: Sent | None = None
    there: dict[int, int] = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    here: list[Spec] = field(default_factory=list)
    specs: list[Spec] = field(default_factory=list)
    numbers: list[int | None] = field(default_factory=list)
    dresses: list[Dress | None] = field(default_factory=list)
    present: list[Tensor] = field(default_factory=list)
    opaque: bool = False
    shared: bool = False
    nbytes: int = 0

    def visit(self, leaf: Any) -> Any:
        """What stands for `leaf` until the batch is launched."""
        self.leaves.append(self._standing(leaf))
        return self.leaves[-1]

    def _standing(self, leaf: Any) -> Any:
        number = self.there.get(id(leaf))
        if self.sent is not None and number is not None:
            return self._goes(self.sent.recipe.specs[number], None, number)
        here = isinstance(leaf, Tensor) and self.device.holds(leaf)
        if here and not self.device.host:
            self.present.append(leaf)
            return leaf
        if isinstance(leaf, Tensor) and not here and plain(leaf):
            return self._packed(leaf)
        self.nbytes += _bytes(leaf)
        self.opaque = self.opaque or not here
        return leaf if self.fresh else _copied(leaf)

    def _packed(self, tensor: Tensor) -> Tensor:
        dress = Dress.of(tensor)
        if dress is not None and not self.fresh:
            dress = dress._replace(attributes=copy.deepcopy(dress.attributes))
        is_table = tensor is self.table
        if not dense(tensor.shape, tensor.stride()):
            tensor = tensor.detach().clone()
        pinned = self.pinned and tensor.is_pinned()
        shape = tuple(tensor.shape)
        spec = Spec(shape, tensor.stride(), tensor.dtype, tensor.nbytes, pinned, is_table)
        self.here.append(spec)
        self.tensors.append(tensor)
        return self._goes(spec, dress, None)

    def _goes(self, spec: Spec, dress: Dress | None, number: int | None) -> Tensor:
        self.specs.append(spec)
        self.dresses.append(dress)
        self.numbers.append(number)
        self.nbytes += 0 if spec.shares else spec.nbytes
        return GONE


def _copied(leaf: Any) -> Any:
    """A leaf in memory of its own. What is on another device is left to its own stream."""
    if not isinstance(leaf, Tensor):
        memo = {id(tensor): _copied(tensor) for tensor in tree.reachable(leaf)}
        return copy.deepcopy(leaf, memo)  # but not what a function of it holds: README
    if leaf.device.type != "cpu":
        return leaf
    copied = leaf.detach().clone()
    if not plain(leaf):
        return copied.requires_grad_(leaf.requires_grad)
    dress = Dress.of(leaf)
    return dress.put_on(copied) if dress else copied
