"""Tables: the same for the same context, whatever else."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamloader import augment
from streamloader.augment import Layout
from streamloader.context import Context
from tests.augment.oracle import context

IMAGENET = augment.Compose(
    [
        augment.RandomResizedCrop(224),
        augment.RandomHorizontalFlip(),
        augment.ColorJitter(0.4, 0.4, 0.4, 0.1),
        augment.RandomGrayscale(),
        augment.ToDtype(torch.float32, scale=True),
        augment.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        augment.RandomErasing(value="random"),
    ]
)
DENSE = Layout.dense(16, 3, 375, 500)
contexts = st.builds(
    Context, st.integers(0, 2**64), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)
)


@given(contexts, st.integers(0, 16))
def test_a_table_is_its_contexts(given: Context, count: int) -> None:
    table = IMAGENET.plan(DENSE, given)

    assert table.dtype == torch.float32
    assert table.device.type == "cpu"
    assert table.shape == (16, len(IMAGENET.columns))
    assert torch.equal(table, IMAGENET.plan(DENSE, given))
    shorter = Layout.dense(count, 3, 375, 500)
    assert torch.equal(table[:count], IMAGENET.plan(shorter, given))


@pytest.mark.parametrize("name", ["seed", "epoch", "number", "rank", "stage"])
def test_another_context_gives_another(name: str) -> None:
    changed: dict[str, Any] = {name: 7}
    other = context()._replace(**changed)
    assert not torch.equal(IMAGENET.plan(DENSE, context()), IMAGENET.plan(DENSE, other))


def test_a_batch_is_planned_by_the_sizes_of_its_images() -> None:
    batch = {"image": torch.zeros(4, 3, 30, 40), "label": torch.zeros(4)}
    layout = Layout.dense(4, 3, 30, 40)
    assert torch.equal(IMAGENET.plan(batch, context()), IMAGENET.plan(layout, context()))


def test_samples_and_places_differ() -> None:
    twice = augment.Compose([augment.ColorJitter(0.5), augment.ColorJitter(0.5)])
    table = twice.plan(DENSE, context())
    factors = [table[:, n].tolist() for n, name in enumerate(twice.columns) if "bright" in name]

    assert len(factors) == 2
    assert len({*factors[0], *factors[1]}) == 32


def test_a_transform_added_at_the_end_changes_no_draw_before_it() -> None:
    shorter = augment.Compose(IMAGENET.steps[:3])  # type: ignore[arg-type]
    width = len(shorter.columns)
    assert torch.equal(shorter.plan(DENSE, context()), IMAGENET.plan(DENSE, context())[:, :width])


def test_sizes_may_differ_and_are_the_rows_own() -> None:
    ragged = Layout(3, np.array([1, 8000, 300]), np.array([8000, 1, 400]))
    table = IMAGENET.plan(ragged, context())

    alone = IMAGENET.plan(Layout(3, ragged.heights[:2], ragged.widths[:2]), context())
    assert torch.equal(table[:2], alone)
    assert (table[:, 8:10] == 224).all()


def test_whole_numbers_are_exact() -> None:
    crop = augment.Compose([augment.Resize(500), augment.RandomCrop(8)])
    table = crop.plan(Layout.dense(64, 3, 1, 8000), context())

    assert torch.equal(table[:, :10], table[:, :10].round())
    assert (table[:, 5] == 4_000_000).all()


def test_what_would_not_be_exact_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^no edge may become longer than 4194304 pixels, got 2"):
        augment.Resize(3000).plan(Layout.dense(1, 3, 1, 8000), context())


def test_layouts_say_how_large_images_are_after_each_pass() -> None:
    recipe = augment.Compose(
        [augment.Resize(20), augment.CenterCrop(30), augment.RandomResizedCrop((4, 5))]
    )
    assert [layout.size for layout in recipe.layouts(Layout.dense(2, 3, 40, 60))] == [
        (40, 60),
        (30, 30),
        (4, 5),
    ]


def test_images_that_come_out_in_different_sizes_are_refused() -> None:
    ragged = Layout(3, np.array([40, 50]), np.array([50, 40]))
    with pytest.raises(
        ValueError,
        match=r"^images must come out in one size to be a batch, got heights from 20 to 25 and "
        r"widths from 20 to 25: end with a crop, or with Resize\(\(height, width\)\)$",
    ):
        augment.Resize(20).plan(ragged, context())
