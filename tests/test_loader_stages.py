"""The contract about stages: several of them, what they read, what they may return."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamloader import Planned, Stage, StreamLoader
from streamloader.context import Context
from streamloader.results import OverwrittenError
from streamloader.testing import FakeDevice
from tests.loaders import SWEPT, batches, devices, fill, ids, number_of


@pytest.fixture(params=SWEPT)
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> Any:
    return request.param()


# -- several -------------------------------------------------------------------------------------


class Adds(Planned):
    """Adds to each row what was planned for it: the batch's number."""

    def plan(self, batch: Any, context: Context) -> Tensor:
        return torch.full((len(batch["x"]),), context.number)

    def run(self, batch: Any, table: Tensor) -> Any:
        return {"x": batch["x"] + table, "rows": len(table)}


def test_stages_may_change_structure_and_length_and_not_the_order(device: Any, depth: int) -> None:
    def wrap(x: Tensor) -> dict[str, Tensor]:
        return {"x": torch.cat([x, x])}

    def unwrap(batch: dict[str, Any]) -> tuple[Tensor, list[int]]:
        return batch["x"][::2], [batch["rows"]]

    stages: list[Any] = [Stage(wrap, name="wrap"), Adds(), unwrap, lambda batch: [*batch, "label"]]
    loader = StreamLoader(batches(6), device, transform=stages, prefetch_batches=depth)
    for number, (x, rows, label) in enumerate(loader):
        assert torch.equal(x, fill(2 * number))
        assert (rows, label) == ([8], "label")


def test_a_stage_is_shown_copied_and_pickled_with_the_loader() -> None:
    stage = Stage(nn.Flatten(), name="flat", priority=-1)
    loader = StreamLoader([torch.ones(2, 3)], transform=[stage, torch.neg])

    assert f"transform=[{stage!r}, {torch.neg!r}]" in repr(loader)
    copied: Any = pickle.loads(pickle.dumps(StreamLoader([fill(1)], transform=Stage(torch.neg))))
    assert ids(copied) == [-1]


def test_a_seed_reaches_stages(depth: int) -> None:
    def draw(x: Tensor) -> Tensor:
        return x + torch.rand(4)

    def drawn(transform: Any, depth: int) -> list[list[float]]:
        loader = StreamLoader(batches(3), transform=transform, prefetch_batches=depth, seed=3)
        return [batch.tolist() for batch in loader]

    assert drawn(Stage(draw), depth) == drawn(draw, 0)


# -- after the step ------------------------------------------------------------------------------


def train(device: Any, depth: int, stages: list[Any]) -> list[float]:
    """A loop that updates, after each batch, what a stage reads."""
    teacher = torch.zeros(4)

    def teach(x: Tensor) -> Tensor:
        return x + teacher

    stages = [Stage(teach, after_step=True) if stage == "teach" else stage for stage in stages]
    seen = []
    for batch in StreamLoader(batches(8), device, transform=stages, prefetch_batches=depth):
        seen.append(batch.sum().item())
        teacher.mul_(0.5).add_(batch)
    return seen


@pytest.mark.parametrize(
    "stages",
    [["teach"], [torch.neg, "teach"], ["teach", torch.neg], [torch.neg, "teach", torch.neg]],
)
def test_a_stage_after_the_step_sees_what_a_plain_loop_sees(
    device: Any, depth: int, stages: list[Any]
) -> None:
    assert train(device, depth, stages) == train(None, 0, stages)


def test_stages_before_it_run_ahead_and_it_does_not() -> None:
    calls: list[tuple[str, int]] = []

    def ahead(x: Tensor) -> Tensor:
        calls.append(("ahead", number_of(x)))
        return x

    def after(x: Tensor) -> Tensor:
        calls.append(("after", number_of(x)))
        return x

    device = FakeDevice()
    stages: list[Any] = [ahead, Stage(after, after_step=True)]
    passes = iter(StreamLoader(batches(4), device, transform=stages, prefetch_batches=2))
    for number in range(2):
        next(passes)
        assert calls[-1] == ("after", number)
    assert [number for name, number in calls if name == "after"] == [0, 1]
    list(passes)
    assert [number for name, number in calls if name == "ahead"] == [0, 1, 2, 3]
    assert [number for name, number in calls if name == "after"] == [0, 1, 2, 3]


def test_tables_of_a_stage_after_the_step_are_lent_until_they_have_arrived(depth: int) -> None:
    device = FakeDevice(looks=3)
    stages: list[Any] = [lambda x: {"x": x}, Stage(Adds(), after_step=True)]
    loader: Any = StreamLoader(batches(5), device, transform=stages, prefetch_batches=depth)
    assert [number_of(batch["x"]) for batch in loader] == [0, 2, 4, 6, 8]


def test_an_error_after_the_step_comes_with_its_batch(device: Any, depth: int) -> None:
    def strict(x: Tensor) -> Tensor:
        if number_of(x) == 2:
            raise ValueError("strict")
        return x

    seen: list[int] = []
    stage = Stage(strict, name="teacher", after_step=True)
    loader = StreamLoader(batches(5), device, transform=stage, prefetch_batches=depth)
    with pytest.raises(ValueError, match=r"^strict") as raised:
        seen.extend(map(number_of, loader))
    assert seen == [0, 1]
    notes = getattr(raised.value, "__notes__", [str(raised.value)])  # from Python 3.11
    assert notes[0].endswith("raised by transform teacher on batch 2, int64[4]")
    assert ids(StreamLoader(batches(2), device, transform=stage, prefetch_batches=depth)) == [0, 1]


# -- what they return ----------------------------------------------------------------------------


def test_none_comes_as_an_error_after_the_batches_before_it(device: Any, depth: int) -> None:
    def forgets(x: Tensor) -> Tensor | None:
        return None if number_of(x) == 2 else x

    seen: list[int] = []
    loader = StreamLoader(batches(5), device, transform=forgets, prefetch_batches=depth)
    with pytest.raises(TypeError, match=r"^transform forgets on batch 2 returned None: it must "):
        seen.extend(map(number_of, loader))
    assert seen == [0, 1]


class Graphed:
    """Writes each result to the same memory, as a CUDA graph does: nobody's version counts it."""

    def __init__(self) -> None:
        self.out = torch.zeros(4, dtype=torch.int64)

    def __call__(self, x: Tensor) -> Tensor:
        self.out.data.copy_(x)
        return self.out.detach()


def parsed(count: int, ready: threading.Event) -> Iterator[Tensor]:
    """Whose second batch is not there until it is said."""
    for number in range(count):
        if number == 1:
            ready.wait(10)
        yield fill(number)


@pytest.mark.parametrize("after_step", [False, True])
def test_one_memory_for_all_batches_is_an_error_and_none_that_is_wrong_comes(
    device: Any, depth: int, *, after_step: bool
) -> None:
    graphed = Stage(Graphed(), after_step=after_step)
    loader = StreamLoader(batches(5), device, transform=graphed, prefetch_batches=depth)
    if depth == 0:  # as in a plain loop
        assert ids(loader) == list(range(5))
        return
    kept: list[Tensor] = []
    with pytest.raises(OverwrittenError, match=r"^transform Graphed on batch 1 returned memory "):
        kept.extend(map(torch.clone, loader))
    assert ids(kept) == list(range(len(kept)))


def test_it_is_noticed_also_when_the_batch_before_has_been_handed_over() -> None:
    ready = threading.Event()
    loader = StreamLoader(parsed(3, ready), FakeDevice(), transform=Graphed())
    passes = iter(loader)
    assert number_of(next(passes)) == 0
    ready.set()
    with pytest.raises(OverwrittenError, match=r"^transform Graphed on batch 1 returned memory "):
        next(passes)


def test_with_a_copy_it_is_a_stage_like_any_other(device: Any, depth: int) -> None:
    graphed = Graphed()
    loader = StreamLoader(
        batches(9),
        device,
        transform=[lambda x: graphed(x).clone(), torch.neg],
        prefetch_batches=depth,
    )
    kept = list(loader)
    assert ids(kept) == [-number for number in range(9)]


def test_a_compiled_callable_is_a_stage_like_any_other(device: Any, depth: int) -> None:
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    loader = StreamLoader(
        batches(5), device, transform=Stage(compiled, name="compiled"), prefetch_batches=depth
    )
    assert ids(loader) == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("after_step", [False, True])
def test_what_is_made_in_the_callers_inference_mode_can_be_trained_on(
    depth: int, *, after_step: bool
) -> None:
    loader = StreamLoader(
        batches(4),
        FakeDevice(),
        transform=Stage(torch.neg, after_step=after_step),
        prefetch_batches=depth,
    )
    with torch.inference_mode():
        kept = list(loader)
    assert [batch.is_inference() for batch in kept] == [depth == 0] * 4  # as in a plain loop


# -- how long they take --------------------------------------------------------------------------


def test_time_that_a_stage_takes_in_the_callers_thread_is_counted(device: Any, depth: int) -> None:
    ready = threading.Event()

    def waits(x: Tensor) -> Tensor:
        """As a stage does that needs a number from the device."""
        ready.wait(0.02)
        return x

    loader = StreamLoader(batches(3), device, transform=waits, prefetch_batches=depth)
    assert ids(itertools.islice(loader, 3)) == [0, 1, 2]
    assert loader.stats.epoch.launch_seconds > 0.05
    assert loader.stats.epoch.device_seconds < loader.stats.epoch.launch_seconds
