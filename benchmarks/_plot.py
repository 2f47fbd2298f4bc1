"""The picture: shares of the ceiling, every block behind them, and how long single steps took.

Of a sweep over workers it shows the rates, and the rest for the run with the most workers. A
loader has one colour in all panels and all pictures, that of its place in the table of recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._loaders import RECIPES
from benchmarks._options import ALONE, CEILING
from benchmarks._report import Run
from benchmarks._require import require
from benchmarks._summary import ratios

__all__ = ["colour", "draw", "longer"]


def draw(path: Path, title: str, runs: Sequence[Run]) -> None:
    """Writes the picture of a run, or of a sweep, in the format that the name of `path` says."""
    require("matplotlib").use("Agg")
    pyplot = require("matplotlib.pyplot")
    most = max(runs, key=lambda run: run.options.workers)
    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.5), width_ratios=(4, 3, 3))
    _bars(panels[0], most)
    if len(runs) > 1:
        _lines(panels[1], runs)
    else:
        _strip(panels[1], most)
    _steps(panels[2], most)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def colour(loader: str) -> str:
    """The loader's, in every panel."""
    fixed = {CEILING: "black", ALONE: "0.6"}
    return fixed.get(loader, f"C{list(RECIPES).index(loader)}" if loader in RECIPES else "C9")


def _bars(axes: Any, run: Run) -> None:
    shares = [(row.loader, row.share) for row in run.rows if row.share is not None]
    for place, (name, share) in enumerate(shares):
        error = [[share.median - share.low], [share.high - share.median]]
        axes.bar(place, share.median, width=0.6, yerr=error, capsize=4, color=colour(name))
        axes.text(place, 0.04 * share.median, f"{share.median:.3f}", ha="center", color="white")
    axes.axhline(1, color=colour(CEILING), linewidth=1, linestyle="--")
    axes.set_xticks(range(len(shares)), [name for name, _ in shares])
    axes.set_ylabel("share of the ceiling")
    axes.set_title(f"{run.options.workers} workers", fontsize=9)


def _strip(axes: Any, run: Run) -> None:
    for row in run.rows:
        if row.share is not None:
            shares = ratios(run.blocks, row.loader, CEILING)
            style = {"color": colour(row.loader), "label": row.loader}
            axes.plot(shares, marker="o", linewidth=0.7, **style)
    axes.set_xticks(range(run.options.blocks))
    axes.set_xlabel("round")
    axes.set_ylabel("share of the ceiling, block by block")
    _legend(axes)


def _lines(axes: Any, runs: Sequence[Run]) -> None:
    ordered = sorted(runs, key=lambda run: run.options.workers)
    for name in dict.fromkeys(row.loader for run in ordered for row in run.rows):
        found = [(run.options.workers, row) for run in ordered if (row := run.row(name))]
        workers, rates = [w for w, _ in found], [row.rate for _, row in found]
        middle = [rate.median for rate in rates]
        below = [rate.median - rate.low for rate in rates]
        above = [rate.high - rate.median for rate in rates]
        style = {"linestyle": "--"} if name == CEILING else {"marker": "o"}
        style |= {"color": colour(name), "label": name}
        axes.errorbar(workers, middle, yerr=[below, above], capsize=3, linewidth=1, **style)
    axes.set_xticks([run.options.workers for run in ordered])
    axes.set_xlabel("workers")
    axes.set_ylabel("img/s")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _steps(axes: Any, run: Run) -> None:
    for row in run.rows:
        own = [b.step_seconds for b in run.blocks if b.loader == row.loader and b.round is not None]
        times, shares = longer([seconds for block in own for seconds in block])
        if times and row.loader != ALONE:
            axes.step(times, shares, where="post", color=colour(row.loader), label=row.loader)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(require("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("ms, from one next() to the next; stalls are to the right")
    axes.set_ylabel("share of steps that take longer")
    _legend(axes)


def longer(seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Step times in milliseconds, sorted, and the share of steps that take at least as long."""
    ordered = sorted(seconds)
    count = len(ordered)
    return [value * 1e3 for value in ordered], [1 - place / count for place in range(count)]


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
