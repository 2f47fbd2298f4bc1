"""What the ladder's blocks say: rates, and ratios within rounds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks._article_costs import Costs, bound
from benchmarks._article_equal import Balance
from benchmarks._article_rungs import Rung, singles
from benchmarks._article_timing import Block
from benchmarks._summary import Estimate, estimate

__all__ = ["Result", "Row", "as_data", "best_single", "over", "rows"]


@dataclass(frozen=True)
class Result:
    """One size of one experiment.

    Attributes:
        experiment: Of `EXPERIMENTS`.
        batch_size: Images.
        rungs: Those measured.
        absent: The others, each with the reason.
        costs: Of the halves.
        blocks: Of complete rounds.
        balance: Where the halves were made equal.
    """

    experiment: str
    batch_size: int
    rungs: Sequence[Rung]
    absent: Mapping[str, str]
    costs: Costs
    blocks: Sequence[Block]
    balance: Balance | None = None

    @property
    def rounds(self) -> int:
        """How many are complete."""
        return len({block.round for block in self.blocks})

    @property
    def gpu_bound(self) -> bool:
        """Whether launching both halves, eager, takes less time than they take the GPU."""
        return bound(self.costs, "eager", stages=True) == "GPU"

    def row(self, name: str) -> Row | None:
        """The rung's row; None if it was not measured."""
        return next((row for row in rows(self) if row.rung.name == name), None)


@dataclass(frozen=True)
class Row:
    """One rung's figures.

    Attributes:
        rung: Which.
        rate: Steps a second.
        over: Over the rung of one stream in the same form; None for those themselves and ceilings.
        best: Over the best rung of one stream, whatever its form; None for ceilings.
        share: Of the ceiling of the same form; None for ceilings.
        bound: What bounds it: see `_article_costs.bound`.
    """

    rung: Rung
    rate: Estimate
    over: Estimate | None
    best: Estimate | None
    share: Estimate | None
    bound: str


def over(blocks: Sequence[Block], rung: str, other: str) -> list[float]:
    """`rung`'s rate over `other`'s, round by round; empty if one of them was not measured."""
    rates = {(block.rung, block.round): block.rate for block in blocks}
    numbers = sorted(number for name, number in rates if name == rung)
    return [rates[rung, n] / rates[other, n] for n in numbers if (other, n) in rates]


def best_single(blocks: Sequence[Block], rungs: Sequence[Rung]) -> str | None:
    """The rung of one stream with the highest median rate."""
    rates: dict[str, float] = {}
    for name in singles(rungs):
        own = [block.rate for block in blocks if block.rung == name]
        if own:
            rates[name] = statistics.median(own)
    return max(rates, key=rates.__getitem__, default=None)


def rows(result: Result) -> list[Row]:
    """One for each rung, in the ladder's order."""
    best = best_single(result.blocks, result.rungs)
    return [_row(result, rung, best) for rung in result.rungs]


def _row(result: Result, rung: Rung, best: str | None) -> Row:
    blocks, runs = result.blocks, rung.base is not None
    return Row(
        rung=rung,
        rate=estimate([block.rate for block in blocks if block.rung == rung.name]),
        over=_ratio(blocks, rung.name, None if rung.single else rung.base),
        best=_ratio(blocks, rung.name, best if runs else None),
        share=_ratio(blocks, rung.name, rung.ceiling if runs else None),
        bound=bound(result.costs, rung.form, stages=runs),
    )


def _ratio(blocks: Sequence[Block], rung: str, other: str | None) -> Estimate | None:
    found = over(blocks, rung, other) if other else []
    return estimate(found) if found else None


def as_data(result: Result) -> dict[str, Any]:
    """All of it, ready for JSON."""
    balance = result.balance
    return {
        "experiment": result.experiment,
        "batch_size": result.batch_size,
        "rounds": result.rounds,
        "gpu_bound": result.gpu_bound,
        "best_single": best_single(result.blocks, result.rungs),
        "costs": result.costs.as_data(),
        "balance": asdict(balance) | {"ratio": balance.ratio} if balance else None,
        "rows": [_row_data(row, result.batch_size) for row in rows(result)],
        "absent": dict(result.absent),
        "blocks": [asdict(block) | {"steps_per_second": block.rate} for block in result.blocks],
    }


def _row_data(row: Row, batch_size: int) -> dict[str, Any]:
    pairs = {"over_one_stream": row.over, "over_best": row.best, "share_of_ceiling": row.share}
    return {
        "rung": row.rung.name,
        "about": row.rung.about,
        "form": row.rung.form,
        "steps_per_second": asdict(row.rate),
        "images_per_second": row.rate.median * batch_size,
        **{name: value and asdict(value) for name, value in pairs.items()},
        "bound_by": row.bound,
    }
