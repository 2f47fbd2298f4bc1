"""Which executor runs a program."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from streamloader import augment
from streamloader.augment import batches, execute, fused, reference
from streamloader.context import Context

RECIPE = augment.Compose([augment.RandomResizedCrop(4), augment.RandomHorizontalFlip()])
IMAGES = torch.rand(2, 3, 8, 9)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    execute._has_triton.cache_clear()
    yield
    execute._has_triton.cache_clear()


class OnCuda(Tensor):
    """Says that it is on a GPU."""

    is_cuda: Any = True


def run(images: Tensor) -> Tensor:
    layout = batches.layout(images)
    table = RECIPE.plan(layout, Context(0, 0, 0, 0))
    return execute.run(RECIPE.program(images.dtype), images, table, RECIPE.layouts(layout))


def test_elsewhere_it_is_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "run", lambda *_: "the definition")
    assert run(IMAGES) == "the definition"


def test_on_cuda_it_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "run", lambda *_: "Triton")
    assert run(IMAGES.as_subclass(OnCuda)) == "Triton"


def test_without_triton_it_is_slow_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.warns(
        UserWarning, match=r"one image at a time, slowly.*pip install triton"
    ) as said:
        made = [run(IMAGES.as_subclass(OnCuda)) for _ in range(2)]
    assert [images.shape for images in made] == [(2, 3, 4, 4)] * 2
    assert len(said) == 1


def test_where_gradients_are_wanted_it_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "run", lambda *_: pytest.fail("it has no gradients"))
    images = IMAGES.as_subclass(OnCuda).requires_grad_()
    run(images).sum().backward()
    assert images.grad is not None
