"""The table at the end, and the sentences under it. Pure: text and plain data, nothing printed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._options import ALONE, CEILING, Options
from benchmarks._summary import Estimate, Row, drift, estimate, ratios, steady
from benchmarks._timing import Block

__all__ = ["SUBJECT", "Run", "as_data", "bound", "columns", "report", "table", "verdict"]

AT_CEILING = 0.99
"""From this share on, the step is what bounds a loader."""

ALL_THEY_GIVE = 0.9
"""From this share of what the workers give alone on, they are what bounds a loader."""

SUBJECT = "stream"
"""Whom it is about."""

HEAD = (
    "loader",
    "img/s",
    "in all",
    "of the ceiling",
    "step ms",
    "next ms",
    "source",
    "device",
    "next us p10/50/90",
    "CPU ms",
    "others",
    "MB",
)

LEGEND = """\
  in all: the images of all blocks over their seconds; img/s is the median of the blocks' rates
  of the ceiling: its rate over that of the ceiling in the same round; in brackets, its interval
  next ms: wall time inside next(), a step; of which waited for the source, and for the device
  next us: percentiles of a single next(); the 10th is one that had little left to do
  CPU ms: a step's, of the training thread, and of all other threads of this process (no workers)
  MB: device memory that came on top when the loader was opened and stepped, model's included"""

LEGEND_ALONE = """
  alone: the workers' batches, drained as fast as they come, without copy or step"""


@dataclass(frozen=True)
class Run:
    """What was measured with one set of options.

    Attributes:
        options: Complete; of the loaders those that could be measured.
        rows: One for each loader.
        blocks: All, in order.
        absent: The loaders that could not be, each with the reason.
    """

    options: Options
    rows: Sequence[Row]
    blocks: Sequence[Block]
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def row(self, loader: str) -> Row | None:
        """The loader's row, if there is one."""
        return next((row for row in self.rows if row.loader == loader), None)


def report(run: Run, machine: dict[str, Any]) -> str:
    """All that a reader gets to see."""
    options, blocks = run.options, run.blocks
    legend = LEGEND + (LEGEND_ALONE if run.row(ALONE) else "")
    lines = [*_title(options, machine, run.rows[0]), ""]
    lines += [*table(run.rows, run.absent), "", legend, ""]
    lines += _against(options.loaders, blocks)
    lines += [_drift(*drift(blocks)), verdict(run)]
    if not options.overlaps:
        lines.append(
            "This was the CPU, which copies, transforms and steps by turns: overlap needs an "
            "accelerator."
        )
    return "\n".join(lines)


def _title(options: Options, machine: dict[str, Any], row: Row) -> list[str]:
    source = options.source
    source += "" if options.augment == "cpu" else f", --augment {options.augment}"
    source += f", every {options.late}th {options.late_ms:.1f} ms late" if options.late else ""
    what = f"{options.model}, {options.step} step, {options.batch_size} images of "
    what += f"{options.image_size} px from {source}, workers: {options.workers}"
    where = f"{machine['device']}, {machine['cpus']} CPUs, torch {machine['torch']}"
    length = f"{options.block_seconds:g} s" if options.steps is None else f"{options.steps} steps"
    how = f"{options.blocks} blocks of {length} each, in turns; medians, with "
    how += f"intervals that hold the true one in {row.rate.confidence:.1%} of runs"
    return [what, where, how]


def table(rows: Sequence[Row], absent: Mapping[str, str] | None = None) -> list[str]:
    """The rows under their heads, in columns, and those that are absent, with the reason."""
    absent = absent or {}
    lines = columns([HEAD, *map(_cells, rows)], least=max(map(len, absent), default=0))
    width = max(len(row.loader) for row in rows) if rows else 0
    width = max(width, len(HEAD[0]), *map(len, absent), 0)
    return [*lines, *(f"{name.ljust(width)}  {reason}" for name, reason in absent.items())]


def columns(cells: Sequence[Sequence[str]], least: int = 0) -> list[str]:
    """Lines of one width: the first column, at least `least` wide, to the left, others right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = max(widths[0], least)
    return ["  ".join(_aligned(line, widths)) for line in cells]


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if place else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.loader,
        f"{row.rate.median:,.0f}",
        f"{row.total_rate:,.0f}",
        _interval(row.share) if row.share else "1",
        f"{row.step_ms:.2f}",
        f"{row.next_ms:.3f}",
        _known(row.source_ms, 3),
        _known(row.device_ms, 3),
        " / ".join(f"{value:.0f}" for value in row.next_us),
        f"{row.thread_cpu_ms:.2f}",
        f"{row.other_cpu_ms:.2f}",
        _known(row.alone_mb, 0),
    )


def _known(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _interval(value: Estimate) -> str:
    return f"{value.median:.4f} [{value.low:.4f}, {value.high:.4f}]"


def _against(loaders: Sequence[str], blocks: Sequence[Block]) -> list[str]:
    """The subject over each of the others but the ceiling, by pairs of the same round."""
    others = [name for name in loaders if name not in (SUBJECT, CEILING)]
    if SUBJECT not in loaders:
        return []
    pairs = [(name, estimate(ratios(blocks, SUBJECT, name))) for name in others]
    return [f"{SUBJECT} / {name}: {_interval(value)}" for name, value in pairs]


def _drift(first: float, last: float) -> str:
    both = f"The first and the last ceiling, {first:,.0f} and {last:,.0f} img/s, "
    if steady(first, last):
        return both + "agree within 1 %."
    return both + (
        f"DIFFER by {abs(last / first - 1):.1%}, more than 1 %: this machine was not steady, and "
        f"nothing above is known better than that."
    )


def bound(run: Run) -> tuple[Row, str] | None:
    """The subject's row, or the fastest loader's where that was not measured, and what bounds it.

    That is "step", "workers" (which were measured alone), or "" where only its own account tells.
    None if only the ceiling was measured.
    """
    loaders = [(r, r.share) for r in run.rows if r.share is not None and r.loader != ALONE]
    if not loaders:
        return None
    row, share = min(loaders, key=lambda pair: (pair[0].loader != SUBJECT, -pair[1].median))
    if share.median >= AT_CEILING:
        return row, "step"
    alone = run.row(ALONE)
    if alone is None or alone.share is None or alone.share.median >= AT_CEILING:
        return row, ""
    return row, "workers" if row.rate.median >= ALL_THEY_GIVE * alone.rate.median else ""


def verdict(run: Run) -> str:
    """What bounds the subject, or the fastest loader where that was not measured."""
    found = bound(run)
    if found is None:
        return "Only the ceiling was measured."
    row, by = found
    share, alone = row.share.median if row.share else 1.0, run.row(ALONE)
    at = f"{row.loader} runs at {share:.3f} of the ceiling"
    if by == "workers" and alone:
        return _short(run, row, alone)
    return (f"The step bounds it: {at}." if by == "step" else _waits(row, at)) + _supply(run)


def _short(run: Run, row: Row, alone: Row) -> str:
    """The sentence where the workers give less than the step could take.

    What they do it for (disk, tar, decode, collate, the way to this process) was not measured.
    """
    workers, takes = run.options.workers, run.row(CEILING)
    step = takes.rate.median if takes else 0.0
    each = alone.rate.median / workers
    return (
        f"The workers bound it: {_give(workers)} {alone.rate.median:,.0f} img/s alone "
        f"({each:,.0f} each), the step takes {step:,.0f}; {row.loader} runs at "
        f"{row.rate.median:,.0f}, {row.rate.median / alone.rate.median:.3f} of what they give. If "
        f"rates add, {math.ceil(step / each)} workers would keep up, on as many free CPUs."
    )


def _supply(run: Run) -> str:
    """What the workers give beside that, if it was measured."""
    alone = run.row(ALONE)
    if alone is None:
        return ""
    rate, workers = alone.rate.median, run.options.workers
    return f" {_give(workers)} {rate:,.0f} img/s alone ({rate / workers:,.0f} each)."


def _give(workers: int) -> str:
    return "1 worker gives" if workers == 1 else f"{workers} workers give"


def _waits(row: Row, at: str) -> str:
    """The sentence where only the loader's own account tells."""
    if row.source_ms is None or row.share is None:
        return f"{at}, and {row.next_ms / row.step_ms:.1%} of its time is spent in next()."
    waited = row.source_ms / row.step_ms
    if waited >= (1 - row.share.median) / 2:
        return (
            f"The source bounds it: {at}, and {waited:.1%} of its time is "
            f"spent waiting for batches. More workers, or less work in each, would help."
        )
    return (
        f"What runs beside the step bounds it: {at}, and only {waited:.1%} of "
        f"its time is spent waiting for batches. The rest is Python, copies and the transform."
    )


def as_data(run: Run, machine: dict[str, Any]) -> dict[str, Any]:
    """The whole run, ready for JSON; of the times of single steps, those of the last round."""
    options, blocks = run.options, run.blocks
    settings = dataclasses.asdict(options)
    settings["json"] = settings["plot"] = None  # says nothing about what was measured
    pairs = [name for name in options.loaders if name not in (SUBJECT, CEILING)]
    against = {
        name: dataclasses.asdict(estimate(ratios(blocks, SUBJECT, name)))
        for name in pairs
        if SUBJECT in options.loaders
    }
    last = {b.loader: b.step_seconds for b in blocks if b.round == options.blocks - 1}
    return {
        "benchmark": "imagenet_shards",
        "machine": machine,
        "options": settings,
        "rows": [dataclasses.asdict(row) for row in run.rows],
        "absent": dict(run.absent),
        f"{SUBJECT}_over": against,
        "ceilings": drift(blocks),
        "verdict": verdict(run),
        "blocks": [_block_data(block) for block in blocks],
        "step_ms": {name: [round(s * 1e3, 2) for s in steps] for name, steps in last.items()},
    }


def _block_data(block: Block) -> dict[str, Any]:
    data = dataclasses.asdict(block) | {"images_per_second": block.rate}
    del data["step_seconds"]
    return data
