"""What a copy to the device costs: from a slab of shared memory, and of many small tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from streamloader import StreamLoader
from streamloader.context import Context
from streamloader.device import resolve
from streamloader.pack import Packer
from streamloader.region import Region
from streamloader.sent import packed, wanted
from streamloader.shared import Shape, Shared
from streamloader.stages import Pipeline

__all__ = ["measured"]

MIB = 1 << 20
SIZES = (32, 64, 128)
COPIES = 40
ROUNDS = 9
BATCHES = 20
SLAB = 4 * MIB


def measured(device: torch.device, small: Mapping[str, Tensor]) -> dict[str, float]:
    """The ratios, and the milliseconds and gigabytes a second behind them."""
    found: dict[str, float] = {}
    for size in SIZES:
        shared, torchs = _link(device, size * MIB)
        found[f"link {size} MiB: slab GB/s"] = shared
        found[f"link {size} MiB: slab over torch's"] = shared / torchs
    ms = _many(device, small)
    found |= {f"many: {name} ms": value for name, value in ms.items()}
    for source in ("slab", "list"):
        for each in ("pageable", "pinned"):
            found[f"many: each {each} over {source}"] = ms[f"each, {each}"] / ms[f"from a {source}"]
    return found


def _link(device: torch.device, nbytes: int) -> tuple[float, float]:
    """GB/s from a slab that is pinned where it lies, and from memory that torch has pinned."""
    seam = resolve(device)
    region = Shared(Shape(1, 1, nbytes))
    region.pin(0, nbytes, seam.pin)
    slab = region.received(0)
    torchs = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    slab.fill_(1), torchs.fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates: dict[str, list[float]] = {"slab": [], "torch": []}
    for _ in range(ROUNDS):
        for name, source in (("slab", slab), ("torch", torchs)):
            seconds = _timed(target, source)
            rates[name].append(nbytes * COPIES / seconds / 1e9)
    return statistics.median(rates["slab"]), statistics.median(rates["torch"])


def _timed(target: Tensor, source: Tensor) -> float:
    torch.accelerator.synchronize(target.device)
    start = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize(target.device)
    return time.perf_counter() - start


def _many(device: torch.device, small: Mapping[str, Tensor]) -> dict[str, float]:
    """Milliseconds a batch, all of it on the device."""
    batches = [{name: tensor.clone() for name, tensor in small.items()} for _ in range(BATCHES)]
    pinned = [{n: t.pin_memory() for n, t in batch.items()} for batch in batches]
    stream = StreamLoader(batches, device)
    slabs = _Slabs(device, batches)

    def streamed() -> None:
        for _ in stream:
            pass

    runs: dict[str, Callable[[], None]] = {
        "from a slab": slabs.sent,
        "from a list": streamed,
        "each, pageable": lambda: _each(batches, device, non_blocking=False),
        "each, pinned": lambda: _each(pinned, device, non_blocking=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        slabs.fill()
        for name, run in runs.items():
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            run()
            torch.accelerator.synchronize(device)
            if number:
                taken[name].append((time.perf_counter() - start) / BATCHES * 1e3)
    return {name: statistics.median(values) for name, values in taken.items()}


def _each(
    batches: Sequence[Mapping[str, Tensor]], device: torch.device, *, non_blocking: bool
) -> None:
    for batch in batches:
        moved = {n: t.to(device, non_blocking=non_blocking) for n, t in batch.items()}
        del moved


class _Slabs:
    """Batches as workers leave them in the queue, and what this process does with them.

    Args:
        device: Where they go.
        batches: What they are.
    """

    def __init__(self, device: torch.device, batches: Sequence[Any]) -> None:
        self._batches = batches
        self._device = resolve(device)
        self._shared = Shared(Shape(1, len(batches), SLAB))
        region = Region(self._shared, len(batches))
        self._region, self._pipeline = region, Pipeline(self._device, ())
        self._pack = Packer(self._device, lambda _, __: None, True, False, region=region)  # noqa: FBT003
        self._queue: list[bytes] = []

    def fill(self) -> None:
        """What a worker does, which takes its own time.

        Raises:
            RuntimeError: A slab was not given back.
        """
        for batch in self._batches:
            slab = self._shared.take(0)
            if slab is None:
                raise RuntimeError("a slab was not given back")
            self._queue.append(ForkingPickler.dumps(packed(batch, slab, self._shared)).tobytes())

    def sent(self) -> None:
        """Unpickles, packs, pins, sends and hands over each."""
        context = Context(0, 0, 0, 0)
        loans = []
        for pickled in self._queue:
            with wanted():
                batch = self._pack(0, ForkingPickler.loads(pickled), lambda: False)
            assert batch is not None
            assert batch.sent is not None
            self._region.ready(batch.sent, self._device)
            loans.append(batch.sent)
            self._pipeline.send(batch)
            self._pipeline.hand_over(batch, context)
        torch.accelerator.synchronize(self._device.device)  # before slabs are given back
        self._queue.clear()
