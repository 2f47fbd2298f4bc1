"""Several runs that differ in their number of workers, side by side. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks._options import ALONE, CEILING
from benchmarks._report import Run, bound, columns, verdict
from benchmarks._summary import Row

__all__ = ["as_data", "report"]


def report(runs: Sequence[Run]) -> list[str]:
    """The table, a line for each number of workers, and the sentences of what bounds each."""
    loaders = list(dict.fromkeys(row.loader for run in runs for row in run.rows))
    rest = [name for name in loaders if name not in (ALONE, CEILING)]
    supply = [ALONE] if ALONE in loaders else []
    heads = ("workers", *(f"{name} img/s" for name in supply), *(["each"] if supply else []))
    cells = [(*heads, *rest, CEILING, "bound by")]
    for run in runs:
        given = [row for name in supply if (row := run.row(name))]
        alone = [f"{row.rate.median:,.0f}" for row in given]
        alone += [f"{row.rate.median / run.options.workers:,.0f}" for row in given]
        rates = [_rate(run.row(name)) for name in (*rest, CEILING)]
        cells.append((str(run.options.workers), *alone, *rates, _bound(run)))
    missing = {name: reason for run in runs for name, reason in run.absent.items()}
    return [
        "img/s of each loader, and its share of the ceiling of the same rounds",
        *columns(cells),
        *(f"{name}: {reason}" for name, reason in missing.items()),
        *(f"workers: {run.options.workers}. {verdict(run)}" for run in runs),
    ]


def _rate(row: Row | None) -> str:
    if row is None:
        return "-"
    share = f" ({row.share.median:.3f})" if row.share else ""
    return f"{row.rate.median:,.0f}{share}"


def _bound(run: Run) -> str:
    """What bounds the loader that the verdict is about, in a word or two."""
    found = bound(run)
    if found is None:
        return "-"
    return {"step": "the step", "workers": "the workers"}.get(found[1], "see below")


def as_data(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All runs in one, ready for JSON."""
    workers = [run["options"]["workers"] for run in runs]
    return {"benchmark": "imagenet_shards", "workers": workers, "sweep": list(runs)}
