"""Where the time of a step goes: the host's by part, the GPU's by stream, and how much overlaps.

Profiling comes after all that is timed, on cells that are made again: CUPTI, once woken, slows
launches down for the rest of the process.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks._article_cell import Cell
from benchmarks._article_loops import Form, Taken, closed, take
from benchmarks._article_rungs import Rung

__all__ = ["Busy", "Profile", "Span", "busy", "profiled", "report"]

WARM, TIMED, TRACED = 6, 30, 12
"""Steps."""


class Span(NamedTuple):
    """One kernel, copy or fill on the GPU.

    Attributes:
        stream: On which it ran.
        begin: In microseconds.
        end: Likewise.
    """

    stream: int
    begin: float
    end: float


@dataclass(frozen=True)
class Busy:
    """How a stretch of time was used, all as shares of it.

    Attributes:
        busy: Something ran.
        overlap: Two streams or more ran something.
        streams: Each one's own share.
    """

    busy: float
    overlap: float
    streams: dict[int, float]


def busy(spans: Iterable[Span]) -> Busy:
    """Of the time from the first span's beginning to the last one's end."""
    events = sorted(
        event
        for span in spans
        for event in ((span.begin, 1, span.stream), (span.end, -1, span.stream))
    )
    if not events:
        return Busy(0.0, 0.0, {})
    running: dict[int, int] = {stream: 0 for _, _, stream in events}
    own = dict.fromkeys(running, 0.0)
    some = several = 0.0
    for (now, change, stream), (later, _, _) in itertools.pairwise([*events, events[-1]]):
        running[stream] += change
        active = [one for one, count in running.items() if count]
        for one in active:
            own[one] += later - now
        some += (later - now) * bool(active)
        several += (later - now) * (len(active) > 1)
    whole = (events[-1][0] - events[0][0]) or 1.0
    shares = {stream: spent / whole for stream, spent in sorted(own.items()) if spent}
    return Busy(some / whole, several / whole, shares)


@dataclass(frozen=True)
class Profile:
    """One rung's.

    Attributes:
        rung: Its name.
        step_ms: Wall time of a step.
        stage_ms: Of which the training thread spends in the stage's Python and launches ...
        train_ms: ... in the step's ...
        rest_ms: ... and elsewhere: in the loader, the loop, or waiting.
        launches: Kernels, copies and fills of a step; None where that is unknown.
        used: How the GPU's time was; None likewise.
    """

    rung: str
    step_ms: float
    stage_ms: float
    train_ms: float
    rest_ms: float
    launches: float | None = None
    used: Busy | None = None


class _Timer:
    """A callable, and the seconds spent in it."""

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.seconds = 0.0
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        assert self._function is not None
        start = time.perf_counter()
        result = self._function(*arguments)
        self.seconds += time.perf_counter() - start
        return result


def profiled(cell: Cell, rungs: Sequence[Rung]) -> list[Profile]:
    """A profile of each."""
    return [_profiled(cell, rung) for rung in rungs]


def _profiled(cell: Cell, rung: Rung) -> Profile:
    form, device = cell.forms[rung.form], cell.work.device
    stage, step, both = _Timer(form.stage), _Timer(form.step), _Timer(form.both)
    run = rung.loop(cell.work, Form(stage, step, both, form.fixed))
    take(run, WARM, device)
    for timer in (stage, step, both):
        timer.seconds = 0.0
    each = 1e3 / TIMED
    spent = take(run, TIMED, device) * each
    inside = stage.seconds * each, (step.seconds + both.seconds) * each
    spans = _spans(run, device) if device.type == "cuda" else []
    closed(run, device)
    rest = spent - sum(inside)
    known = (len(spans) / TRACED, busy(spans)) if spans else (None, None)
    return Profile(rung.name, spent, *inside, rest, *known)


def _spans(run: Iterator[Taken], device: torch.device) -> list[Span]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        take(run, TRACED, device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    return spans_of(trace["traceEvents"])


ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def spans_of(events: Iterable[dict[str, Any]]) -> list[Span]:
    """What ran on the GPU, from the events of a trace."""
    return [
        Span(int(event["args"]["stream"]), float(event["ts"]), float(event["ts"]) + event["dur"])
        for event in events
        if event.get("cat") in ON_GPU and "stream" in event.get("args", {})
    ]


def report(profiles: Sequence[Profile]) -> list[list[str]]:
    """Cells of a table."""
    head = ["rung", "ms", "stage", "step", "rest", "launches", "GPU busy", "overlap", "by stream"]
    return [head, *map(_cells, profiles)]


def _cells(one: Profile) -> list[str]:
    times = [f"{value:.3f}" for value in (one.step_ms, one.stage_ms, one.train_ms, one.rest_ms)]
    if one.used is None:
        return [one.rung, *times, "-", "-", "-", "-"]
    streams = " ".join(f"{share:.0%}" for share in one.used.streams.values())
    shares = [f"{one.used.busy:.1%}", f"{one.used.overlap:.1%}", streams]
    return [one.rung, *times, f"{one.launches or 0:.0f}", *shares]
