import dataclasses
import itertools
from collections import Counter
from collections.abc import Generator

import pytest
import torch

from benchmarks._feeds import Feed
from benchmarks._timing import (
    Memory,
    Span,
    Turn,
    drain,
    measure,
    percentiles,
    schedule,
    settle,
    steps_in_block,
    whole_rounds,
)
from tests.benchmarks.test_summary import block

LOADERS = ["plain", "pinned", "stream", "ceiling"]


def test_a_run_begins_and_ends_with_the_bookend() -> None:
    turns = schedule(LOADERS, "ceiling", rounds=7, seed=0)
    assert turns[0] == turns[-1] == Turn("ceiling", None)


def test_each_round_has_each_loader_once() -> None:
    turns = schedule(LOADERS, "ceiling", rounds=7, seed=0)[1:-1]
    assert Counter((turn.round, turn.loader) for turn in turns) == Counter(
        itertools.product(range(7), LOADERS)
    )
    assert [turn.round for turn in turns] == sorted(turn.round or 0 for turn in turns)


def test_the_order_changes_and_depends_on_the_seed_alone() -> None:
    turns = schedule(LOADERS, "ceiling", rounds=7, seed=1)
    orders = {tuple(t.loader for t in turns if t.round == number) for number in range(7)}
    assert len(orders) > 3
    assert turns == schedule(LOADERS, "ceiling", rounds=7, seed=1)
    assert turns != schedule(LOADERS, "ceiling", rounds=7, seed=2)


@pytest.mark.parametrize(("measured", "rounds"), [(4, 0), (5, 1), (8, 1), (9, 2), (11, 2)])
def test_an_interrupted_run_is_its_whole_rounds_and_ends_with_the_bookend(
    measured: int, rounds: int
) -> None:
    turns = schedule(LOADERS, "ceiling", rounds=3, seed=0)
    blocks = [block(turn.loader, turn.round, 100) for turn in turns[:measured]]
    found, kept = whole_rounds(blocks, LOADERS, "ceiling")
    assert found == rounds
    whole = [*turns[: 1 + 4 * rounds], turns[-1]] if rounds else []
    assert [Turn(b.loader, b.round) for b in kept] == whole


@pytest.mark.parametrize(
    ("step_seconds", "in_hand", "late", "expected"),
    [
        (0.05, 56, 0, 168),  # three times what the workers have in hand
        (0.005, 56, 0, 1000),  # five seconds
        (0.05, 56, 10, 170),  # and a whole number of late batches
        (0.05, 56, 8, 168),
    ],
)
def test_a_block_outlasts_what_was_in_hand(
    step_seconds: float, in_hand: int, late: int, expected: int
) -> None:
    assert steps_in_block(step_seconds, in_hand, 5.0, late) == expected


def test_percentiles_of_a_hundred_and_one_are_their_places() -> None:
    assert percentiles(list(range(101))) == (10, 50, 90)


def test_percentiles_of_one_value_are_that_value() -> None:
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)


def numbered(in_hand: int, waits: list[tuple[float, float]] | None = None) -> Feed:
    batches = ((torch.zeros(4), torch.tensor(number)) for number in itertools.count())
    return Feed(batches, in_hand, batches.close, iter(waits).__next__ if waits else None)


def test_settling_after_draining_steps_on_what_was_not_in_hand() -> None:
    stepped: list[int] = []
    feed = numbered(in_hand=5)
    assert drain(feed) == 5
    settle(feed, lambda _, label: stepped.append(int(label)), Span(2))
    assert stepped == [5, 6]


def test_draining_ends_at_a_slow_pull_but_not_before_each_worker_gave_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = itertools.accumulate([0, 9, 0, 1, 0, 1, 0, 9, 0, 9])  # 9, 1, 1, 9 and 9 s in next()
    monkeypatch.setattr("benchmarks._timing.time.perf_counter", lambda: next(times))
    assert drain(numbered(in_hand=5), patience=2.0, workers=2) == 4


def test_draining_ends_after_a_whole_round_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.accumulate([0, 1, 0, 1, 0, 1, 0, 9] + [0, 1] * 8)  # the fourth is slow
    monkeypatch.setattr("benchmarks._timing.time.perf_counter", lambda: next(times))
    assert drain(numbered(in_hand=11), patience=2.0, workers=3) == 6
    assert drain(numbered(in_hand=5), workers=1) == 5
    monkeypatch.undo()
    assert drain(numbered(in_hand=5), workers=3) == 6


class Bursts:
    """Batches of workers that were started together, on a clock of their own.

    Each worker takes a second for a batch, and does not wait to begin the next.
    """

    def __init__(self, workers: int) -> None:
        self.now = 0.0
        self._workers = workers

    def batches(self) -> Generator[tuple[torch.Tensor, torch.Tensor], None, None]:
        for number in itertools.count():
            self.now = max(self.now, 1.0 + number // self._workers)
            yield torch.zeros(1), torch.tensor(number)

    def step(self, *_: object) -> None:
        self.now += 0.01


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("workers", [8, 14])
def test_blocks_of_bursts_have_the_rate_of_the_workers(
    monkeypatch: pytest.MonkeyPatch, workers: int, *, trains: bool
) -> None:
    bursts = Bursts(workers)
    monkeypatch.setattr("benchmarks._timing.time.perf_counter", lambda: bursts.now)
    batches = bursts.batches()
    feed = Feed(batches, 56, batches.close, trains=trains)
    drain(feed, 0.01, workers)
    for _ in range(5):
        settle(feed, bursts.step, Span(10, 0.5, every=workers))
        span = Span(None, 2.3, every=workers, least=3 * workers)
        memory = Memory(torch.device("cpu"))
        block = measure(Turn("a", 0), feed, bursts.step, span, lambda: None, memory)
        assert block.steps % workers == 0
        assert block.steps >= 3 * workers
        assert block.rate == pytest.approx(workers, rel=0.02 if not trains else 0.06)


def test_a_span_ends_by_steps_or_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks._timing.time.perf_counter", lambda: 10.0)
    assert Span(3).over(3, since=0.0)
    assert not Span(3).over(2, since=0.0)
    assert Span(None, 2.0).over(0, since=8.0)
    assert not Span(3, 2.0).over(2, since=8.5)


def test_a_span_ends_after_whole_rounds_and_not_before_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks._timing.time.perf_counter", lambda: 10.0)
    span = Span(None, 2.0, every=4, least=12)
    assert [steps for steps in range(20) if span.over(steps, since=0.0)] == [12, 16]
    assert [steps for steps in range(20) if Span(5, every=4).over(steps, since=0.0)] == [8, 12, 16]


def test_batches_that_are_not_for_the_step_are_only_pulled() -> None:
    feed = dataclasses.replace(numbered(in_hand=0), trains=False)
    stepped: list[object] = []
    settle(feed, lambda *batch: stepped.append(batch), Span(2))
    memory = Memory(torch.device("cpu"))
    block = measure(
        Turn("alone", 0), feed, lambda *batch: stepped.append(batch), Span(2), lambda: None, memory
    )
    assert (block.steps, block.images, stepped) == (2, 8, [])


def test_a_block_counts_its_steps_and_their_images() -> None:
    stepped: list[str] = []
    block = measure(
        Turn("plain", 3),
        numbered(in_hand=5),
        lambda *_: stepped.append("step"),
        span=Span(6),
        synchronize=lambda: stepped.append("synchronize"),
        memory=Memory(torch.device("cpu")),
    )
    assert stepped == ["synchronize", *["step"] * 6, "synchronize"]
    assert (block.loader, block.round, block.steps, block.images) == ("plain", 3, 6, 24)
    assert 0 < block.next_seconds < block.seconds
    assert block.next_p10 <= block.next_p50 <= block.next_p90 <= block.next_max
    assert (block.peak_bytes, block.source_seconds, block.device_seconds) == (None, None, None)
    assert block.rate == 24 / block.seconds
    assert len(block.step_seconds) == 5


def test_a_block_has_the_waits_of_its_own_time() -> None:
    feed = numbered(in_hand=0, waits=[(1.0, 2.0), (1.5, 2.25)])
    memory = Memory(torch.device("cpu"))
    block = measure(Turn("stream", 0), feed, lambda *_: None, Span(1), lambda: None, memory)
    assert (block.source_seconds, block.device_seconds) == (0.5, 0.25)
