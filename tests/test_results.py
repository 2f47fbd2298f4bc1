"""What a transform may return, and which memory that is."""

import collections
import dataclasses
import functools
import re
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from streamloader.device.streamless import Streamless
from streamloader.results import Fresh, OverwrittenError, check, memory, ordinary, tensors
from streamloader.testing import FakeDevice

X = torch.ones(2, 3)
META = Streamless(torch.device("meta"))
THERE = torch.ones(2, device="meta")
WHO = "transform f on batch 3"


class Moves:
    """Has a `.to` of its own, and tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def to(self, device: Any) -> "Moves":
        return Moves(*(tensor.to(device) for tensor in self.tensors))


# -- what the memory of a transform's result is --------------------------------------------------


def nbytes(value: Any) -> list[int]:
    """Of each tensor that is found, in no order that matters."""
    return sorted(tensor.nbytes for tensor in memory(value, FakeDevice()))


def test_memory_is_every_tensor_in_containers() -> None:
    assert nbytes({"a": [X], "b": (torch.ones(1), "c")}) == [4, 24]


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC|invariant):UserWarning")
@pytest.mark.parametrize(
    ("layout", "blocksize", "sizes"),
    [
        (torch.sparse_coo, None, [16, 64]),
        (torch.sparse_csr, None, [16, 32, 40]),
        (torch.sparse_csc, None, [16, 32, 40]),
        (torch.sparse_bsr, (2, 2), [16, 24, 32]),
        (torch.sparse_bsc, (2, 2), [16, 24, 32]),
    ],
    ids=str,
)
def test_memory_of_a_sparse_tensor_is_that_of_its_parts(
    layout: torch.layout, blocksize: tuple[int, int] | None, sizes: list[int]
) -> None:
    assert nbytes(torch.eye(4).to_sparse(layout=layout, blocksize=blocksize)) == sizes


def test_memory_of_a_nested_tensor_is_that_of_its_parts() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    assert {20, 24} <= set(nbytes(nested))


def test_memory_of_an_object_is_that_of_every_tensor_in_it() -> None:
    assert nbytes([Moves(X, torch.eye(3).to_sparse())]) == [12, 24, 48]


def test_memory_on_another_device_is_not_counted() -> None:
    assert nbytes([X, torch.ones(2, device="meta")]) == [24]


class Closed(Moves):
    @override
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class Slots:
    """Has no `__dict__`."""

    __slots__ = ("image",)

    def __init__(self, image: Tensor) -> None:
        self.image = image


class Linked:
    """Refers to itself."""

    def __init__(self, image: Tensor) -> None:
        self.image, self.me = image, self


@dataclasses.dataclass
class Holder:
    """A field, and what `__post_init__` hangs beside it."""

    label: int

    def __post_init__(self) -> None:
        self.image = X


@pytest.mark.parametrize(
    "value",
    [
        types.SimpleNamespace(image=X),
        collections.deque([X]),
        frozenset([X]),
        collections.UserList([X]),
        Holder(1),
        Closed(X),
        Slots(X),
        Linked(X),
        functools.partial(abs, X),
    ],
    ids=lambda value: type(value).__name__,
)
def test_memory_is_every_tensor_that_can_be_reached(value: Any) -> None:
    assert nbytes(value) == [X.nbytes]


# -- what it may be ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, "text", [], {"a": None}, (1, "b"), X, [X, None], Moves(X)])
def test_anything_but_none_is_a_batch(value: Any) -> None:
    assert all(tensor is X for tensor in tensors(value, WHO))


def test_none_is_an_error() -> None:
    message = (
        "transform f on batch 3 returned None: it must return the batch, also one that it changed "
        "in place"
    )
    with pytest.raises(TypeError, match=f"^{message}$"):
        tensors(None, WHO)


def test_a_tensor_on_another_accelerator_is_an_error() -> None:
    message = (
        "transform f on batch 3 returned a tensor on meta: the batch must stay on cpu; nothing "
        "orders what other devices do"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        check([X, THERE], X, FakeDevice(), WHO)


def test_on_the_host_it_may_be_anywhere() -> None:
    check([X, THERE], X, Streamless(torch.device("cpu")), WHO)


def test_a_batch_that_comes_back_to_the_cpu_is_an_error() -> None:
    message = re.escape(
        "transform f on batch 3 returned a batch on the CPU: it must stay on meta, at least a part "
        "of it. Take out .cpu() and the like, or do it in your loop"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        check([X], [THERE, 3], META, WHO)


@pytest.mark.parametrize("found", [[THERE, X], [], [THERE]], ids=["beside", "none", "there"])
def test_tensors_on_the_cpu_may_go_beside_the_devices(found: list[Tensor]) -> None:
    check(found, THERE, META, WHO)


def test_a_batch_that_was_on_the_cpu_may_stay_there() -> None:
    check([X], [X], META, WHO)


# -- ordinary tensors ----------------------------------------------------------------------------


def test_a_tensor_of_an_inference_mode_becomes_one_that_autograd_takes() -> None:
    with torch.inference_mode():
        made = {"x": X * 2, "n": 3}
    weight = torch.ones(2, 3, requires_grad=True)

    got = ordinary(made)
    (got["x"] * weight).sum().backward()

    assert torch.equal(got["x"], X * 2)
    assert weight.grad is not None


def test_other_tensors_stay_the_same_objects() -> None:
    value = [X, Moves(X), 3]

    assert ordinary(value) is value


# -- memory of its own ---------------------------------------------------------------------------

TWICE = re.escape(
    "transform f on batch 3 returned memory that it has returned for an earlier batch, and may "
    "have overwritten by now: batches are made ahead, and are the caller's. A CUDA graph writes to "
    "one place each time: copy what it returns, as in transform=lambda batch: "
    "graphed(batch).clone(). So it is with a mask, or with what a cache holds: copy it, or add it "
    "in your loop"
)


@pytest.mark.parametrize(
    "found",
    [[X], [X[:1]], [X.detach(), X], [torch.eye(3).to_sparse()]],
    ids=["tensor", "view", "detached", "sparse"],
)
def test_memory_that_is_returned_twice_is_an_error(found: list[Tensor]) -> None:
    fresh = Fresh(FakeDevice())
    fresh.check(found, [], WHO)

    with pytest.raises(OverwrittenError, match=f"^{TWICE}$"):
        fresh.check(found, [], WHO)


def test_so_it_is_after_any_number_of_batches() -> None:
    fresh, kept = Fresh(FakeDevice()), [torch.ones(2) for _ in range(5)]
    for tensor in kept:
        fresh.check([tensor], [], WHO)

    with pytest.raises(OverwrittenError, match=f"^{TWICE}$"):
        fresh.check(kept[:1], [], WHO)


def test_what_was_given_may_be_returned() -> None:
    fresh = Fresh(FakeDevice())
    for _ in range(2):
        fresh.check([X[:1], X], [X], WHO)


def test_parts_of_a_table_that_stays_are_memory_of_their_own() -> None:
    fresh, table = Fresh(FakeDevice()), torch.arange(6)
    for start in range(3):
        fresh.check([table[2 * start :][:2]], [], WHO)


def test_nothing_is_no_memory() -> None:
    fresh, empty = Fresh(FakeDevice()), torch.empty(0)
    for _ in range(2):
        fresh.check([empty], [], WHO)


def test_memory_on_another_device_is_not_looked_at() -> None:
    fresh = Fresh(FakeDevice())
    for _ in range(2):
        fresh.check([THERE], [], WHO)


def test_memory_that_has_died_is_forgotten() -> None:
    fresh = Fresh(FakeDevice())
    kept = torch.ones(1000)
    fresh.check([kept], [], WHO)
    for _ in range(2000):  # the allocator has given the same place again by then
        made = torch.ones(1000).split(10)
        fresh.check(made, [], WHO)
        alive = weakref.ref(made[0])
        del made
        assert alive() is None
    assert len(fresh._returned) < 500
    with pytest.raises(OverwrittenError, match=f"^{TWICE}$"):
        fresh.check([kept], [], WHO)


def test_the_first_part_of_a_table_is_refused_whatever_its_length() -> None:
    fresh, table = Fresh(FakeDevice()), torch.arange(6)
    fresh.check([table[:2]], [], WHO)

    with pytest.raises(OverwrittenError, match=f"^{TWICE}$"):
        fresh.check([table[:3]], [], WHO)


def test_memory_of_an_earlier_pass_is_forgotten() -> None:
    fresh = Fresh(FakeDevice())
    for _ in range(2):
        fresh.begin()
        fresh.check([X], [], WHO)
