"""Planning, running, and being called."""

import copy
import pickle
from typing import Any

import pytest
import torch

from streamloader import augment
from streamloader.augment.recipe import Recipe
from tests.augment.oracle import bytes_, context, floats, planned

RECIPE = augment.Compose([augment.RandomResizedCrop(6), augment.ColorJitter(0.4, 0.4)])


def fresh() -> Recipe:
    return copy.deepcopy(RECIPE)


def test_a_table_is_replayed() -> None:
    images = bytes_(4, 3, 9, 9)
    table = planned(RECIPE, images)

    assert torch.equal(RECIPE.run(images, table), RECIPE.run(images, table.clone()))


def test_a_call_is_a_plan_and_a_run_whose_number_goes_up() -> None:
    images = bytes_(4, 3, 9, 9)
    recipe, state = fresh(), torch.get_rng_state()
    made = [recipe(images) for _ in range(3)]

    layout = augment.Layout.dense(4, 3, 9, 9)
    seeded = context()._replace(seed=torch.initial_seed(), epoch=-1, stage=recipe._place or 0)
    for number, out in enumerate(made):
        table = recipe.plan(layout, seeded._replace(number=number))
        assert torch.equal(out, recipe.run(images, table))
    assert not torch.equal(made[0], made[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_call_draws_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    images = bytes_(4, 3, 9, 9)
    first = fresh()(images)
    monkeypatch.setenv("RANK", "1")

    assert not torch.equal(fresh()(images), first)


def test_a_transform_alone_is_a_recipe_of_one() -> None:
    flip, images = augment.RandomHorizontalFlip(), floats(8, 3, 4, 4)
    composed = augment.Compose([flip])

    assert flip.steps == composed.steps == (flip,)
    assert flip.columns == composed.columns
    table = flip.plan(images, context())
    assert torch.equal(table, composed.plan(images, context()))
    assert torch.equal(flip.run(images, table), composed.run(images, table))


def test_images_are_found_in_a_batch_and_the_rest_passes() -> None:
    images, labels = bytes_(4, 3, 9, 9), torch.arange(4)
    batch = {"name": "x", "label": labels, "image": images, "more": images.float()}
    out = fresh()(batch)

    assert out["image"].shape == (4, 3, 6, 6)
    assert out["label"] is labels
    assert out["more"] is batch["more"]
    assert batch["image"] is images


def test_one_image_without_a_batch() -> None:
    image = bytes_(3, 9, 9)

    assert fresh()(image).shape == (3, 6, 6)
    table = fresh().plan(image, context())
    assert torch.equal(fresh().run(image, table), fresh().run(image[None], table)[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"^the images' dtype must be torch.uint8 or a floating-p"):
        fresh()(torch.zeros(2, 3, 9, 9, dtype=dtype))


@pytest.mark.parametrize("shape", [(3, 20), (4, 19), (4, 20, 1)])
def test_another_table_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError,
        match=r"^table must have the shape \(4, 20\), a row for each of the images and a column "
        r"for each name in columns, got \(",
    ):
        RECIPE.run(bytes_(4, 3, 9, 9), torch.zeros(shape))


def test_a_table_with_images_of_another_kind_is_refused() -> None:
    images = bytes_(4, 2, 9, 9)
    with pytest.raises(TypeError, match=r"^ColorJitter takes images of 3 channels, or 1, got 2$"):
        RECIPE.run(images, torch.zeros(4, 20))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_recipe_may_be_sent_to_a_worker(copied: Any) -> None:
    other = copied(RECIPE)

    assert other == RECIPE
    assert hash(other) == hash(RECIPE)


def test_a_recipe_has_to_say_its_steps() -> None:
    with pytest.raises(NotImplementedError):
        _ = Recipe().steps


def test_gradients_pass_through() -> None:
    images = floats(2, 3, 9, 9).requires_grad_()
    augment.RandomResizedCrop(6)(images).sum().backward()

    assert images.grad is not None
    assert images.grad.sum() == pytest.approx(2 * 3 * 36, rel=1e-5)


@pytest.mark.slow
def test_what_is_compiled_has_it_as_a_break_and_nothing_of_it_traced() -> None:
    images = bytes_(4, 3, 9, 9)
    table, graphs = planned(RECIPE, images), list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = RECIPE.run(images.flip(0), table)
        return out // 2

    assert torch.equal(torch.compile(step, backend=backend)(images), step(images))
    called = [node.target for graph in graphs for node in graph.graph.nodes if "call" in node.op]
    assert len(called) == 2  # the flip, the division
