"""The picture: what runs beside the step over one stream in the same form, against the batch size.

A panel for each experiment. Full markers are sizes at which the GPU bounds that form, hollow ones
those at which launching does. The ceiling is what an eager step would gain if the stage were free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._article_rungs import CEILING, DEPTHS, EXPERIMENTS, ONE
from benchmarks._article_summary import Result, Row, over
from benchmarks._require import require
from benchmarks._summary import Estimate, estimate

__all__ = ["LINES", "draw"]

LINES: Mapping[str, Mapping[str, Any]] = {
    CEILING: {"color": "black", "linestyle": "--", "linewidth": 0.8},
    "3 by hand": {"color": "0.5", "linestyle": ":"},
    **{
        f"4 StreamLoader, depth {depth}": {"color": "C0", "alpha": 0.25 + 0.25 * place}
        for place, depth in enumerate(DEPTHS)
    },
    "5 StreamLoader, depth 2, stage graphed": {"color": "C1"},
    "5 StreamLoader, depth 2, both graphed": {"color": "C2"},
}
"""The rungs that are drawn, and how."""


def draw(path: Path, title: str, results: Sequence[Result]) -> None:
    """Writes the picture in the format that the name of `path` says."""
    require("matplotlib").use("Agg")
    pyplot = require("matplotlib.pyplot")
    known = [name for name in EXPERIMENTS if any(r.experiment == name for r in results)]
    size = (5 * len(known), 5)
    figure, panels = pyplot.subplots(1, len(known), figsize=size, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, name in zip(panels[0], known, strict=True):
        handles |= _panel(axes, name, [result for result in results if result.experiment == name])
    panels[0][0].set_ylabel("rate over one stream, in the same form")
    how = "full markers: bound by the GPU; hollow: by launches"
    figure.suptitle(f"{title}; {how}", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axes: Any, name: str, results: Sequence[Result]) -> dict[str, Any]:
    """Draws one, and returns its lines by the names of their rungs."""
    ordered = sorted(results, key=lambda result: result.batch_size)
    sizes = [result.batch_size for result in ordered]
    found = {rung: _line(axes, rung, ordered) for rung in LINES}
    axes.axhline(1, color="0.7", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size")
    axes.set_title(name, fontsize=9)
    return {rung: line for rung, line in found.items() if line is not None}


def _line(axes: Any, rung: str, results: Sequence[Result]) -> Any:
    style = LINES[rung]
    rows = [(result.batch_size, row) for result in results if (row := result.row(rung))]
    known = [(size, row, _ratio(results, size, row)) for size, row in rows]
    points = [(size, row, ratio) for size, row, ratio in known if ratio]
    if not points:
        return None
    sizes, middle = [size for size, _, _ in points], [ratio.median for _, _, ratio in points]
    below = [ratio.median - ratio.low for _, _, ratio in points]
    above = [ratio.high - ratio.median for _, _, ratio in points]
    line = axes.errorbar(sizes, middle, yerr=[below, above], capsize=3, **style)
    for size, row, ratio in points if rung != CEILING else ():
        face = style["color"] if row.bound == "GPU" else "white"
        axes.scatter([size], [ratio.median], color=face, edgecolor=style["color"], zorder=3, s=25)
    return line


def _ratio(results: Sequence[Result], size: int, row: Row) -> Estimate | None:
    """Over one stream; of the ceiling, which has no such rung in its row, over the eager one."""
    if row.rung.name != CEILING:
        return row.over
    blocks = next(result.blocks for result in results if result.batch_size == size)
    return estimate(over(blocks, CEILING, ONE))
