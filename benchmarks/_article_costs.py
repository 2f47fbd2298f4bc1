"""What each half costs by itself: of the GPU, and of the host to launch it."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import _setting
from benchmarks._article_lanes import Lane, synchronize
from benchmarks._article_loops import Form, Work
from benchmarks._augment_timing import Cost, block

__all__ = ["Costs", "Half", "bound", "costs", "gpu_ms", "host_ms"]

REPETITIONS = 3
"""Of a timed block: a step has more than a hundred launches, and a queue holds about a thousand."""

BLOCKS = 5
ASLEEP_MS = 15.0


@dataclass(frozen=True)
class Half:
    """One half of the work, in one form.

    Attributes:
        gpu_ms: GPU time, launches queued ahead. On the CPU its wall time.
        host_ms: To launch it, while the GPU is kept waiting. On the CPU the same again.
    """

    gpu_ms: float
    host_ms: float


@dataclass(frozen=True)
class Costs:
    """What a size's halves cost.

    Attributes:
        copy_ms: To copy a batch from pinned memory, nothing beside it.
        launches: Whether the host launches and goes on, as it does for a GPU.
        stage: By form: "eager", and "graphed" where there are graphs.
        step: Likewise.
        beside: GPU time of both at once, on two streams, each with what it needs at hand; likewise.
    """

    copy_ms: float
    launches: bool
    stage: Mapping[str, Half]
    step: Mapping[str, Half]
    beside: Mapping[str, float] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def costs(work: Work, forms: Mapping[str, Form]) -> Costs:
    """Measures them."""
    device, host = work.device, work.pinned[0]
    images = host[0].to(device)
    known = [name for name in ("eager", "graphed") if name in forms]

    def copy() -> object:
        return [tensor.to(device, non_blocking=True) for tensor in host]

    with torch.no_grad():
        stages = {
            name: _half(functools.partial(forms[name].stage, images), device) for name in known
        }
    steps = {
        name: _half(functools.partial(forms[name].step, *work.resident), device) for name in known
    }
    beside = {name: _beside(forms[name], images, work) for name in known}
    return Costs(gpu_ms(copy, device), device.type == "cuda", stages, steps, beside)


def _beside(form: Form, images: Tensor, work: Work) -> float:
    """What the GPU has room for, whoever queues it: the stage beside a step of another batch."""
    current, side = Lane.current(work.device), Lane.new(work.device)

    def both() -> None:
        side.wait(current)
        with side.on(), torch.no_grad():
            form.stage(images)
        form.step(*work.resident)
        current.wait(side)

    return gpu_ms(both, work.device)


def _half(work: Callable[[], object], device: torch.device) -> Half:
    return Half(gpu_ms(work, device), host_ms(work, device))


def gpu_ms(work: Callable[[], object], device: torch.device) -> float:
    """GPU milliseconds, behind a GPU that sleeps until they are queued; on the CPU wall time."""
    for _ in range(2):
        work()
    launched = host_ms(work, device, times=1)
    known = Cost(None, None, launched, None, REPETITIONS, 0.0)
    return statistics.median(block(lambda _: work(), known, device) for _ in range(BLOCKS))


def host_ms(work: Callable[[], object], device: torch.device, times: int = 7) -> float:
    """Milliseconds until it is launched, while the GPU does something else; the median."""
    spent = []
    for _ in range(times):
        synchronize(device)
        _setting.busy(device, ASLEEP_MS)
        start = time.perf_counter()
        work()
        spent.append((time.perf_counter() - start) * 1e3)
    synchronize(device)
    return statistics.median(spent)


def bound(found: Costs, form: str, *, stages: bool) -> str:
    """What takes longer: the "GPU", or "launches", by the host; "-" if that is unknown.

    Args:
        found: What was measured.
        form: Of a rung.
        stages: Whether it runs the stage too.
    """
    stage = {"eager": "eager", "stage": "graphed", "graphed": "graphed"}.get(form, "unknown")
    step = "graphed" if form == "graphed" else "eager"
    if stage not in found.stage or not found.launches:
        return "-"
    halves = [found.step[step], *([found.stage[stage]] if stages else [])]
    host, gpu = sum(half.host_ms for half in halves), sum(half.gpu_ms for half in halves)
    return "GPU" if host < gpu else "launches"
