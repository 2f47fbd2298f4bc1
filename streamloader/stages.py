"""What happens to a batch on the device: the copy, the transforms, and handing it over.

    copy stream     [copy 3][copy 4]
    stage stream            [transform 3][transform 4]
    caller's stream                      (waits) [step 3]

Each leg has a stream for the loader's life (rule 4). Whoever reads a batch next waits for its event
and is recorded on its memory first (rule 2): `_enter`, the one place where that is done.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from streamloader import tree
from streamloader.batch import GONE, Batch, Dress
from streamloader.context import Context
from streamloader.device import Device, Stream

__all__ = ["Pipeline", "Transform", "note", "on"]

Transform: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class on:  # noqa: N801  # reads as a word: on("image", augment)
    """A transform that applies a function to one part of the batch.

        StreamLoader(loader, transform=on(0, normalize))          # of (images, labels)
        StreamLoader(loader, transform=on("image", normalize))    # of {"image": ..., "label": ...}

    Args:
        key: A mapping's key, a field's name, or an index.
        function: Called with that part; what it returns takes its place.
    """

    key: Any
    function: Transform

    def __call__(self, batch: Any) -> Any:
        """The batch, a new container of the same class, with that part replaced."""
        return tree.with_part(batch, self.key, self.function(tree.part(batch, self.key)))


class Pipeline:
    """The legs on the device.

    Args:
        device: Where they are.
        transforms: Called in order, each on a stream of its own, without gradients, without the
            caller's autocast, with torch's generators seeded for the batch.
    """

    def __init__(self, device: Device, transforms: Sequence[Transform]) -> None:
        self._device = device
        self._transforms = transforms

    @functools.cached_property
    def _copy_stream(self) -> Stream:
        return self._device.stream("copy")

    @functools.cached_property
    def _streams(self) -> list[Stream]:
        return [self._device.stream(f"stage {n}") for n, _ in enumerate(self._transforms)]

    def begin(self) -> None:
        """A pass begins: transforms read what the caller has written so far (rule 6)."""
        if self._transforms:
            written = self._device.record(self._device.current())
            for stream in self._streams:
                self._device.wait(stream, written)

    def send(self, batch: Batch) -> None:
        """Submits the copy. `ready` is set even if it fails: some of it may be under way."""
        try:
            with self._device.on(self._copy_stream):
                self._copy(batch)
        finally:
            batch.ready = self._device.record(self._copy_stream)

    def transform(self, batch: Batch, context: Context) -> None:
        """Submits the transforms. Those of an opaque batch wait for hand-over."""
        if batch.opaque or not self._transforms:
            return
        with self._neutral():
            for stage, stream in enumerate(self._streams):
                self._enter(batch, stream)
                with self._device.on(stream):
                    batch.value = self._apply(stage, batch.value, context)
                batch.memory = _memory(batch.value, self._device)
                batch.ready = self._device.record(stream)

    def hand_over(self, batch: Batch, context: Context) -> Any:
        """The batch as the caller gets it, on the stream that is current now."""
        self._enter(batch, self._device.current())
        value, batch.value, batch.memory = batch.value, None, []
        return self.finish(value, context) if batch.opaque else value

    def finish(self, value: Any, context: Context) -> Any:
        """Moves what has not moved yet and transforms the batch, on the current stream."""
        value = tree.replace(self._move, value)
        with self._neutral() if self._transforms else nullcontext():
            for stage, _ in enumerate(self._transforms):
                value = self._apply(stage, value, context)
        return value

    def _enter(self, batch: Batch, stream: Stream) -> None:
        """From here on `stream` may read the batch (rule 2)."""
        self._device.wait(stream, batch.ready)
        for tensor in batch.memory:
            self._device.uses(tensor, stream)

    def _copy(self, batch: Batch) -> None:
        if batch.made is not None:
            self._device.wait(self._copy_stream, batch.made)
        arenas = [self._sent(batch, number) for number in range(len(batch.layout.blocks))]
        arrived = iter([self._made(batch, arenas, n) for n in range(len(batch.specs))])
        leaves = iter([next(arrived) if leaf is GONE else leaf for leaf in batch.leaves])
        batch.value, batch.leaves = tree.replace(lambda _: next(leaves), batch.value), []
        batch.memory = [part for tensor in batch.memory for part in _within(tensor)] + arenas

    def _sent(self, batch: Batch, number: int) -> Tensor:
        """One block on the device; its copy is submitted."""
        block = batch.layout.blocks[number]
        arena = self._device.arena(block.nbytes)
        if block.nbytes:
            self._device.copy(arena, _source(batch, number))
        return arena

    def _made(self, batch: Batch, arenas: Sequence[Tensor], number: int) -> Tensor:
        """One tensor, on its block's storage (`set_`, not a view: rule 2)."""
        spec, place = batch.specs[number], batch.layout.places[number]
        arena = arenas[place.block]
        tensor = torch.empty(0, dtype=spec.dtype, device=arena.device)
        offset = place.offset // spec.dtype.itemsize
        tensor.set_(arena.untyped_storage(), offset, spec.shape, spec.stride)
        dress = batch.dresses[number]
        return tensor if dress is None else dress.put_on(tensor)

    def _move(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if self._device.holds(leaf):
                return leaf
            dress, moved = Dress.of(leaf), leaf.detach().to(self._device.device, copy=True)
            return dress.put_on(moved) if dress else moved
        moved = leaf.to(self._device.device)
        return leaf if moved is None else moved

    def _apply(self, stage: int, value: Any, context: Context) -> Any:
        transform = self._transforms[stage]
        try:
            with self._seeded(context, stage):
                return transform(value)
        except Exception as error:
            _explain(error, transform, value)
            raise

    @contextmanager
    def _neutral(self) -> Iterator[None]:
        """Without gradients, and without the caller's autocast."""
        with (
            torch.no_grad(),
            torch.autocast(self._device.device.type, enabled=False),
            torch.autocast("cpu", enabled=False),
        ):
            yield

    def _seeded(self, context: Context, stage: int) -> AbstractContextManager[object]:
        return nullcontext() if context.seed is None else self._device.draws(context.key(stage))


def _source(batch: Batch, number: int) -> Tensor:
    """The pinned bytes that fill a block, a uint8 tensor."""
    block = batch.layout.blocks[number]
    if batch.slab is not None and block.offset is not None:
        return batch.slab[block.offset : block.offset + block.nbytes]
    tensor = batch.direct[block.first]
    start = tensor.storage_offset() * tensor.itemsize
    whole = torch.empty(0, dtype=torch.uint8, device="cpu")
    return whole.set_(tensor.untyped_storage(), start, (block.nbytes,), (1,))


def _memory(value: Any, device: Device) -> list[Tensor]:
    """Every tensor on the device that can be reached from `value`."""
    found = [part for tensor in tree.reachable(value) for part in _within(tensor)]
    return [tensor for tensor in found if tensor.device.type == device.device.type]


def _within(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor is made of, each with memory of its own."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _within(getattr(tensor, name))]
    names = ("values",) if tensor.is_nested else _SPARSE.get(tensor.layout, ())
    return [getattr(tensor, name)() for name in names] if names else [tensor]


_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _explain(error: Exception, transform: Transform, value: Any) -> None:
    """Adds to `error` which transform raised it, and on what."""
    text = f"raised by transform {_name(transform)} on the batch {tree.describe(value)}"
    if not isinstance(value, Tensor) and not isinstance(transform, on):
        text += (
            "; a transform gets the whole batch: to give it one part, wrap it, as in "
            f"transform=on({_first_key(value)!r}, {_name(transform)})"
        )
    note(error, text)


def note(error: Exception, text: str) -> None:
    """Adds `text` to what is shown of `error`."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def _name(transform: Transform) -> str:
    return getattr(transform, "__qualname__", None) or repr(transform)


def _first_key(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return next((field.name for field in dataclasses.fields(value)), 0)
    return next(iter(value), 0) if isinstance(value, Mapping) else 0
