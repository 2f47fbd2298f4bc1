"""The picture: shares of the ceiling with their intervals, and every block behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._options import CEILING
from benchmarks._require import require
from benchmarks._summary import Row, ratios
from benchmarks._timing import Block

__all__ = ["draw"]


def draw(path: Path, title: str, rows: Sequence[Row], blocks: Sequence[Block]) -> None:
    """Writes the picture, in the format that the name of `path` says."""
    require("matplotlib").use("Agg")
    pyplot = require("matplotlib.pyplot")
    figure, (bars, strip) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2))
    _bars(bars, rows)
    _strip(strip, [row.loader for row in rows if row.share is not None], blocks)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    shares = [(row.loader, row.share) for row in rows if row.share is not None]
    for place, (_, share) in enumerate(shares):
        error = [[share.median - share.low], [share.high - share.median]]
        axes.bar(place, share.median, width=0.6, yerr=error, capsize=4, color=f"C{place}")
        axes.text(place, 0.02, f"{share.median:.3f}", ha="center", color="white")
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(shares)), [name for name, _ in shares])
    axes.set_ylabel("share of the ceiling")


def _strip(axes: Any, names: Sequence[str], blocks: Sequence[Block]) -> None:
    for place, name in enumerate(names):
        shares = ratios(blocks, name, CEILING)
        axes.plot(shares, marker="o", linewidth=0.7, color=f"C{place}", label=name)
    axes.set_xlabel("round")
    axes.set_ylabel("share of the ceiling, block by block")
    if names:
        axes.legend(fontsize=8)
