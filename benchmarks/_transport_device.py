"""What a copy to the device costs: from a slab of shared memory, and of many small tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from streamloader import StreamLoader
from streamloader.device import resolve
from streamloader.shared import Shape, Shared

__all__ = ["measured"]

MIB = 1 << 20
SIZES = (32, 64, 128)
COPIES = 40
ROUNDS = 9
BATCHES = 60


def measured(device: torch.device, small: Mapping[str, Tensor]) -> dict[str, float]:
    """The ratios, and the milliseconds and gigabytes a second behind them."""
    found: dict[str, float] = {}
    for size in SIZES:
        shared, torchs = _link(device, size * MIB)
        found[f"link {size} MiB: slab GB/s"] = shared
        found[f"link {size} MiB: slab over torch's"] = shared / torchs
    ms = _many(device, small)
    found |= {f"many: {name} ms": value for name, value in ms.items()}
    found["many: each pageable over stream"] = ms["each, pageable"] / ms["stream"]
    found["many: each pinned over stream"] = ms["each, pinned"] / ms["stream"]
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
    batches = [{name: tensor.clone() for name, tensor in small.items()} for _ in range(4)]
    pinned = [{n: t.pin_memory() for n, t in batch.items()} for batch in batches]
    stream = StreamLoader([*batches] * (BATCHES // 4), device)

    def each(source: list[dict[str, Tensor]], *, non_blocking: bool) -> None:
        for batch in source * (BATCHES // 4):
            moved: Any = {n: t.to(device, non_blocking=non_blocking) for n, t in batch.items()}
            del moved

    def streamed() -> None:
        for _ in stream:
            pass

    runs: dict[str, Callable[[], None]] = {
        "stream": streamed,
        "each, pageable": lambda: each(batches, non_blocking=False),
        "each, pinned": lambda: each(pinned, non_blocking=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name, run in runs.items():
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            run()
            torch.accelerator.synchronize(device)
            if number:
                taken[name].append((time.perf_counter() - start) / BATCHES * 1e3)
    return {name: statistics.median(values) for name, values in taken.items()}
