"""The ladder's rungs by turns: a block each a round, the order turned around every other round.

NOTE [Blocks of the ladder]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
All rungs of a size stay open. A few steps that nobody times come before a block, then the device is
waited for, and the block ends when it has done all: what a rung that looks ahead has ready at the
beginning it must have ready again at the end, so nothing is had for free. Steps are as many as the
rung's own step time asks for. Memory that streams of other rungs hold unused is given back when
most of the device's is taken; the untimed steps get it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks._article_cell import Cell
from benchmarks._article_loops import Taken, closed, take
from benchmarks._article_rungs import Rung

__all__ = ["Block", "Opened", "Pace", "close_all", "opened", "run_rounds", "steps_in", "worth"]

LEAST, MOST = 10, 5000
"""Steps of a block."""

FULL_SHARE = 0.5
"""Of the device's memory, from which on what is unused is given back between blocks."""


@dataclass(frozen=True)
class Pace:
    """How long things take.

    Attributes:
        warm: Steps when a rung is opened, of which the latter half is timed to size blocks.
        settle: Steps before a block.
        block_seconds: Of a block, about.
        least: Steps of a block, at least.
    """

    warm: int = 8
    settle: int = 4
    block_seconds: float = 0.3
    least: int = LEAST


@dataclass(frozen=True)
class Block:
    """What was measured.

    Attributes:
        rung: Whose.
        round: In which round.
        steps: Taken.
        seconds: From one wait for the device to the next.
    """

    rung: str
    round: int
    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.seconds


@dataclass(frozen=True)
class Opened:
    """A rung that is open.

    Attributes:
        rung: Which.
        run: Its loop.
        steps: Of its blocks.
    """

    rung: Rung
    run: Iterator[Taken]
    steps: int


def steps_in(step_seconds: float, pace: Pace) -> int:
    """Steps of a block."""
    wanted = math.ceil(pace.block_seconds / max(step_seconds, 1e-9))
    return min(max(wanted, pace.least), MOST)


def opened(cell: Cell, rungs: Sequence[Rung], pace: Pace) -> list[Opened]:
    """The rungs, open and warm; `close_all` ends them."""
    found: list[Opened] = []
    try:
        for rung in rungs:
            run = rung.loop(cell.work, cell.forms[rung.form])
            found.append(Opened(rung, run, pace.least))
            half = max(pace.warm // 2, 1)
            take(run, half, cell.work.device)
            seconds = take(run, half, cell.work.device)
            found[-1] = Opened(rung, run, steps_in(seconds / half, pace))
    except BaseException:
        close_all(cell, found)
        raise
    return found


def close_all(cell: Cell, rungs: Sequence[Opened]) -> None:
    """Ends loops."""
    for one in rungs:
        closed(one.run, cell.work.device)


def run_rounds(
    cell: Cell,
    rungs: Sequence[Opened],
    pace: Pace,
    rounds: int,
    more: Callable[[int], bool],
) -> Iterator[list[Block]]:
    """A list of blocks for each complete round.

    Args:
        cell: What they work on.
        rungs: Open.
        pace: For blocks.
        rounds: At most so many.
        more: Whether there is time for another, given how many are complete.
    """
    device = cell.work.device
    for number in range(rounds):
        if not more(number):
            return
        blocks = []
        for one in rungs if number % 2 == 0 else rungs[::-1]:
            _spare(device)
            take(one.run, pace.settle, device)
            seconds = take(one.run, one.steps, device)
            blocks.append(Block(one.rung.name, number, one.steps, seconds))
        yield blocks


def _spare(device: torch.device) -> None:
    """Gives back what is unused, if little is left: see the NOTE."""
    if device.type != "cuda":
        return
    whole = torch.cuda.get_device_properties(device).total_memory
    if torch.cuda.memory_reserved(device) > FULL_SHARE * whole:
        torch.cuda.empty_cache()


def worth(now: float, start: float, deadline: float, done: int, least: int) -> bool:
    """Whether another round is worth beginning: it would end in time, or there are too few yet.

    Args:
        now: The time.
        start: When the first round began.
        deadline: When they are to be over.
        done: Complete rounds.
        least: So many are measured in any case.
    """
    if done < least:
        return True
    return now + (now - start) / done <= deadline
