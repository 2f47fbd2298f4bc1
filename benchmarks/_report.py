"""The table at the end, and the sentences under it. Pure: text and plain data, nothing printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks._options import CEILING, Options
from benchmarks._summary import Estimate, Row, drift, estimate, ratios, steady
from benchmarks._timing import Block

__all__ = ["as_data", "report", "table", "verdict"]

AT_CEILING = 0.99
"""From this share on, the step is what bounds a loader."""

SUBJECT = "stream"
"""Whom it is about."""

HEAD = (
    "loader",
    "img/s",
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
  of the ceiling: its rate over that of the ceiling in the same round; in brackets, its interval
  next ms: wall time inside next(), a step; of which waited for the source, and for the device
  next us: percentiles of a single next(); the 10th is one that had little left to do
  CPU ms: a step's, of the training thread, and of all other threads of this process (no workers)
  MB: device memory that came on top when the loader was opened and stepped, model's included"""


def report(
    options: Options, machine: dict[str, Any], rows: Sequence[Row], blocks: Sequence[Block]
) -> str:
    """All that a reader gets to see."""
    lines = [*_title(options, machine, rows[0]), "", *table(rows), "", LEGEND, ""]
    lines += _against(options.loaders, blocks)
    lines += [_drift(*drift(blocks)), verdict(rows)]
    if not options.overlaps:
        lines.append(
            "This was the CPU, which copies, transforms and steps by turns: overlap needs an "
            "accelerator."
        )
    return "\n".join(lines)


def _title(options: Options, machine: dict[str, Any], row: Row) -> list[str]:
    late = f", every {options.late}th {options.late_ms:.1f} ms late" if options.late else ""
    what = f"{options.model}, {options.step} step, {options.batch_size} images of "
    what += f"{options.image_size} px from {options.source}{late}, workers: {options.workers}"
    where = f"{machine['device']}, {machine['cpus']} CPUs, torch {machine['torch']}"
    how = f"{options.blocks} blocks of {options.steps} steps each, in turns; medians, with "
    how += f"intervals that hold the true one in {row.rate.confidence:.1%} of runs"
    return [what, where, how]


def table(rows: Sequence[Row]) -> list[str]:
    """The rows under their heads, in columns."""
    cells = [HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
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


def verdict(rows: Sequence[Row]) -> str:
    """What bounds the subject, or the fastest loader where that was not measured."""
    loaders = [(row, row.share) for row in rows if row.share is not None]
    if not loaders:
        return "Only the ceiling was measured."
    row, share = min(loaders, key=lambda pair: (pair[0].loader != SUBJECT, -pair[1].median))
    at = f"{row.loader} runs at {share.median:.3f} of the ceiling"
    if share.median >= AT_CEILING:
        return f"The step bounds it: {at}."
    if row.source_ms is None:
        return f"{at}, and {row.next_ms / row.step_ms:.1%} of its time is spent in next()."
    lost = 1 - share.median
    if row.source_ms / row.step_ms >= lost / 2:
        return (
            f"The source bounds it: {at}, and {row.source_ms / row.step_ms:.1%} of its time is "
            f"spent waiting for batches. More workers, or less work in each, would help."
        )
    return (
        f"What runs beside the step bounds it: {at}, and only {row.source_ms / row.step_ms:.1%} of "
        f"its time is spent waiting for batches. The rest is Python, copies and the transform."
    )


def as_data(
    options: Options, machine: dict[str, Any], rows: Sequence[Row], blocks: Sequence[Block]
) -> dict[str, Any]:
    """The whole run, ready for JSON."""
    settings = dataclasses.asdict(options)
    settings["json"] = settings["plot"] = None  # says nothing about what was measured
    pairs = [name for name in options.loaders if name not in (SUBJECT, CEILING)]
    against = {
        name: dataclasses.asdict(estimate(ratios(blocks, SUBJECT, name)))
        for name in pairs
        if SUBJECT in options.loaders
    }
    return {
        "benchmark": "imagenet_shards",
        "machine": machine,
        "options": settings,
        "rows": [dataclasses.asdict(row) for row in rows],
        f"{SUBJECT}_over": against,
        "ceilings": drift(blocks),
        "blocks": [dataclasses.asdict(b) | {"images_per_second": b.rate} for b in blocks],
    }
