"""Timed blocks: in which order they come, and how one is measured.

NOTE [A block]
~~~~~~~~~~~~~~
A short run flatters: 14 workers with 4 batches each have 56 in hand, which cost a step nothing. So
before a block all that was prefetched is pulled and dropped; a few steps that nobody times let
queues and clocks settle; then a block lasts several times what could have been in hand. Loaders
take turns, in a new order each round, so that a drift of the machine falls on all of them, and each
is compared with the ceiling of its own round. Every loader stays open for the whole run.

Where the source may be slower than the step (shards), a pull that takes longer than a step shows
that nothing is in hand; `drain` stops there. The workers rest between their loader's blocks, so it
is done once, when a loader is opened: NOTE [Frozen workers] in _freeze.py. And there a block lasts
a given time, not a number of steps, as it would be several times as long for a slower loader.

NOTE [Rounds of workers]
~~~~~~~~~~~~~~~~~~~~~~~~
Workers that were started together finish together: batches come in bursts, one from each, with a
long wait before. A block that began or ended within a burst would count waits and batches that do
not belong together; with 14 workers and a handful of bursts that is 5 to 20 %. So of shards all
that pulls batches, timed or not, ends after a whole number of rounds: as many from each worker. A
block by time has at least `ROUNDS_IN_BLOCK` of them. And what does not train has nothing to settle.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from benchmarks._feeds import Feed
from benchmarks._models import Step

__all__ = [
    "ROUNDS_IN_BLOCK",
    "Block",
    "Memory",
    "Span",
    "Turn",
    "drain",
    "measure",
    "percentiles",
    "schedule",
    "settle",
    "steps_in_block",
    "whole_rounds",
]

QUEUES_IN_BLOCK = 3
"""Steps in a block, in times of what the workers can have in hand."""

ROUNDS_IN_BLOCK = 3
"""Batches of each worker in a block that ends by time, at least."""


@dataclass(frozen=True)
class Turn:
    """Whose block is next.

    Attributes:
        loader: Its name.
        round: In which round, from 0; None for the ceilings before the first and after the last.
    """

    loader: str
    round: int | None


@dataclass(frozen=True)
class Span:
    """When a block, or what comes before it, is over: whichever comes first.

    Attributes:
        steps: After so many; None is no limit.
        seconds: After the step in which so many are over; None is no limit.
        every: But only after a multiple of so many steps: NOTE [Rounds of workers].
        least: And not before so many steps.
    """

    steps: int | None
    seconds: float | None = None
    every: int = 1
    least: int = 0

    def over(self, steps: int, since: float) -> bool:
        """Whether it is, after `steps` steps that began at `since`."""
        if steps % self.every or steps < self.least:
            return False
        if self.steps is not None and steps >= self.steps:
            return True
        return self.seconds is not None and time.perf_counter() - since >= self.seconds


def schedule(loaders: Sequence[str], bookend: str, rounds: int, seed: int) -> list[Turn]:
    """`rounds` rounds of all `loaders`, each shuffled anew, and `bookend` before and after them.

    Shuffled rather than rotated, so that no loader always follows the same other.
    """
    draw = random.Random(seed)
    turns = [Turn(bookend, None)]
    for number in range(rounds):
        turns += [Turn(loader, number) for loader in draw.sample(loaders, len(loaders))]
    return [*turns, Turn(bookend, None)]


def whole_rounds(
    blocks: Sequence[Block], loaders: Collection[str], bookend: str
) -> tuple[int, list[Block]]:
    """What an interrupted run is worth: how many rounds are complete, and their blocks.

    The `bookend` of the last of them stands for the one that would have ended the run.
    """
    found = Counter(block.round for block in blocks if block.round is not None)
    whole = [number for number, count in found.items() if count == len(loaders)]
    kept = [block for block in blocks if block.round is None or block.round in whole]
    ends = [dataclasses.replace(b, round=None) for b in kept if b.loader == bookend]
    return len(whole), [*kept, *ends[-1:]] if whole else []


def steps_in_block(step_seconds: float, in_hand: int, block_seconds: float, late: int) -> int:
    """How many steps a block takes, if nobody says.

    Args:
        step_seconds: A step's time at the ceiling.
        in_hand: How many batches the workers can have in hand.
        block_seconds: What a block should last at least.
        late: Every how manyth batch is late, 0 for none; a block gets its exact share of them.
    """
    steps = max(QUEUES_IN_BLOCK * in_hand, math.ceil(block_seconds / step_seconds))
    return -(-steps // late) * late if late else steps


@dataclass(frozen=True)
class Block:
    """What was measured in one block.

    Attributes:
        loader: Whose.
        round: As in `Turn`.
        steps: Steps taken.
        images: Images they took.
        seconds: Wall time, from one synchronisation to the next.
        next_seconds: Wall time inside `next()`, all of it together.
        next_p10: The 10th percentile of a `next()`, seconds.
        next_p50: Its median.
        next_p90: Its 90th percentile.
        next_max: The longest.
        step_seconds: Wall time of each step but the last, from one `next()` to the next: of the
            training thread, which an accelerator lets run some steps ahead, but not for long.
        cpu_seconds: CPU time of this process, all its threads; not of workers.
        thread_cpu_seconds: CPU time of the training thread alone.
        peak_bytes: Device memory allocated at most, by all loaders together; None where unknown.
        source_seconds: Waited in `next()` for the source, by the loader's own account, if any.
        device_seconds: Waited in `next()` for the device, likewise.
    """

    loader: str
    round: int | None
    steps: int
    images: int
    seconds: float
    next_seconds: float
    next_p10: float
    next_p50: float
    next_p90: float
    next_max: float
    step_seconds: tuple[float, ...]
    cpu_seconds: float
    thread_cpu_seconds: float
    peak_bytes: int | None
    source_seconds: float | None
    device_seconds: float | None

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.images / self.seconds


class Memory:
    """Device memory, as far as torch counts it: under CUDA.

    Args:
        device: Whose.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def reset(self) -> int:
        """Starts a new peak. Returns what is allocated now, in bytes."""
        if self._device is None:
            return 0
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int | None:
        """Bytes allocated at most since `reset`."""
        return torch.cuda.max_memory_allocated(self._device) if self._device else None


def drain(feed: Feed, patience: float | None = None, workers: int = 1) -> int:
    """Pulls and drops what is prefetched.

    Args:
        feed: Whose.
        patience: A pull that takes longer, in seconds, is the last: nothing is in hand any more.
            None is to pull all that can be in hand.
        workers: So many are pulled anyhow, as each worker's first is waited for, and then a
            multiple of them: NOTE [Rounds of workers].

    Returns:
        How many were pulled.
    """
    most = -(-feed.in_hand // workers) * workers
    slow = False
    for number in range(1, most + 1):
        asked = time.perf_counter()
        next(feed.batches)
        late = patience is not None and time.perf_counter() - asked > patience
        slow = slow or (late and number >= workers)
        if slow and number % workers == 0:
            return number
    return most


def settle(feed: Feed, step: Step, span: Span) -> None:
    """Takes steps that nobody times; none where nothing trains, which they would give for free."""
    if not feed.trains:
        return
    steps, begin = 0, time.perf_counter()
    while not span.over(steps, begin):
        step(*next(feed.batches))
        steps += 1


def measure(
    turn: Turn, feed: Feed, step: Step, span: Span, synchronize: Callable[[], None], memory: Memory
) -> Block:
    """One block as long as `span`, which `settle` has prepared."""
    synchronize()
    memory.reset()
    waited = feed.waits() if feed.waits else None
    spans: list[float] = []
    starts: list[float] = []
    count = 0
    cpu, thread = time.process_time(), time.thread_time()
    begin = time.perf_counter()
    while not span.over(len(spans), begin):
        asked = time.perf_counter()
        images, labels = next(feed.batches)
        spans.append(time.perf_counter() - asked)
        starts.append(asked)
        if feed.trains:
            step(images, labels)
        count += len(images)
    synchronize()
    seconds = time.perf_counter() - begin
    cpu, thread = time.process_time() - cpu, time.thread_time() - thread
    source, device = _since(feed, waited)
    p10, p50, p90 = percentiles(spans)
    return Block(
        loader=turn.loader,
        round=turn.round,
        steps=len(spans),
        images=count,
        seconds=seconds,
        next_seconds=sum(spans),
        next_p10=p10,
        next_p50=p50,
        next_p90=p90,
        next_max=max(spans),
        step_seconds=tuple(b - a for a, b in itertools.pairwise(starts)),
        cpu_seconds=cpu,
        thread_cpu_seconds=thread,
        peak_bytes=memory.peak(),
        source_seconds=source,
        device_seconds=device,
    )


def _since(feed: Feed, before: tuple[float, float] | None) -> tuple[float | None, float | None]:
    if feed.waits is None or before is None:
        return None, None
    source, device = feed.waits()
    return source - before[0], device - before[1]


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 10th, 50th and 90th."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[4], tenths[8]
