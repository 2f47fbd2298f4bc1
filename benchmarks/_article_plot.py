"""The picture: what runs beside the step over one stream in the same form, against the batch size.

A panel for each experiment. Full markers are sizes where the GPU is the bound, hollow ones those
where launching is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._article_rungs import DEPTHS, EXPERIMENTS
from benchmarks._article_summary import Result
from benchmarks._require import require

__all__ = ["LINES", "draw"]

LINES: Mapping[str, Mapping[str, Any]] = {
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
    size = (5 * len(known), 4.5)
    figure, panels = pyplot.subplots(1, len(known), figsize=size, squeeze=False)
    for axes, name in zip(panels[0], known, strict=True):
        _panel(axes, name, [result for result in results if result.experiment == name])
    panels[0][0].set_ylabel("rate over one stream, in the same form")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axes: Any, name: str, results: Sequence[Result]) -> None:
    ordered = sorted(results, key=lambda result: result.batch_size)
    for rung, style in LINES.items():
        found = [(r, row.over) for r in ordered if (row := r.row(rung)) and row.over]
        sizes, ratios = [r.batch_size for r, _ in found], [ratio for _, ratio in found]
        if not found:
            continue
        middle = [ratio.median for ratio in ratios]
        below = [ratio.median - ratio.low for ratio in ratios]
        above = [ratio.high - ratio.median for ratio in ratios]
        axes.errorbar(sizes, middle, yerr=[below, above], capsize=3, label=rung, **style)
        for result, ratio in found:
            face = style["color"] if result.gpu_bound else "white"
            place = {"x": [result.batch_size], "y": [ratio.median]}
            axes.scatter(**place, color=face, edgecolor=style["color"], zorder=3, s=25)
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    sizes = [result.batch_size for result in ordered]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size")
    axes.set_title(name, fontsize=9)
    axes.legend(fontsize=7)
