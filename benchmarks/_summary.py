"""What the blocks say: medians over blocks, and how far they can be trusted. Pure.

NOTE [Intervals]
~~~~~~~~~~~~~~~~
An interval for a median over n blocks goes from the k-th smallest to the k-th largest value, with
the largest k for which it still holds the true median in at least 95 % of runs. This is exact for
any distribution, as it counts only on which side of the median a block falls: for 7 blocks it is
smallest to largest (98.4 %), for 9 the second of each (96.1 %). Fewer than 6 blocks cannot give
95 %: the interval is then smallest to largest, and says what it holds. Bootstrapping a median of so
few blocks would promise more than it keeps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks._timing import Block

__all__ = ["Estimate", "Row", "drift", "estimate", "ratios", "rows", "steady"]

CONFIDENCE = 0.95

STEADY = 0.01
"""By how much the first and the last ceiling may differ."""


@dataclass(frozen=True)
class Estimate:
    """A median over blocks.

    Attributes:
        median: Of the blocks' values.
        low: Lower end of its interval.
        high: Upper end.
        confidence: In what share of runs the interval holds the true median.
    """

    median: float
    low: float
    high: float
    confidence: float


def estimate(values: Sequence[float]) -> Estimate:
    """The median of `values`, at least one, and its interval: see NOTE [Intervals]."""
    ordered = sorted(values)
    rank = _rank(len(ordered))
    low, high = ordered[rank - 1], ordered[-rank]
    return Estimate(statistics.median(ordered), low, high, _coverage(len(ordered), rank))


def _rank(count: int) -> int:
    """The largest rank whose interval covers enough, at least 1."""
    good = [k for k in range(1, count // 2 + 1) if _coverage(count, k) >= CONFIDENCE]
    return max(good, default=1)


def _coverage(count: int, rank: int) -> float:
    """How often the median lies between the rank-th smallest and the rank-th largest of `count`."""
    outside = 2 * sum(math.comb(count, k) for k in range(rank))
    return max(1 - outside / float(2**count), 0.0)


@dataclass(frozen=True)
class Row:
    """What one loader's blocks say. Medians over its blocks; times are per batch.

    Attributes:
        loader: Its name.
        rate: Images a second.
        total_rate: Images of all blocks over their seconds. Where workers rest between blocks these
            are one long one, and a burst that two blocks share is counted right.
        share: Of the ceiling of the same round; None for the ceiling itself.
        step_ms: Wall time of a step, `next()` included.
        next_ms: Wall time inside `next()`, waits included.
        source_ms: Of these, waited for the source; None where the loader keeps no account.
        device_ms: Of these, waited for the device, likewise.
        next_us: The 10th, 50th and 90th percentile of a `next()`.
        thread_cpu_ms: CPU time of the training thread.
        other_cpu_ms: CPU time of all other threads of this process.
        peak_mb: Device memory allocated at most in a block, by all open loaders; None if unknown.
        alone_mb: Device memory that came on top when it was opened and stepped; None if unknown.
    """

    loader: str
    rate: Estimate
    total_rate: float
    share: Estimate | None
    step_ms: float
    next_ms: float
    source_ms: float | None
    device_ms: float | None
    next_us: tuple[float, float, float]
    thread_cpu_ms: float
    other_cpu_ms: float
    peak_mb: float | None
    alone_mb: float | None


def rows(blocks: Sequence[Block], ceiling: str, alone: Mapping[str, int | None]) -> list[Row]:
    """A row for each loader, in the order of `alone`.

    Args:
        blocks: All of the run; those outside the rounds are left out.
        ceiling: The name of the ceiling.
        alone: What each loader added to the device's memory, in bytes.
    """
    return [_row(name, blocks, ceiling, nbytes) for name, nbytes in alone.items()]


def _row(loader: str, blocks: Sequence[Block], ceiling: str, alone: int | None) -> Row:
    own = [b for b in blocks if b.loader == loader and b.round is not None]
    return Row(
        loader=loader,
        rate=estimate([block.rate for block in own]),
        total_rate=sum(block.images for block in own) / sum(block.seconds for block in own),
        share=None if loader == ceiling else estimate(ratios(blocks, loader, ceiling)),
        step_ms=_per_step(own, lambda block: block.seconds) or 0.0,
        next_ms=_per_step(own, lambda block: block.next_seconds) or 0.0,
        source_ms=_per_step(own, lambda block: block.source_seconds),
        device_ms=_per_step(own, lambda block: block.device_seconds),
        next_us=_next_us(own),
        thread_cpu_ms=_per_step(own, lambda block: block.thread_cpu_seconds) or 0.0,
        other_cpu_ms=_per_step(own, lambda block: block.cpu_seconds - block.thread_cpu_seconds)
        or 0.0,
        peak_mb=_megabytes(_median(block.peak_bytes for block in own)),
        alone_mb=_megabytes(alone),
    )


def ratios(blocks: Iterable[Block], loader: str, other: str) -> list[float]:
    """`loader`'s rate over `other`'s, round by round."""
    rates = {(block.loader, block.round): block.rate for block in blocks}
    rounds = sorted(r for name, r in rates if name == loader and r is not None)
    return [rates[loader, r] / rates[other, r] for r in rounds if (other, r) in rates]


def _per_step(blocks: Sequence[Block], seconds: Callable[[Block], float | None]) -> float | None:
    """Milliseconds a step, the median over blocks; None if it is unknown."""
    values = [(seconds(block), block.steps) for block in blocks]
    return _median(None if value is None else value / steps * 1e3 for value, steps in values)


def _next_us(blocks: Sequence[Block]) -> tuple[float, float, float]:
    return (
        statistics.median(block.next_p10 for block in blocks) * 1e6,
        statistics.median(block.next_p50 for block in blocks) * 1e6,
        statistics.median(block.next_p90 for block in blocks) * 1e6,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _megabytes(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / 1e6


def drift(blocks: Sequence[Block]) -> tuple[float, float]:
    """The rates of the first and the last block, which are ceilings."""
    return blocks[0].rate, blocks[-1].rate


def steady(first: float, last: float) -> bool:
    """Whether two ceilings agree."""
    return abs(last / first - 1) <= STEADY
