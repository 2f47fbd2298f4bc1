"""What happens to a batch on the device: the copy, the transforms, and handing it over.

    copy stream     [copy 3][copy 4]
    stage stream            [transform 3][transform 4]
    caller's stream                      (waits) [step 3]

Each leg has a stream for the loader's life (rule 4). Whoever reads a batch next waits for its event
and is recorded on its memory first (rule 2): `_enter`, the one place where that is done.

A transform that reads what the step writes, and those behind it, have no batch ahead (rule 6):

    stage stream            [transform 3]          (waits for step 2) [teacher 3]
    caller's stream                       [step 2]                    (waits) [step 3]
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from streamloader import results, tree
from streamloader.batch import GONE, Batch, Dress
from streamloader.carve import carve
from streamloader.context import Context
from streamloader.device import Device, Event, Stream
from streamloader.sent import Sent
from streamloader.transforms import Stage, Tabled, Transform, explain, planned, staged

__all__ = ["Pipeline"]


class Pipeline:
    """The legs on the device.

    Args:
        device: Where they are.
        transforms: Called in order, each on a stream of its own (`staged` says why), without
            gradients, without the caller's autocast, with torch's generators seeded for the batch.
    """

    def __init__(self, device: Device, transforms: Sequence[Transform | Stage]) -> None:
        self._device = device
        self._stages = staged(transforms)
        self._plans = [planned(stage.fn) for stage in self._stages]
        self._labels = [stage.label for stage in self._stages]
        self._fresh = [results.Fresh(device) for _ in self._stages]
        after_step = [place for place, stage in enumerate(self._stages) if stage.after_step]
        first = min(after_step, default=len(self._stages))
        self._ahead, self._due = range(first), range(first, len(self._stages))
        self._told = False

    @functools.cached_property
    def _copy_stream(self) -> Stream:
        return self._device.stream("copy")

    @functools.cached_property
    def _table_stream(self) -> Stream:
        """Of tables that are sent on their own: small, and not to queue behind later batches."""
        return self._device.stream("tables")

    @functools.cached_property
    def _streams(self) -> list[Stream]:
        return [
            self._device.stream(f"stage {place}", priority=stage.priority)
            for place, stage in enumerate(self._stages)
        ]

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
        if self._stages:
            written = self._device.record(self._device.current())
            for stream in self._streams:
                self._device.wait(stream, written)
        for fresh in self._fresh:
            fresh.begin()

    def send(self, batch: Batch) -> None:
        """Submits the copy. `ready` is set even if it fails: some of it may be under way."""
        try:
            with self._device.on(self._copy_stream):
                self._copy(batch)
        finally:
            batch.ready = self._device.record(self._copy_stream)

    def transform(self, batch: Batch, context: Context) -> None:
        """Submits the transforms that run ahead. Those of an opaque batch wait for hand-over."""
        if self._ahead and not batch.opaque:
            self._run(batch, context, self._ahead)

    def hand_over(self, batch: Batch, context: Context, asked: Sequence[Event] = ()) -> Any:
        """The batch as the caller gets it, on the stream that is current now.

        Args:
            batch: The one that is due.
            context: Its own.
            asked: Complete when the steps before it have run.
        """
        current = self._device.current()
        try:
            if self._due:
                reader = current if batch.opaque else self._streams[self._due[0]]
                for event in asked:
                    self._device.wait(reader, event)
                if not batch.opaque:
                    self._run(batch, context, self._due)
        finally:  # whatever comes: the caller must not write what is still being read
            self._enter(batch, current)
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
        with self._neutral() if self._stages else nullcontext():
            for stage, _ in enumerate(self._stages):
                if stage and self._plans[stage]:
                    value = Tabled(value, self._move(self._table(stage, value, context)))
                value = self._apply(stage, value, context)
        return value

    def _run(self, batch: Batch, context: Context, stages: Sequence[int]) -> None:
        """Submits some transforms, each on its stream. `ready` is set even if one fails."""
        with self._neutral():
            for stage in stages:
                stream, given = self._streams[stage], batch.memory
                if stage and self._plans[stage]:
                    self._later(stage, batch, context)
                self._enter(batch, stream)
                try:
                    with self._device.on(stream):
                        batch.value = self._apply(stage, batch.value, context, given)
                finally:
                    batch.ready = self._device.record(stream)
                batch.memory = results.memory(batch.value, self._device)

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
        batch.memory = [part for each in batch.memory for part in results.within(each)] + arenas

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

    def _apply(
        self, stage: int, value: Any, context: Context, memory: Sequence[Tensor] | None = None
    ) -> Any:
        """What a transform makes of a batch, given the memory of that, or None if none is ahead."""
        plan, who = self._plans[stage], f"transform {self._labels[stage]} on batch {context.number}"
        batch = value if plan is None else value.batch
        with self._device.named(who), self._explained(stage, batch, context), self._cast(stage):
            if plan is not None:
                made = plan.run(*value)
            else:
                with self._drawing(stage, context):
                    made = self._stages[stage].fn(value)
        found = results.tensors(made, who)
        if any(map(Tensor.is_inference, found)) and not torch.is_inference_mode_enabled():
            made = results.ordinary(made)
            found = results.tensors(made, who)
        results.check(found, batch, self._device, who)
        if memory is not None:
            self._fresh[stage].check(found, memory, who)
        return made

    def _later(self, stage: int, batch: Batch, context: Context) -> None:
        """Plans for a transform whose input nobody knew before; its table is sent on its own."""
        table = self._table(stage, batch.value, context)
        with self._device.on(self._table_stream):
            arena = self._device.arena(table.nbytes)
            # From pageable memory: up to 64 KB are staged by the driver without waiting.
            self._device.copy(arena, table.view(-1).view(torch.uint8))
            sent = self._device.record(self._table_stream)
        self._device.wait(self._streams[stage], sent)
        batch.value = Tabled(batch.value, arena.view(table.dtype).view(table.shape))
        batch.memory.append(arena)
        batch.late.append((sent, table))

    def _table(self, stage: int, value: Any, context: Context) -> Tensor:
        plan = self._plans[stage]
        assert plan is not None
        # In whichever thread: nothing of the caller's modes, or tables would depend on the depth.
        with self._explained(stage, value, context), self._neutral(), torch.device("cpu"):
            table: Any = plan.plan(value, context._replace(stage=stage, apart=True))
            if not (isinstance(table, Tensor) and table.device.type == "cpu"):
                raise TypeError(f"plan must return a tensor on the CPU, got {table!r}")
            return table.contiguous()

    @contextmanager
    def _explained(self, stage: int, value: Any, context: Context) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            explain(error, self._stages[stage], context.number, value)
            raise

    @contextmanager
    def _neutral(self) -> Iterator[None]:
        """Without gradients, and without the caller's autocast.

        Nor does an autocast within keep weights that it has cast: if the caller's is around the
        loop, its step would find them, made on another stream and without gradients.
        """
        keeps = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.no_grad(), _uncast(self._device.device.type), _uncast("cpu"):
                yield
        finally:
            torch.set_autocast_cache_enabled(keeps)

    def _cast(self, stage: int) -> AbstractContextManager[object]:
        dtype = self._stages[stage].autocast
        return torch.autocast(self._device.device.type, dtype) if dtype else nullcontext()

    def _drawing(self, stage: int, context: Context) -> AbstractContextManager[object]:
        """A context for what may draw: seeded if that is possible, else watched for a while."""
        if context.apart:
            return self._device.draws(context._replace(stage=stage).key())
        watched = context.number < _WATCHED and not self._told
        return self._watched(stage) if watched else nullcontext()

    @contextmanager
    def _watched(self, stage: int) -> Iterator[None]:
        """Warns, once, where generators have moved that could not be seeded and restored."""
        generators = self._device.generators()
        before = [generator.get_state() for generator in generators]
        yield
        after = [generator.get_state() for generator in generators]
        if not all(map(torch.equal, before, after)):
            self._told = True
            warnings.warn(
                f"transform {self._labels[stage]} draws from torch's generators (or the "
                f"loader does meanwhile): ahead of the step, unseeded, so that neither these draws "
                f"nor your own can be repeated. Use a DataLoader with num_workers >= 1, or "
                f"prefetch_batches=0, or a generator of the transform's own",
                stacklevel=2,
            )


_WATCHED = 3
"""Batches of a pass on which a transform is watched: who draws at all does it on these."""


def _uncast(kind: str) -> AbstractContextManager[object]:
    """Without autocast; where there is none, to say so would cost more than to ask."""
    on = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


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
