"""The legs on the device: who waits for whom, and what a transform sees."""

import collections
import dataclasses
import functools
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from streamloader.batch import Batch
from streamloader.context import Context
from streamloader.device.streamless import Streamless
from streamloader.pack import Packer
from streamloader.stages import Pipeline, _memory
from streamloader.testing import FakeDevice
from streamloader.transforms import on

FIRST = Context(0, 0, 0, 0, apart=False)
SEEDED = Context(3, 0, 0, 0)
X = torch.ones(2, 3)


def doubled(batch: Any) -> Any:
    return batch * 2


class Image(Tensor):
    """A subclass with metadata."""


class Moves:
    """Has a `.to` of its own, and tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def to(self, device: Any) -> "Moves":
        return Moves(*(tensor.to(device) for tensor in self.tensors))


def sent(device: FakeDevice, pipeline: Pipeline, value: Any, context: Context = FIRST) -> Batch:
    pack = Packer(
        device,
        lambda nbytes, _: device.slab(nbytes),
        fresh=True,
        pinned=False,
        plan=pipeline.planner(context),
    )
    batch = pack(context.number, value, lambda: False)
    assert batch is not None
    pipeline.send(batch)
    return batch


def through(transforms: list[Any], value: Any, context: Context = FIRST) -> Any:
    device = FakeDevice()
    pipeline = Pipeline(device, transforms)
    batch = sent(device, pipeline, value, context)
    pipeline.transform(batch, context)
    return pipeline.hand_over(batch, context)


# -- streams -----------------------------------------------------------------------------------


def test_each_leg_has_one_stream_for_the_pipelines_life() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [doubled, doubled])
    for _ in range(3):
        pipeline.transform(sent(device, pipeline, X), FIRST)

    assert [name for _, name in device.verbs("stream")] == ["copy", "stage 0", "stage 1"]


def test_a_batch_goes_from_stream_to_stream_waited_for_and_recorded() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [doubled])
    device.log.clear()

    batch = sent(device, pipeline, torch.ones(2))
    pipeline.transform(batch, FIRST)
    pipeline.hand_over(batch, FIRST)

    assert [entry for entry in device.log if entry[0] != "stream"] == [
        ("slab", 64),
        ("arena", "copy", 8),
        ("copy", "copy", 8),
        ("record", "copy"),
        ("wait", "stage 0", "copy"),
        ("uses", "stage 0", 8),
        ("record", "stage 0"),
        ("wait", "default", "stage 0"),
        ("uses", "default", 8),
    ]


def test_it_is_handed_over_to_the_stream_that_is_current_then() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [])
    batch = sent(device, pipeline, X)
    device.log.clear()

    with device.on(device.stream("mine")):
        pipeline.hand_over(batch, FIRST)

    assert device.log[1:] == [("wait", "mine", "copy"), ("uses", "mine", X.nbytes)]


def test_a_transform_runs_on_its_own_stream() -> None:
    device = FakeDevice()
    seen: list[str] = []

    def look(batch: Any) -> Any:
        seen.append(device.current().name)
        return batch

    pipeline = Pipeline(device, [look, look])
    pipeline.transform(sent(device, pipeline, X), FIRST)

    assert seen == ["stage 0", "stage 1"]
    assert device.current().name == "default"


def test_the_copy_waits_for_what_was_written_on_the_device_before() -> None:
    device = FakeDevice()
    here = device.put(torch.zeros(2))
    device.current().submit(functools.partial(here.fill_, 5))
    pipeline = Pipeline(device, [])

    got = pipeline.hand_over(sent(device, pipeline, (here, X)), FIRST)

    assert ("wait", "copy", "default") in device.log
    assert got[0] is here
    assert here.tolist() == [5, 5]
    assert device.verbs("uses") == [("uses", "default", 8), ("uses", "default", X.nbytes)]


def test_a_sparse_tensor_on_the_device_is_recorded_by_its_parts() -> None:
    class Holds(FakeDevice):
        @override
        def holds(self, tensor: Tensor) -> bool:
            return True

    device = Holds()
    pipeline = Pipeline(device, [])

    pipeline.hand_over(sent(device, pipeline, torch.eye(4).to_sparse()), FIRST)

    assert device.verbs("uses") == [("uses", "default", 64), ("uses", "default", 16)]


def test_every_large_tensor_is_one_copy_and_small_ones_share_one() -> None:
    device = FakeDevice()
    large = torch.ones(1 << 18)

    sent(device, Pipeline(device, []), [large, X, X, large])

    assert [nbytes for *_, nbytes in device.verbs("copy")] == [1 << 20, 1 << 20, 64 + 24]


def test_the_event_is_set_even_if_the_copy_fails() -> None:
    class Full(FakeDevice):
        @override
        def arena(self, nbytes: int) -> Tensor:
            if nbytes == X.nbytes:
                raise MemoryError("full")
            return super().arena(nbytes)

    device = Full()
    pipeline = Pipeline(device, [])
    large = torch.ones(1 << 18)
    pack = Packer(device, lambda nbytes, _: device.slab(nbytes), fresh=True, pinned=False)
    batch = pack(0, [large, X], lambda: False)
    assert batch is not None

    with pytest.raises(MemoryError, match=r"^full$"):
        pipeline.send(batch)

    assert batch.ready is not None
    assert batch.ready.position == 1  # the first block's copy is under way


def test_a_batch_is_let_go_of_at_hand_over() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [])
    batch = sent(device, pipeline, [X])

    got = pipeline.hand_over(batch, FIRST)
    assert (batch.value, batch.memory) == (None, [])

    alive = weakref.ref(got[0])
    del got
    assert alive() is None
    assert device.arenas == 0


def test_editing_one_tensor_in_place_leaves_the_others_version() -> None:
    images, labels = through([], (torch.ones(2), torch.zeros(2)))
    weight = torch.ones(2, requires_grad=True)
    loss = (images * weight).sum()

    labels.add_(1)
    loss.backward()

    assert weight.grad is not None
    assert images.untyped_storage().data_ptr() == labels.untyped_storage().data_ptr()


# -- transforms --------------------------------------------------------------------------------


def test_transforms_are_called_in_order() -> None:
    assert through([doubled, lambda batch: batch + 1], X).tolist() == (X * 2 + 1).tolist()


def test_a_transform_runs_without_gradients() -> None:
    weight = torch.ones(2, 3, requires_grad=True)

    assert not through([lambda batch: batch * weight], X).requires_grad
    assert torch.is_grad_enabled()


def test_a_transform_runs_without_the_callers_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert through([lambda batch: batch @ batch.T], X).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")


def test_draws_are_those_of_the_context_and_the_stage() -> None:
    def draw(batch: Any) -> Any:
        return [*batch, torch.rand(3)]

    first, second = through([draw, draw], [], SEEDED)
    again, _ = through([draw, draw], [], SEEDED)
    other, _ = through([draw, draw], [], SEEDED._replace(number=1))

    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_without_a_seed_a_transform_draws_as_it_comes() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    assert torch.equal(through([lambda _: torch.rand(3)], X, FIRST), expected)


def test_a_seeded_transform_leaves_the_callers_generator() -> None:
    before = torch.get_rng_state()

    through([lambda _: torch.rand(3)], X, SEEDED)

    assert torch.equal(torch.get_rng_state(), before)


# -- opaque batches and inline -----------------------------------------------------------------


def test_an_object_of_its_own_kind_is_moved_and_transformed_at_hand_over() -> None:
    device = FakeDevice()
    streams: list[str] = []

    def look(batch: Any) -> Any:
        streams.append(device.current().name)
        return batch

    pipeline = Pipeline(device, [look])
    thing = Moves(X)
    batch = sent(device, pipeline, [thing])
    pipeline.transform(batch, FIRST)
    assert streams == []

    got = pipeline.hand_over(batch, FIRST)[0]

    assert streams == ["default"]
    assert type(got) is Moves
    assert got is not thing


def test_an_object_whose_to_returns_none_was_moved_in_place() -> None:
    class InPlace:
        def to(self, device: Any) -> None:
            self.device = device

    thing = InPlace()

    assert Pipeline(FakeDevice(), []).finish([thing], FIRST)[0] is thing
    assert thing.device == torch.device("cpu")


def test_inline_moves_and_transforms() -> None:
    meta = Streamless(torch.device("meta"))

    got = Pipeline(meta, []).finish((X, "a", torch.eye(2).to_sparse()), FIRST)
    transformed = Pipeline(FakeDevice(), [on(0, doubled), on(0, doubled)]).finish([X], FIRST)

    assert got[0].device.type == got[2].device.type == "meta"
    assert got[1] == "a"
    assert torch.equal(transformed[0], X * 4)


def test_inline_leaves_what_is_there_already() -> None:
    batch = [torch.ones(2, device="meta")]

    assert Pipeline(Streamless(torch.device("meta")), []).finish(batch, FIRST) is batch


def test_inline_keeps_a_subclasss_metadata_as_lookahead_does() -> None:
    image = torch.ones(2).as_subclass(Image)
    image.size_before = (3, 4)  # type: ignore[attr-defined]

    got = Pipeline(Streamless(torch.device("meta")), []).finish(image, FIRST)

    assert vars(got) == {"size_before": (3, 4)}


def test_inline_a_tensor_that_wants_a_gradient_is_a_leaf_as_with_lookahead() -> None:
    tensor = torch.ones(2, requires_grad=True)

    assert Pipeline(Streamless(torch.device("meta")), []).finish(tensor, FIRST).is_leaf


# -- what the memory of a transform's result is --------------------------------------------------


def nbytes(value: Any) -> list[int]:
    """Of each tensor that is found, in no order that matters."""
    return sorted(tensor.nbytes for tensor in _memory(value, FakeDevice()))


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


@pytest.mark.parametrize("wrap", [Closed, Slots, Linked], ids=lambda kind: str(kind.__name__))
def test_the_callers_stream_is_recorded_on_what_an_object_hides(wrap: Any) -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [lambda _: wrap(torch.ones(100))])
    batch = sent(device, pipeline, X)
    pipeline.transform(batch, FIRST)
    device.log.clear()

    pipeline.hand_over(batch, FIRST)

    assert device.log == [("wait", "default", "stage 0"), ("uses", "default", 400)]
