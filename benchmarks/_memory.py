"""The trials of races.py that measure memory. The GPU tests run the same.

The loops only launch: Python is done with a hundred steps before the device is with one. So what a
contestant allocates is bounded by its own rules alone. It is told in batches as the source has them
on the host, whatever the contestant makes of them. On the CPU there is nothing to measure, and
all is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks._setting import Setting, busy
from benchmarks._trials import Trial

__all__ = ["MEMORY", "Cycled", "Peak", "graph_step", "launch", "launched", "replayed", "reserved"]

Step: TypeAlias = Callable[[Sequence[Tensor]], None]

STEP_MS = 50.0
DISTINCT = 4
"""So many host batches go round."""

SIDE = 1182
"""Four such images fill 16 MiB but for 0.1 %: what the allocator rounds up to does not count."""

EPOCHS = 40
SETTLED = 3
"""From this epoch on memory should not grow."""

EPOCH_BATCHES = 8


@dataclass(frozen=True)
class Peak:
    """How much device memory there was.

    Attributes:
        batches: Bytes over those of one batch as the source has it: the same unit for all, also
            for one that hands out wider dtypes.
        unit: Bytes of that.
        saw: What was measured, in words.
    """

    batches: float
    unit: int
    saw: str = ""


class Cycled:
    """A few batches, round and round, without allocating.

    Args:
        batches: Those, alike in size.
        count: How many a pass has.
    """

    def __init__(self, batches: Sequence[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self._batches), self._count)

    @property
    def unit(self) -> int:
        """Bytes of one of them."""
        return sum(int(tensor.nbytes) for tensor in self._batches[0])


def launch(device: torch.device, batches: Iterable[Sequence[Tensor]], step: Step) -> int:
    """Runs a loop that only launches, and drops each batch.

    Memory counts from its allocation until it can be had again: "active" to torch. What it calls
    allocated leaves out what was dropped while another stream still reads it.

    Returns:
        The most beyond what there was before, in bytes.
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # after which nothing that was dropped still counts
        torch.cuda.reset_peak_memory_stats(device)
    before = _active(device, "current")
    for batch in batches:
        step(batch)
        del batch
    if cuda:
        torch.cuda.synchronize(device)
    return _active(device, "peak") - before


def _active(device: torch.device, when: str) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device)[f"active_bytes.all.{when}"])


def _source(setting: Setting, count: int) -> Cycled:
    large = Setting(setting.wrap, setting.device, setting.pinned, DISTINCT, _side(setting))
    return Cycled(large.pairs(), count)


def _side(setting: Setting) -> int:
    return SIDE if setting.device.type == "cuda" else setting.side


def _peak(setting: Setting, step: Step) -> Peak:
    source = _source(setting, setting.count)
    most = launch(setting.device, setting.wrap(source, None), step)
    said = f"{most / 1e6:.0f} MB for batches of {source.unit / 1e6:.1f} MB, {setting.count} steps"
    return Peak(most / source.unit, source.unit, said)


def launched(setting: Setting) -> Peak:
    """Peak memory of a loop that only launches steps of 50 ms, in batches."""

    def step(batch: Sequence[Tensor]) -> None:
        busy(setting.device, STEP_MS)
        batch[0].amax()

    return _peak(setting, step)


def replayed(setting: Setting) -> Peak:
    """The same with a step that is one launch of a CUDA graph."""
    return _peak(setting, graph_step(setting.device, STEP_MS))


def graph_step(device: torch.device, milliseconds: float) -> Step:
    """A step of so long, captured: it copies a few elements of a batch in, and replays."""
    static = torch.zeros(8, device=device)
    if device.type != "cuda":
        return lambda batch: _feed(static, batch)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        busy(device, milliseconds)
        static.mul_(2)

    def step(batch: Sequence[Tensor]) -> None:
        _feed(static, batch)
        graph.replay()

    return step


def _feed(static: Tensor, batch: Sequence[Tensor]) -> None:
    static.copy_(batch[0].view(-1)[: static.numel()])


def reserved(setting: Setting) -> Peak:
    """How much what torch reserves grows from epoch 3 to epoch 40, in batches."""
    cuda = setting.device.type == "cuda"
    source = _source(setting, EPOCH_BATCHES)
    loader, marks = setting.wrap(source, None), []
    for _ in range(EPOCHS):
        for images, labels in loader:
            busy(setting.device, 10)  # so that each epoch has as much in flight as there can be
            images.amax()
            del images, labels
        if cuda:
            torch.cuda.synchronize(setting.device)  # as a loop that prints its loss does
        marks.append(torch.cuda.memory_reserved(setting.device) if cuda else 0)
    grown = marks[-1] - marks[SETTLED - 1]
    said = f"{marks[SETTLED - 1] / 1e6:.0f} MB, then {marks[-1] / 1e6:.0f} MB"
    return Peak(grown / source.unit, source.unit, said)


MEMORY: dict[str, Trial] = {
    "peak": Trial(launched),
    "graph": Trial(replayed),
    "grown": Trial(reserved),
}
"""The columns that measure memory, in their order."""
