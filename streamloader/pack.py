"""From a host batch to one that can be sent: its bytes in a pinned slab.

Runs in the loader thread. It reads the source's memory before the next pull and never after it
(rule 5), and does as little Python as it can: one memmove a tensor, which for large ones releases
the interpreter lock and, unlike `Tensor.copy_`, starts no thread pool.
"""

from __future__ import annotations

import copy
import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from streamloader import tree
from streamloader.batch import GONE, Batch, Dress
from streamloader.device import Device
from streamloader.layout import Layout, Spec, dense, layout
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
        plan: Gives the table that travels with a batch of this number, if any: `Pipeline.plan`.
    """

    device: Device
    take: Callable[[int, Callable[[], bool]], Tensor | None]
    fresh: bool
    pinned: bool
    plan: Callable[[int, Any], Tensor | None] = lambda _, __: None

    def __call__(self, number: int, value: Any, closed: Callable[[], bool]) -> Batch | None:
        """The batch that carries `value`, or None when the pass was `closed()` meanwhile."""
        table = self.plan(number, value)
        found = _Leaves(self.device, self.fresh, self.pinned, table)
        if not self.fresh:
            value = tree.copied(value)
        if table is not None:
            value = Tabled(value, table)
        batch = Batch(number, tree.emptied(found.visit, value))
        batch.leaves, batch.opaque, batch.nbytes = found.leaves, found.opaque, found.nbytes
        batch.memory = found.present if self.fresh else self._present(value)
        if batch.memory:
            batch.made = self.device.record(self.device.current())
        batch.specs, batch.dresses = tuple(found.specs), found.dresses
        batch.layout = layout(batch.specs)
        return batch if self._fill(batch, found.tensors, closed) else None

    def _present(self, value: Any) -> list[Tensor]:
        """What is on the device already, also within objects of any kind."""
        if self.device.host:
            return []
        return [tensor for tensor in tree.reachable(value) if self.device.holds(tensor)]

    def _fill(self, batch: Batch, tensors: list[Tensor], closed: Callable[[], bool]) -> bool:
        plan = batch.layout
        batch.direct = {b.first: tensors[b.first] for b in plan.blocks if b.offset is None}
        if plan.slab:
            batch.slab = self.take(plan.slab, closed)
            if batch.slab is None:
                return False
            _write(plan, tensors, batch.slab.data_ptr())
        return True


def _write(plan: Layout, tensors: list[Tensor], address: int) -> None:
    for tensor, place in zip(tensors, plan.places, strict=True):
        offset = plan.blocks[place.block].offset
        if offset is not None:
            move = _memmove if tensor.nbytes >= _UNLOCK_BYTES else _memmove_locked
            move(address + offset + place.offset, tensor.data_ptr(), tensor.nbytes)


@dataclass
class _Leaves:
    """The leaves of one batch, sorted by how they get to the device."""

    device: Device
    fresh: bool
    pinned: bool
    table: Tensor | None
    leaves: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    specs: list[Spec] = field(default_factory=list)
    dresses: list[Dress | None] = field(default_factory=list)
    present: list[Tensor] = field(default_factory=list)
    opaque: bool = False
    nbytes: int = 0

    def visit(self, leaf: Any) -> Any:
        """What stands for `leaf` until the batch is launched."""
        self.leaves.append(self._standing(leaf))
        return self.leaves[-1]

    def _standing(self, leaf: Any) -> Any:
        here = isinstance(leaf, Tensor) and self.device.holds(leaf)
        if here and not self.device.host:
            self.present.append(leaf)
            return leaf
        self.nbytes += _bytes(leaf)
        if isinstance(leaf, Tensor) and not here and _plain(leaf):
            return self._go(leaf)
        self.opaque = self.opaque or not here
        return leaf if self.fresh else _copied(leaf)

    def _go(self, tensor: Tensor) -> Tensor:
        dress = Dress.of(tensor)
        if dress is not None and not self.fresh:
            dress = dress._replace(attributes=copy.deepcopy(dress.attributes))
        self.dresses.append(dress)
        if not dense(tensor.shape, tensor.stride()):
            tensor = tensor.detach().clone()
        pinned = self.pinned and tensor.is_pinned()
        shape, shares = tuple(tensor.shape), tensor is self.table
        spec = Spec(shape, tensor.stride(), tensor.dtype, tensor.nbytes, pinned, shares)
        self.specs.append(spec)
        self.tensors.append(tensor)
        return GONE


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is its bytes: they can travel apart, and be dressed again on arrival."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _copied(leaf: Any) -> Any:
    """A leaf in memory of its own. What is on another device is left to its own stream."""
    if not isinstance(leaf, Tensor):
        return _copied_object(leaf)
    if leaf.device.type != "cpu":
        return leaf
    copied = leaf.detach().clone()
    if not _plain(leaf):
        return copied.requires_grad_(leaf.requires_grad)
    dress = Dress.of(leaf)
    return dress.put_on(copied) if dress else copied


def _copied_object(thing: Any) -> Any:
    """A deep copy; warns of what it shares with `thing`: functions are never copied."""
    tensors = tree.reachable(thing, classes=False)
    copied = copy.deepcopy(thing, {id(tensor): _copied(tensor) for tensor in tensors})
    own = {id(tensor) for tensor in tensors if tensor.device.type == "cpu"}
    if any(id(tensor) in own for tensor in tree.reachable(copied, classes=False)):
        warnings.warn(
            f"a batch has a {type(thing).__qualname__} that keeps a tensor in a function, where "
            "copy.deepcopy leaves it: if the source writes that tensor again, batches that wait "
            "change. Give the class a __deepcopy__, or load in workers (num_workers >= 1)",
            stacklevel=2,
        )
    return copied
