"""Transforms that plan on the host: their tables on a real accelerator."""

from typing import Any

import pytest
import torch
from torch import Tensor

from streamloader import StreamLoader, on
from streamloader.context import Context
from streamloader.transforms import Planned
from tests.gpu.sources import ROWS, busy, listed, nothing_waits, workers

pytestmark = pytest.mark.gpu

COUNT, EPOCHS, SEED = 30, 2, 7


class Shift(Planned):
    """Adds to each row a whole number that was drawn on the host, and reads it late."""

    def plan(self, batch: Tensor, context: Context) -> Tensor:
        drawn = torch.Generator().manual_seed(context.key())
        return torch.randint(1000, (len(batch), 1), generator=drawn).float()

    def run(self, batch: Tensor, table: Tensor) -> Tensor:
        busy(2)  # by its end the tables of the next batches are on their way
        return batch + table


SHIFT: Any = Shift()
PLANS: dict[str, list[Any]] = {
    "first": [SHIFT],
    "later": [Tensor.float, SHIFT],
    "both": [SHIFT, SHIFT],
    "two later": [Tensor.float, SHIFT, SHIFT],
}


def expected(transforms: list[Any], epoch: int, number: int) -> Tensor:
    """Of each row "4 1" of a batch, what all its elements should be."""
    rows = torch.full((4, 1), float(number))
    for stage, transform in enumerate(transforms):
        if transform is SHIFT:
            rows += SHIFT.plan(rows, Context(SEED, epoch, number, 0, stage))
    return rows


@pytest.mark.parametrize("transforms", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_what_a_plan_says_is_done_to_its_own_batch(depth: int, transforms: list[Any]) -> None:
    """Readers are late, batches are dropped, and what can be reused is filled with something else.

    A table that came too late, or whose memory went to the next one too early, makes wrong rows.
    """
    due = [expected(transforms, epoch, n).cuda() for epoch in range(EPOCHS) for n in range(COUNT)]
    staged = [on(0, transform) for transform in transforms]
    loader: Any = StreamLoader(
        listed(COUNT), "cuda", transform=staged, prefetch_batches=depth, seed=SEED
    )
    wrong: list[Tensor] = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            busy(4)
            number = len(wrong)
            off = (images != due[number]).sum() + (labels != number % COUNT).sum()
            wrong.append(off)
            del images, labels
            torch.full((4, ROWS // 4), torch.nan, device="cuda")
            torch.full((4,), -1, device="cuda")
    assert [int(off) for off in wrong] == [0] * EPOCHS * COUNT


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_later_plan_makes_nothing_on_the_training_thread_wait_for_the_device() -> None:
    staged = [on(0, Tensor.float), on(0, SHIFT)]
    loader = StreamLoader(workers(40), "cuda", transform=staged)
    batches = iter(loader)
    next(batches)
    with nothing_waits():
        for images, _ in batches:
            busy(2)
            images.sum()
    assert loader.stats.epoch.batches == 40
