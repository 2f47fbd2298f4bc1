"""What an augmentation of a batch takes: of the GPU, of Python, and how many kernels.

NOTE [GPU time]
~~~~~~~~~~~~~~~
A block is some repetitions, queued while the GPU sleeps and timed by two events around them, so
that Python's time does not show, unless there is more to queue than a queue holds (about a
thousand launches): then it does, and `Cost.device_ms`, the kernels' own time added up, is lower.
The batches that take turns are larger together than the L2 cache, which is not flushed beyond that.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType

from benchmarks._augmentations import Run

__all__ = ["Cost", "block", "cost", "kernel_facts"]

BLOCK_SECONDS = 0.02
MOST = 40
"""So long a block should last, and so many repetitions it has at most."""

QUEUE = 500
"""More launches than this are not queued ahead of the GPU."""

SLEEP_MS, MOST_SLEEP_MS = 4.0, 40.0
CYCLES_PER_MS = 1.7e6
PYTHON_CALLS = 9


@dataclass(frozen=True)
class Cost:
    """What does not change from block to block.

    Attributes:
        launches: Kernels, copies and fills of a batch; None where that is unknown.
        device_ms: Their own times, added up; None likewise.
        python_ms: From the call to its return, while the GPU is busy; the median of a few.
        waits: Whether the call waits for the GPU; None where that is unknown.
        repetitions: Of a block.
        first_s: Seconds that the first call took: compilation.
    """

    launches: int | None
    device_ms: float | None
    python_ms: float
    waits: bool | None
    repetitions: int
    first_s: float


def cost(run: Run, device: torch.device) -> Cost:
    """Warms up, and measures once what needs no rounds."""
    start = time.perf_counter()
    run(0)
    _synchronize(device)
    first = time.perf_counter() - start
    for number in range(1, 4):
        run(number)
    _synchronize(device)
    start = time.perf_counter()
    run(4)
    _synchronize(device)
    repetitions = min(MOST, max(1, round(BLOCK_SECONDS / (time.perf_counter() - start))))
    cuda = device.type == "cuda"
    launches, device_ms = _profiled(run) if cuda else (None, None)
    waits = _waits(run) if cuda else None
    asleep = cuda and not waits and (launches or 0) <= QUEUE
    python = statistics.median(_python(run, n, device, asleep=asleep) for n in range(PYTHON_CALLS))
    return Cost(launches, device_ms, python * 1e3, waits, repetitions, first)


def block(run: Run, known: Cost, device: torch.device) -> float:
    """Milliseconds of GPU time a batch; on the CPU, of wall time. See NOTE [GPU time]."""
    numbers = range(known.repetitions)
    if device.type != "cuda":
        start = time.perf_counter()
        for number in numbers:
            run(number)
        return (time.perf_counter() - start) / known.repetitions * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    _sleep(min(SLEEP_MS + known.python_ms * known.repetitions, MOST_SLEEP_MS))
    begin.record()
    for number in numbers:
        run(number)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / known.repetitions


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sleep(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))  # noqa: SLF001  # torch's own tests use it


def _python(run: Run, number: int, device: torch.device, *, asleep: bool) -> float:
    _synchronize(device)
    if asleep:
        _sleep(SLEEP_MS)
    start = time.perf_counter()
    run(number)
    return time.perf_counter() - start


def _profiled(run: Run) -> tuple[int, float]:
    """How many things the GPU does for a batch, and their milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run(5)
        torch.cuda.synchronize()
    done = [e for e in profile.events() or () if _on_device(e)]
    return len(done), sum(event.time_range.elapsed_us() for event in done) / 1e3


def _on_device(event: Any) -> bool:
    on_gpu = event.device_type == DeviceType.CUDA
    return on_gpu and not getattr(event, "is_user_annotation", False) and "## " not in event.name


def _waits(run: Run) -> bool:
    """Whether the call waits for the GPU, as far as torch tells.

    Raises:
        RuntimeError: What it raised was about something else.
    """
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # of the mode itself: it is a prototype
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(6)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
    return False


def kernel_facts() -> list[dict[str, Any]]:
    """Registers and spills of the kernels that were compiled so far, as far as Triton tells."""
    from streamloader.augment import kernels  # noqa: PLC0415  # it imports Triton

    caches = getattr(kernels.carry_out, "device_caches", {})
    compiled = [one for cache in caches.values() for one in cache[0].values()]
    return [
        {
            "registers": getattr(one, "n_regs", None),
            "spills": getattr(one, "n_spills", None),
            "shared": getattr(one.metadata, "shared", None),
            "warps": getattr(one.metadata, "num_warps", None),
        }
        for one in compiled
    ]
