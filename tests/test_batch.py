"""The record that travels, and what a tensor is beside its bytes."""

import runpy
from typing import Any

import pytest
import torch
from torch import Tensor

from streamloader import batch as module
from streamloader.batch import GONE, Batch, Dress
from streamloader.layout import EMPTY


class Image(Tensor):
    """A subclass with metadata."""

    size: Any


def image(*shape: int) -> Image:
    tensor = torch.ones(shape).as_subclass(Image)
    tensor.size_before = (3, 4)  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2), torch.ones((), dtype=torch.bool), torch.ones(2, requires_grad=True).detach()],
)
def test_a_tensor_that_is_only_its_elements_has_no_dress(tensor: Tensor) -> None:
    assert Dress.of(tensor) is None


def test_a_subclass_gets_its_class_and_metadata_back() -> None:
    dress = Dress.of(image(2))
    assert dress is not None

    dressed = dress.put_on(torch.zeros(2))

    assert type(dressed) is Image
    assert vars(dressed) == {"size_before": (3, 4)}
    assert not dressed.requires_grad


def test_metadata_set_later_on_the_source_does_not_travel() -> None:
    source = image(2)
    dress = Dress.of(source)
    assert dress is not None

    source.late = True  # type: ignore[attr-defined]

    assert vars(dress.put_on(torch.zeros(2))) == {"size_before": (3, 4)}


@pytest.mark.parametrize("trainable", [True, False])
def test_a_parameter_stays_one(*, trainable: bool) -> None:
    dress = Dress.of(torch.nn.Parameter(torch.ones(2), requires_grad=trainable))
    assert dress is not None

    dressed = dress.put_on(torch.zeros(2))

    assert type(dressed) is torch.nn.Parameter
    assert dressed.requires_grad is trainable


def test_a_tensor_that_wants_a_gradient_arrives_as_a_leaf_that_wants_one() -> None:
    dress = Dress.of(torch.ones(2, requires_grad=True) * 2)
    assert dress is not None

    dressed = dress.put_on(torch.zeros(2))
    dressed.sum().backward()

    assert type(dressed) is Tensor
    assert torch.equal(dressed.grad, torch.ones(2)) if dressed.grad is not None else False


def test_a_dress_is_put_on_the_same_memory() -> None:
    dress, tensor = Dress.of(image(2)), torch.zeros(2)
    assert dress is not None

    assert dress.put_on(tensor).data_ptr() == tensor.data_ptr()


def test_a_batch_has_nothing_yet() -> None:
    batch = Batch(3, GONE)

    assert (batch.number, batch.layout, batch.specs, batch.nbytes) == (3, EMPTY, (), 0)
    assert batch.value is GONE
    assert batch.slab is batch.ready is batch.made is None
    assert not batch.opaque


def test_batches_share_no_lists() -> None:
    one, other = Batch(0, None), Batch(1, None)

    one.memory.append(torch.empty(0))
    one.direct[0] = torch.empty(0)
    one.dresses.append(None)

    assert (other.memory, other.direct, other.dresses) == ([], {}, [])


def test_what_stands_for_a_tensor_is_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        made = runpy.run_path(str(module.__file__))
    assert made["GONE"].device.type == "cpu"
