"""How many blocks make one half as slow as the other. Pure but for the measuring it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Balance", "balance"]

WITHIN = 0.05
"""Near enough to stop: the next measurement may differ from this one."""

EQUAL = 0.1

TRIES = 5


@dataclass(frozen=True)
class Balance:
    """Two halves, one of which was made as slow as the other.

    Attributes:
        blocks: That it takes.
        milliseconds: Of the half that was made slower.
        target: Of the other.
    """

    blocks: int
    milliseconds: float
    target: float

    @property
    def ratio(self) -> float:
        """The one's time over the other's; 1 is what was wanted."""
        return self.milliseconds / self.target

    @property
    def equal(self) -> bool:
        """Whether they are, within a tenth."""
        return abs(self.ratio - 1) <= EQUAL


def balance(milliseconds: Callable[[int], float], target: float, most: int) -> Balance:
    """The number of blocks, at most `most`, whose time comes nearest to `target` in a few tries.

    Begins at none, then goes along the line through the last two tries: time grows with the
    number, but not evenly, since what is small is free for a while.

    Args:
        milliseconds: Measures.
        target: What to reach, in milliseconds.
        most: The largest number.
    """
    tried = {0: milliseconds(0)}
    before, blocks = 0, min(8, most)
    while len(tried) < TRIES and blocks not in tried:
        tried[blocks] = milliseconds(blocks)
        if abs(tried[blocks] / target - 1) <= WITHIN:
            break
        each = (tried[blocks] - tried[before]) / (blocks - before)
        # Not longer than before: noise, or the GPU had room for it.
        further = (target - tried[blocks]) / each if each > 0 else max(blocks, 1)
        before, blocks = blocks, min(max(round(blocks + further), 0), most)
    best = min(tried, key=lambda number: abs(tried[number] - target))
    return Balance(best, tried[best], target)
