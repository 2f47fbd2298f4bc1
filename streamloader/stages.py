"""What happens to a batch on the device: the copy, the transforms, and handing it over.

    copy stream     [copy 3][copy 4]
    stage stream            [transform 3][transform 4]
    caller's stream                      (waits) [step 3]

Each leg has a stream for the loader's life (rule 4). Whoever reads a batch next waits for its event
and is recorded on its memory first (rule 2): `_enter`, the one place where that is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from streamloader import tree
from streamloader.batch import GONE, Batch, Dress
from streamloader.carve import carve
from streamloader.context import Context
from streamloader.device import Device, Stream
from streamloader.sent import Sent
from streamloader.transforms import Tabled, Transform, explain, planned

__all__ = ["Pipeline"]


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
        self._plans = [planned(transform) for transform in transforms]

    @functools.cached_property
    def _copy_stream(self) -> Stream:
        return self._device.stream("copy")

    @functools.cached_property
    def _streams(self) -> list[Stream]:
        return [self._device.stream(f"stage {n}") for n, _ in enumerate(self._transforms)]

    def planner(self, context: Context) -> Callable[[int, Any], Tensor] | None:
        """What makes the first transform's table of a batch's number and its value on the host.

        Whoever has a table sends it `Tabled` instead of the value alone. May be called in any
        thread.

        Args:
            context: Of a batch of the pass.

        Returns:
            None if the first transform plans nothing.
        """
        if not (self._plans and self._plans[0]):
            return None
        return lambda number, value: self._table(0, value, context._replace(number=number))

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
                if stage and self._plans[stage]:
                    self._later(stage, batch, context)
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

    def whole(self, value: Any, context: Context) -> Any:
        """Plans, moves and transforms a batch that is on the host, on the current stream."""
        plan = self.planner(context)
        table = None if plan is None else plan(context.number, value)
        held = [value if table is None else Tabled(value, table)]
        del value  # only `finish` keeps it, for as long as it needs it
        return self.finish(held.pop(), context)

    def finish(self, value: Any, context: Context) -> Any:
        """Moves what has not moved yet and transforms the batch, on the current stream."""
        value = tree.replace(self._move, value)
        with self._neutral() if self._transforms else nullcontext():
            for stage, _ in enumerate(self._transforms):
                if stage and self._plans[stage]:
                    value = Tabled(value, self._move(self._table(stage, value, context)))
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
        made = self._made(batch, arenas)
        if isinstance(batch.value, Sent):
            batch.value = batch.value.value(made)
        else:
            arrived = iter(made)
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

    def _made(self, batch: Batch, arenas: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, on their blocks' storages (none of them a view: rule 2)."""
        made = carve(arenas, batch.layout.cuts)
        if not any(batch.dresses):
            return made
        dressed = zip(made, batch.dresses, strict=True)
        return [tensor if dress is None else dress.put_on(tensor) for tensor, dress in dressed]

    def _move(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if self._device.holds(leaf):
                return leaf
            dress, moved = Dress.of(leaf), leaf.detach().to(self._device.device, copy=True)
            return dress.put_on(moved) if dress else moved
        moved = leaf.to(self._device.device)
        return leaf if moved is None else moved

    def _apply(self, stage: int, value: Any, context: Context) -> Any:
        plan = self._plans[stage]
        if plan is None:
            with self._explained(stage, value), self._seeded(context._replace(stage=stage)):
                return self._transforms[stage](value)
        with self._explained(stage, value.batch):
            return plan.run(*value)

    def _later(self, stage: int, batch: Batch, context: Context) -> None:
        """Plans for a transform whose input nobody knew before; its table is sent on its own."""
        table = self._table(stage, batch.value, context)
        with self._device.on(self._copy_stream):
            arena = self._device.arena(table.nbytes)
            # From pageable memory: up to 64 KB are staged by the driver without waiting.
            self._device.copy(arena, table.view(-1).view(torch.uint8))
            sent = self._device.record(self._copy_stream)
        self._device.wait(self._streams[stage], sent)
        batch.value = Tabled(batch.value, arena.view(table.dtype).view(table.shape))
        batch.memory.append(arena)
        batch.late.append((sent, table))

    def _table(self, stage: int, value: Any, context: Context) -> Tensor:
        plan = self._plans[stage]
        assert plan is not None
        # In whichever thread: nothing of the caller's modes, or tables would depend on the depth.
        with self._explained(stage, value), self._neutral(), torch.device("cpu"):
            table: Any = plan.plan(value, context._replace(stage=stage, apart=True))
            if not (isinstance(table, Tensor) and table.device.type == "cpu"):
                raise TypeError(f"plan must return a tensor on the CPU, got {table!r}")
            return table.contiguous()

    @contextmanager
    def _explained(self, stage: int, value: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            explain(error, self._transforms[stage], value)
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

    def _seeded(self, context: Context) -> AbstractContextManager[object]:
        return self._device.draws(context.key()) if context.apart else nullcontext()


def _source(batch: Batch, number: int) -> Tensor:
    """The pinned bytes that fill a block, a uint8 tensor."""
    block = batch.layout.blocks[number]
    if block.shared and batch.sent is not None:
        return batch.sent.memory[block.offset : (block.offset or 0) + block.nbytes]
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
