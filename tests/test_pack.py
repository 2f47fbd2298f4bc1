"""A host batch's bytes are in the slab, or kept as they were, before the next pull."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset, default_collate
from typing_extensions import override

from streamloader import tree
from streamloader.batch import GONE, Batch
from streamloader.context import Context
from streamloader.device.streamless import Streamless
from streamloader.layout import LARGE, plain
from streamloader.pack import Packer, fresh, owned
from streamloader.region import Region
from streamloader.sent import LITTLE, Sent
from streamloader.stages import Pipeline
from streamloader.testing import FakeDevice
from tests.transported import BATCHES, SMALLEST, crossed, lies_in, memory, received, same

CPU = Streamless(torch.device("cpu"))
DATA = TensorDataset(torch.arange(4))
pytestmark = [  # of what torch calls deprecated or unfinished
    pytest.mark.filterwarnings(r"ignore:torch\.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|invariant):UserWarning"),
]
NOBODY = Context(0, 0, 0, 0, apart=False)


class Image(Tensor):
    """A subclass with metadata."""


def image(tensor: Tensor) -> Image:
    made = tensor.as_subclass(Image)
    made.size_before = (3, 4)  # type: ignore[attr-defined]
    return made


class Moves:
    """Has a `.to` of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.moved = 0

    def to(self, device: Any) -> None:
        self.tensor = self.tensor.to(device)
        self.moved += 1


def open_() -> bool:
    return False


def packed(device: FakeDevice, value: Any, *, fresh: bool = False, pinned: bool = False) -> Batch:
    pack = Packer(device, lambda nbytes, _: device.slab(nbytes), fresh, pinned)
    batch = pack(0, value, open_)
    assert batch is not None
    return batch


def arrived(device: FakeDevice, batch: Batch) -> Any:
    """What comes out on the other side."""
    pipeline = Pipeline(device, [])
    pipeline.send(batch)
    return pipeline.hand_over(batch, NOBODY)


def there(value: Any, **options: bool) -> Any:
    device = FakeDevice()
    return arrived(device, packed(device, value, **options))


def plain_bytes(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().flatten().view(torch.uint8).tolist()
    return found


# -- what arrives ------------------------------------------------------------------------------

LABEL = torch.ones((), dtype=torch.bool)
X = torch.arange(24.0).reshape(2, 3, 2, 2)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
def test_bytes_of_every_dtype_arrive(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)

    label, got = there((LABEL, tensor))

    assert label.item() is True
    assert got.dtype == dtype
    assert plain_bytes(got) == plain_bytes(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0),
        torch.empty(0, 3),
        torch.empty(2, 0, 3),
        X,
        X.mT,
        X.to(memory_format=torch.channels_last),
        X[1:],
        torch.ones(1).as_strided((1, 1), (7, 9)),
    ],
)
def test_shapes_and_strides_arrive_as_they_went(tensor: Tensor) -> None:
    _, got = there((LABEL, tensor))

    assert torch.equal(got, tensor)
    assert (got.shape, got.stride()) == (tensor.shape, tensor.stride())


@pytest.mark.parametrize(
    "tensor",
    [X[:, 1:2], X[..., ::2], torch.ones(3, 1).expand(3, 4), X.flatten().as_strided((3, 3), (1, 1))],
)
def test_slices_and_expanded_tensors_arrive_whole(tensor: Tensor) -> None:
    assert torch.equal(there(tensor), tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    ],
    ids=["sparse", "quantized", "conjugate", "negative", "nested"],
)
def test_a_tensor_that_is_not_its_bytes_arrives_by_its_own_to(make: Callable[[], Tensor]) -> None:
    device, tensor = FakeDevice(), make()
    batch = packed(device, [tensor, X])

    got, other = arrived(device, batch)

    assert batch.opaque
    assert str(got) == str(tensor)
    assert got is not tensor
    assert torch.equal(other, X)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_a_compressed_sparse_tensor_arrives(layout: torch.layout) -> None:
    tensor = torch.eye(3).to_sparse(layout=layout)

    assert torch.equal(there(tensor).to_dense(), torch.eye(3))


def test_an_object_over_a_tensor_with_a_graph_arrives() -> None:
    sequence = pack_sequence([torch.ones(2, requires_grad=True)])

    assert torch.equal(there(sequence).data, torch.ones(2))


def test_a_subclass_arrives_with_its_metadata() -> None:
    got = there([image(torch.ones(3))])[0]

    assert type(got) is Image
    assert vars(got) == {"size_before": (3, 4)}


def test_a_slice_of_a_subclass_arrives_with_its_metadata() -> None:
    assert vars(there(image(torch.ones(3, 4)[:, :2]))) == {"size_before": (3, 4)}


def test_a_tensor_that_wants_a_gradient_arrives_as_a_leaf_that_does() -> None:
    leaf = torch.ones(2, requires_grad=True)

    for tensor in (leaf, leaf * 2, (leaf * 2)[::2]):
        got = there(tensor)
        assert got.requires_grad
        assert got.is_leaf


# -- the slab ----------------------------------------------------------------------------------


def test_every_tensor_is_where_the_layout_says() -> None:
    tensors = [torch.full((size,), n, dtype=torch.uint8) for n, size in enumerate((5, LARGE, 70))]
    batch = packed(FakeDevice(), tensors)
    assert batch.slab is not None

    for tensor, place in zip(tensors, batch.layout.places, strict=True):
        offset = batch.layout.blocks[place.block].offset
        assert offset is not None
        start = offset + place.offset
        assert torch.equal(batch.slab[start : start + tensor.numel()], tensor)


def test_packed_tensors_leave_a_stand_in_and_nothing_of_themselves() -> None:
    batch = packed(FakeDevice(), {"image": X, "name": "a", "labels": [X]})

    assert batch.value["image"] is batch.value["labels"][0] is GONE
    assert batch.value["name"] == "a"
    assert batch.direct == {}
    assert batch.nbytes == 2 * X.nbytes
    assert not batch.opaque


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.ones(4),
        lambda: torch.ones(LARGE),
        lambda: torch.ones(4, 4)[:, ::2],
        lambda: image(torch.ones(4)),
        lambda: torch.ones(4, dtype=torch.complex64).conj(),
    ],
    ids=["small", "large", "slice", "subclass", "conjugate"],
)
def test_what_the_source_writes_after_packing_does_not_arrive(value: Callable[[], Tensor]) -> None:
    tensor = value()
    device = FakeDevice()
    batch = packed(device, [tensor])

    tensor.fill_(7)

    assert torch.equal(arrived(device, batch)[0], value())


def test_what_the_source_writes_into_an_object_does_not_arrive() -> None:
    thing = Moves(torch.ones(4))
    device = FakeDevice()
    batch = packed(device, [thing])

    thing.tensor.fill_(7)

    got = arrived(device, batch)[0]
    assert torch.equal(got.tensor, torch.ones(4))
    assert (got.moved, thing.moved) == (1, 0)


def test_a_tensor_on_a_third_device_is_left_to_its_own_stream() -> None:
    elsewhere = torch.ones(2, device="meta")
    thing = Moves(elsewhere)

    batch = packed(FakeDevice(), [elsewhere, thing])

    assert batch.opaque
    assert batch.value[0] is elsewhere
    assert batch.value[1] is not thing
    assert batch.value[1].tensor is elsewhere


def test_an_object_that_nobody_else_has_is_not_copied() -> None:
    thing = Moves(torch.ones(4))

    assert there([thing], fresh=True)[0] is thing


class Checked(dict[str, Tensor]):
    """Refuses what is no image."""

    @override
    def __setitem__(self, name: str, value: Tensor) -> None:
        assert value.shape == X.shape
        super().__setitem__(name, value)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_container_that_checks_its_values_never_holds_a_stand_in(*, fresh: bool) -> None:
    device = FakeDevice()
    value = Checked(image=X)
    batch = packed(device, [value, X], fresh=fresh)

    assert (batch.value[0] is value) is fresh
    assert batch.value[0]["image"] is X
    assert batch.value[1] is GONE
    assert batch.leaves[0] is batch.leaves[1] is GONE

    got = arrived(device, batch)[0]
    assert type(got) is Checked
    assert got["image"] is not X
    assert torch.equal(got["image"], X)
    assert value["image"] is X
    assert batch.leaves == []


def test_leaves_are_what_stands_for_each_in_order() -> None:
    device = FakeDevice()
    here, thing = device.put(torch.ones(2)), Moves(torch.ones(2))

    batch = packed(device, {"a": X, "b": (thing, here)}, fresh=True)

    assert [id(leaf) for leaf in batch.leaves] == [id(GONE), id(thing), id(here)]


@pytest.mark.parametrize("fresh", [True, False])
def test_what_an_object_hides_on_the_device_is_waited_for_if_it_may_change(*, fresh: bool) -> None:
    device = FakeDevice()
    here = device.put(torch.ones(3))

    batch = packed(device, [{1: (here,)}, Moves(here)], fresh=fresh)

    assert any(tensor is here for tensor in batch.memory)
    assert batch.made is not None


def test_a_batch_without_tensors_needs_no_slab() -> None:
    device = FakeDevice()
    value = {"names": ["a"], "empty": None}

    batch = packed(device, value)

    assert batch.slab is None
    assert batch.value == value
    assert device.verbs("slab") == []


def test_a_batch_of_empty_tensors_needs_no_slab_and_no_copy() -> None:
    device = FakeDevice()

    got = arrived(device, packed(device, (torch.empty(0, 3), torch.empty(2, 0))))

    assert [tensor.shape for tensor in got] == [(0, 3), (2, 0)]
    assert device.verbs("slab") == device.verbs("copy") == []


def test_of_a_pass_that_is_closed_no_batch_is_made() -> None:
    pack = Packer(FakeDevice(), lambda *_: None, fresh=True, pinned=False)

    assert pack(0, X, lambda: True) is None


def test_the_one_who_gives_slabs_is_told_how_to_know_of_the_end() -> None:
    device, heard = FakeDevice(), []

    def take(nbytes: int, until: Callable[[], bool]) -> Tensor:
        heard.append((nbytes, until))
        return device.slab(nbytes)

    Packer(device, take, fresh=True, pinned=False)(0, torch.ones(3), open_)

    assert heard == [(64, open_)]


# -- in a worker's slab ------------------------------------------------------------------------


def shared_batch(device: Any, make: Any, **options: Any) -> tuple[Batch, Region]:
    """A batch that came through shared memory, packed; and that memory."""
    region = Region(memory(), ahead=8)
    region.refused = options.pop("refused", False)
    found = received(crossed(region.shared, make))
    take = lambda nbytes, _: device.slab(nbytes)  # noqa: E731
    pack = Packer(device, take, fresh=True, pinned=False, region=region, **options)
    batch = pack(0, found, open_)
    assert batch is not None
    assert batch.shared is isinstance(found, Sent)
    return batch, region


@pytest.mark.parametrize("refused", [False, True], ids=["pinned", "refused"])
@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_a_batch_in_a_slab_arrives_as_it_was(make: Callable[[], Any], *, refused: bool) -> None:
    device = FakeDevice()
    batch, region = shared_batch(device, make, refused=refused)

    got = arrived(device, batch)

    same(got, make())
    assert [
        leaf
        for leaf in tree.leaves(got)
        if type(leaf) is Tensor and plain(leaf) and lies_in(region.shared, leaf)
    ] == []


def test_what_is_in_the_slab_is_sent_from_there_and_the_rest_packed() -> None:
    device, label = FakeDevice(), torch.ones(3)
    large = torch.ones(LARGE, dtype=torch.uint8)
    batch, _ = shared_batch(device, lambda: [large, image(label.clone()), torch.ones(9), label])

    assert batch.sent is not None
    assert [block.shared for block in batch.layout.blocks] == [True, True, False]
    assert [place.block for place in batch.layout.places] == [0, 2, 1, 1]
    assert device.verbs("slab") == [("slab", 64)]
    assert batch.nbytes == LARGE + 9 * 4 + 2 * 12


def test_a_batch_of_much_text_is_opened_here_and_its_tensors_are_sent_from_the_slab() -> None:
    device = FakeDevice()
    batch, _ = shared_batch(device, lambda: [torch.arange(9), "x" * LITTLE])

    assert [block.shared for block in batch.layout.blocks] == [True]
    numbers, text = arrived(device, batch)
    assert (numbers.tolist(), text) == ([*range(9)], "x" * LITTLE)


def test_a_slab_that_is_not_pinned_is_copied_into_one_that_is() -> None:
    batch, region = shared_batch(FakeDevice(), lambda: [torch.ones(LARGE)], refused=True)

    assert batch.sent is None
    assert batch.slab is not None
    assert region.shared.held == 0


def test_a_slab_of_memory_that_is_not_known_is_copied_too() -> None:
    device, shared = FakeDevice(), memory()
    found = received(crossed(shared, lambda: torch.arange(5)))

    batch = packed(device, found, fresh=True)

    assert batch.sent is None
    assert torch.equal(arrived(device, batch), torch.arange(5))


def test_whoever_plans_sees_the_batch() -> None:
    device, seen = FakeDevice(), []

    def plan(number: int, value: Any) -> Tensor:
        seen.append((number, value[0].tolist()))
        return torch.zeros(2)

    batch, _ = shared_batch(device, lambda: [torch.arange(5)], plan=plan)

    assert seen == [(0, [0, 1, 2, 3, 4])]
    assert batch.sent is not None
    same(arrived(device, batch).batch, [torch.arange(5)])


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_on_the_cpu_a_batch_is_what_lies_in_the_slab(make: Callable[[], Any]) -> None:
    batch, region = shared_batch(CPU, make)

    same(batch.value, make())
    there = [leaf for leaf in tree.leaves(batch.value) if type(leaf) is Tensor and leaf.numel()]
    assert all(
        lies_in(region.shared, leaf) for leaf in there if not leaf.requires_grad and plain(leaf)
    )


def on_the_cpu(region: Region, make: Callable[[], Any]) -> Any:
    """What the caller gets of a batch that came through shared memory."""
    pack = Packer(CPU, lambda *_: None, fresh=True, pinned=False, region=region)
    batch = pack(0, received(crossed(region.shared, make)), open_)
    assert batch is not None
    return batch.value


@pytest.mark.parametrize("dtype", [torch.int64, SMALLEST])
def test_on_the_cpu_a_batch_is_copied_once_many_are_kept(dtype: torch.dtype) -> None:
    region = Region(memory(each=4), ahead=1)
    kept = [
        on_the_cpu(region, lambda: torch.full((8,), n, dtype=torch.uint8).view(dtype))  # noqa: B023
        for n in range(10)
    ]

    assert [int(value.view(torch.uint8)[0]) for value in kept] == list(range(10))
    assert [lies_in(region.shared, value) for value in kept] == [True] + [False] * 9


def test_on_the_cpu_a_batch_is_copied_where_another_loader_has_pinned_its_slab() -> None:
    """From there a copy of the caller's may run after he has let go of the batch."""
    region = Region(memory(), ahead=8)
    assert lies_in(region.shared, on_the_cpu(region, lambda: torch.arange(5)))
    region.shared.pin(0, 1, lambda _: int)
    value = on_the_cpu(region, lambda: torch.arange(5))

    assert not lies_in(region.shared, value)
    same(value, torch.arange(5))


# -- on the device already ---------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False])
def test_a_tensor_on_the_device_stays_and_is_waited_for(*, fresh: bool) -> None:
    device = FakeDevice()
    here = device.put(torch.ones(3))
    device.log.clear()

    batch = packed(device, (here, torch.zeros(2)), fresh=fresh)

    assert batch.value[0] is here
    assert batch.memory[0] is here
    assert batch.made is not None
    assert device.verbs("record") == [("record", "default")]
    assert batch.nbytes == 8
    assert arrived(device, batch)[0] is here


def test_without_one_nothing_is_recorded() -> None:
    device = FakeDevice()

    assert packed(device, X).made is None
    assert device.verbs("record") == []


# -- pinned ------------------------------------------------------------------------------------


@pytest.fixture
def _all_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: True)


@pytest.mark.usefixtures("_all_pinned")
def test_a_large_pinned_tensor_is_sent_from_where_it_lies() -> None:
    device = FakeDevice()
    large, small = torch.ones(2, LARGE).T, torch.ones(3)

    batch = packed(device, [small, large], fresh=True, pinned=True)

    assert batch.direct == {1: large}
    assert batch.direct[1] is large
    assert batch.layout.slab == 64
    assert torch.equal(arrived(device, batch)[1], large)


@pytest.mark.usefixtures("_all_pinned")
def test_it_is_sent_from_the_middle_of_its_memory_too() -> None:
    device = FakeDevice()
    large = torch.arange(2 * LARGE, dtype=torch.int32)[LARGE:]

    batch = packed(device, large, fresh=True, pinned=True)

    assert batch.slab is None
    assert torch.equal(arrived(device, batch), large)


@pytest.mark.usefixtures("_all_pinned")
def test_a_pinned_tensor_that_may_be_written_again_is_packed() -> None:
    batch = packed(FakeDevice(), torch.ones(LARGE), pinned=False)

    assert batch.direct == {}
    assert batch.slab is not None


# -- fresh, owned ------------------------------------------------------------------------------


def joined(items: list[Any]) -> Any:
    return default_collate(items)


class Wraps(DataLoader[Any]):
    """Has a pass of its own, which may do anything."""

    @override
    def __iter__(self) -> Any:
        yield from super().__iter__()


class Prepares(DataLoader[Any]):
    """Does something at the start of a pass, which is torch's own."""

    @override
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATA), True),
        (DataLoader(DATA, num_workers=1), True),
        (DataLoader(DATA, num_workers=1, collate_fn=joined), True),
        (DataLoader(DATA, collate_fn=joined), False),
        (Wraps(DATA), False),
        (Wraps(DATA, num_workers=1), False),
        (Prepares(DATA), True),
        (DataLoader(DATA, batch_size=None), False),
        (DataLoader(DATA, batch_size=None, num_workers=1), True),
        ([X], False),
        (iter([X]), False),
    ],
)
def test_batches_are_nobody_elses_if_a_dataloader_made_them(loader: Any, *, expected: bool) -> None:
    assert fresh(loader, iter(loader)) is expected


def test_a_batch_that_is_nobody_elses_is_passed_on() -> None:
    batch = [X]

    assert owned(batch, CPU, fresh=True) is batch


def test_the_tensors_of_a_batch_that_leaves_the_host_are_passed_on() -> None:
    assert owned([X], FakeDevice(), fresh=False)[0] is X


@pytest.mark.parametrize("value", [lambda: ["a"], lambda: {"a": 1}, lambda: np.ones(1)])
def test_what_the_source_writes_into_a_container_or_an_array_does_not_arrive(
    value: Callable[[], Any],
) -> None:
    device, source = FakeDevice(), value()
    batch, kept = packed(device, [source, X]), owned([source, X], CPU, fresh=False)
    passed = packed(device, [source, X], fresh=True)

    source[next(iter(source)) if isinstance(source, dict) else 0] = 7

    assert arrived(device, batch)[0] == kept[0] == value()
    assert arrived(device, passed)[0] is source


def test_what_the_source_writes_into_a_subclasss_metadata_does_not_arrive() -> None:
    device, tensor = FakeDevice(), image(torch.ones(2))
    tensor.names_of_all = ["a"]  # type: ignore[attr-defined]
    batch = packed(device, tensor)

    tensor.names_of_all.append("b")  # type: ignore[attr-defined]

    assert arrived(device, batch).names_of_all == ["a"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(1.0),
        lambda: torch.empty(0, 3),
        lambda: X.mT,
        lambda: torch.ones(3, 1).expand(3, 4),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        lambda: torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_on_the_cpu_a_batch_is_copied(make: Callable[[], Tensor]) -> None:
    tensor = make()
    got = owned((tensor, "a"), CPU, fresh=False)[0]

    assert got is not tensor
    assert type(got) is type(tensor)
    assert str(got) == str(tensor)
    assert got.requires_grad == tensor.requires_grad


def test_on_the_cpu_what_the_source_writes_later_does_not_show() -> None:
    tensor, thing = image(torch.ones(2)), Moves(torch.ones(2))
    before = copy.deepcopy(thing.tensor)

    got = owned([tensor, thing], CPU, fresh=False)
    tensor.fill_(7)
    thing.tensor.fill_(7)

    assert got[0].tolist() == [1, 1]
    assert vars(got[0]) == {"size_before": (3, 4)}
    assert torch.equal(got[1].tensor, before)


def test_on_the_cpu_a_copy_keeps_its_strides() -> None:
    assert owned(X.mT, CPU, fresh=False).stride() == X.mT.stride()


def test_on_the_cpu_with_lookahead_bytes_are_counted_and_nothing_is_packed() -> None:
    pack = Packer(CPU, lambda *_: None, fresh=False, pinned=False)

    batch = pack(0, [X, torch.eye(2).to_sparse()], open_)

    assert batch is not None
    assert batch.nbytes == X.nbytes
    assert batch.specs == ()
    assert torch.equal(batch.value[0], X)
    assert batch.value[0] is not X
