"""The contract about batches: what arrives where, as what, and in whose memory."""

from __future__ import annotations

import collections
import io
import pathlib
import threading
import types
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from typing_extensions import override

import streamloader.loader
from streamloader import StreamLoader
from streamloader.device.streamless import Streamless
from streamloader.testing import FakeDevice
from tests.loaders import DEPTHS, SWEPT, Recording, batches, devices, fill, ids, number_of

SECONDS = 10.0
"""Bound of every wait."""

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@pytest.fixture(params=SWEPT)
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> Any:
    return request.param()


APART = [
    pytest.param((made.values[0], depth), id=f"{made.id}-{depth}")
    for made in devices()
    for depth in DEPTHS[:3]
    if made.id == "cpu" or depth > 0
]
"""All but FakeDevice inline, whose memory is the host's: `.to` may give the same tensor."""


@pytest.fixture(params=APART)
def apart(request: pytest.FixtureRequest) -> tuple[Any, int]:
    make, depth = request.param
    return make(), depth


def elsewhere() -> Streamless:
    """A device whose memory is surely another's: what was not moved shows (values do not)."""
    return Streamless(torch.device("meta"))


@pytest.fixture(params=[*devices(), pytest.param(elsewhere, id="meta")])
def place(request: pytest.FixtureRequest) -> Any:
    """A device, or one whose tensors have no values."""
    return request.param()


def one(batch: Any, device: Any, depth: int, **options: Any) -> Any:
    """What becomes of a batch from a list."""
    [out] = StreamLoader([batch], device, prefetch_batches=depth, **options)
    return out


def assert_moved(new: Tensor, old: Tensor, device: Any) -> None:
    """`new` is `old`, on the device: class, dtype, shape, strides, values."""
    assert type(new) is type(old)
    assert new.dtype == old.dtype
    assert new.shape == old.shape
    # Strides are those of any copy: dense ones keep theirs.
    assert new is old or new.stride() == old.clone().stride()
    if isinstance(device, Streamless):
        assert new.device.type == "meta"
    else:
        assert torch.equal(new, old)


def same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# -- 2: the device --------------------------------------------------------------------------------


def test_the_device_is_settled_at_the_first_next_on_the_callers_thread_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved: list[tuple[object, threading.Thread]] = []

    def resolve(asked: Any) -> FakeDevice:
        resolved.append((asked, threading.current_thread()))
        return FakeDevice()

    monkeypatch.setattr(streamloader.loader, "resolve", resolve)
    loader = StreamLoader(batches(3))
    iterator = iter(loader)
    before = loader.device
    assert before is None
    assert resolved == []

    caller = threading.Thread(target=lambda: next(iterator))
    caller.start()
    caller.join(SECONDS)
    assert resolved == [(None, caller)]
    assert loader.device == torch.device("cpu")
    assert ids(loader) == [0, 1, 2]
    assert ids(loader) == [0, 1, 2]
    assert len(resolved) == 1


def test_no_device_is_the_cpu_where_there_is_no_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    loader = StreamLoader(batches(2))
    assert [batch.device for batch in loader] == [torch.device("cpu")] * 2
    assert loader.device == torch.device("cpu")


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_can_be_asked_for(name: Any) -> None:
    loader = StreamLoader(batches(2), name)
    assert loader.device == torch.device("cpu")
    assert ids(loader) == [0, 1]


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "xpu", "mps", torch.device("cuda:1"), 0])
def test_a_device_that_does_not_exist_is_an_error_at_construction(
    monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(ValueError, match=r"^device must be .*, got ") as raised:
        StreamLoader(batches(2), device)
    assert repr(device) in str(raised.value)


def pretend(monkeypatch: pytest.MonkeyPatch, count: int, current: int) -> list[str]:
    """As if there were `count` CUDA devices; what was asked about the current one."""
    asked: list[str] = []

    def index() -> int:
        asked.append(threading.current_thread().name)
        return current

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", index)
    return asked


def test_an_index_beyond_the_last_is_an_error_at_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 2, 0)
    StreamLoader(batches(2), "cuda:1")
    with pytest.raises(ValueError, match=r"^device must have an index below 2.*got 'cuda:2'"):
        StreamLoader(batches(2), "cuda:2")


def test_construction_does_not_ask_which_device_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, 2, 1)
    for device in (None, "cuda", "cuda:1", 1):
        StreamLoader(batches(2), device)
    assert asked == []


@pytest.mark.parametrize(("asked", "index"), [(None, 1), ("cuda", 1), ("cuda:0", 0), (0, 0)])
def test_a_device_without_an_index_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, asked: Any, index: int
) -> None:
    pretend(monkeypatch, 2, 1)
    monkeypatch.setenv("LOCAL_RANK", str(index))
    settled = streamloader.device.resolve(streamloader.device.check(asked))
    assert settled.device == torch.device("cuda", index)


def test_a_local_rank_that_disagrees_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 4, 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    streamloader.device._warn_of_rank.cache_clear()
    with pytest.warns(UserWarning, match=r"device 0 although LOCAL_RANK is 3"):
        streamloader.device.resolve(None)
    streamloader.device.resolve(None)  # a second warning would be an error


# -- 4: any nesting -------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


Point = collections.namedtuple("Point", "x to")  # untyped, unlucky name


def test_e01_namedtuples_keep_their_class(place: Any, depth: int) -> None:
    pair = one(Pair(fill(1), fill(2)), place, depth)
    assert type(pair) is Pair
    assert_moved(pair.x, fill(1), place)
    assert_moved(pair.y, fill(2), place)
    point = one(Point(fill(1), fill(2)), place, depth)
    assert type(point) is Point
    assert_moved(point.to, fill(2), place)


def test_what_torch_functions_return_keeps_its_class(place: Any, depth: int) -> None:
    old = torch.arange(6).view(2, 3).max(dim=1)
    new = one(old, place, depth)
    assert type(new) is type(old)
    assert_moved(new.values, old.values, place)
    assert_moved(new.indices, old.indices, place)


class Bag(dict[Any, Any]):
    def __init__(self, name: str) -> None:  # unlike dict's
        super().__init__()
        self.name = name

    def n(self) -> int:
        return len(self["x"])


class Checked(dict[str, Tensor]):
    """Takes integers only: a stand-in that is none would be refused."""

    @override
    def __setitem__(self, key: str, value: Tensor) -> None:
        if value.dtype != torch.int64:
            raise TypeError(f"{key} must be integers")
        super().__setitem__(key, value)


def test_e02_custom_dicts_keep_class_attributes_and_key_order(place: Any, depth: int) -> None:
    bag = Bag("b")
    bag.update({"z": fill(1), "x": fill(2), 3: "three"})
    new = one(bag, place, depth)
    assert type(new) is Bag
    assert new.name == "b"
    assert new.n() == 4
    assert list(new) == ["z", "x", 3]
    assert new[3] == "three"
    assert_moved(new["x"], fill(2), place)
    assert_moved(bag["x"], fill(2), None)


@pytest.mark.parametrize(
    "make",
    [
        OrderedDict,
        UserDict,
        types.MappingProxyType,
        lambda items: defaultdict(list, items),
        collections.ChainMap,
    ],
)
def test_e02_mappings_keep_their_class(place: Any, depth: int, make: Any) -> None:
    old = make({"b": fill(1), "a": [fill(2)], "n": 3})
    new = one(old, place, depth)
    assert type(new) is type(old)
    assert list(new) == ["b", "a", "n"]
    assert_moved(new["b"], fill(1), place)
    assert_moved(new["a"][0], fill(2), place)
    assert new["n"] == 3
    if isinstance(old, defaultdict):
        assert new["missing"] == []


def test_e02_a_mapping_may_check_its_values(device: Any, depth: int) -> None:
    checked = Checked()
    checked["x"] = fill(1)
    out = one(checked, device, depth)
    assert type(out) is Checked
    assert number_of(out["x"]) == 1


@dataclass
class Sample:
    x: Tensor
    ids: list[str]
    meta: dict[str, Tensor]


@dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    label: str = "l"


@dataclass
class Late:
    x: Tensor
    area: Tensor = field(init=False)
    never: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.area = self.x * 2


def test_e03_dataclasses_are_walked(place: Any, depth: int) -> None:
    old = Sample(fill(1), ["a", "b"], {"k": fill(2)})
    new = one(old, place, depth)
    assert type(new) is Sample
    assert_moved(new.x, fill(1), place)
    assert_moved(new.meta["k"], fill(2), place)
    assert new.ids == ["a", "b"]
    assert number_of(old.x) == 1
    assert old.x.device.type == "cpu"


@pytest.mark.parametrize("kind", [Frozen, Slotted])
def test_e03_frozen_and_slotted_dataclasses_too(place: Any, depth: int, kind: Any) -> None:
    old = kind(fill(1))
    new = one(old, place, depth)
    assert type(new) is kind
    assert_moved(old.x, fill(1), None)
    assert_moved(new.x, fill(1), place)


def test_e03_fields_that_init_does_not_take_are_set_not_computed(place: Any, depth: int) -> None:
    old = Late(fill(1))
    old.area = fill(7)  # not what __post_init__ would make of x
    new = one(old, place, depth)
    assert type(new) is Late
    assert_moved(new.area, fill(7), place)
    assert not hasattr(new, "never")


@dataclass
class Output(OrderedDict[str, Any]):
    """Like transformers' ModelOutput: a dataclass whose fields are also its items."""

    logits: Tensor
    loss: Tensor

    def __post_init__(self) -> None:
        for name in ("logits", "loss"):
            super().__setitem__(name, getattr(self, name))

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    @override
    def __reduce__(self) -> Any:
        return type(self), (self.logits, self.loss)


def test_e03_a_dataclass_that_is_a_mapping_is_moved_as_both(place: Any, depth: int) -> None:
    new = one(Output(fill(1), fill(2)), place, depth)
    assert type(new) is Output
    assert_moved(new.logits, fill(1), place)
    assert_moved(new["logits"], fill(1), place)
    assert list(new) == ["logits", "loss"]


def sparse(layout: torch.layout) -> Tensor:
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    with warnings.catch_warnings(action="ignore"):  # "in beta state", once in a process
        return torch.eye(4).mul(3).to_sparse(layout=layout, blocksize=block)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_e04_sparse_tensors_arrive(device: Any, depth: int, layout: torch.layout) -> None:
    old = {"a": sparse(layout), "x": fill(1)}
    new = one(old, device, depth)
    assert new["a"].layout == layout
    assert torch.equal(new["a"].to_dense(), torch.eye(4) * 3)
    assert number_of(new["x"]) == 1


@pytest.mark.parametrize("coalesced", [True, False])
def test_e04_sparse_tensors_keep_their_coalesced_flag(
    device: Any, depth: int, *, coalesced: bool
) -> None:
    places, values = torch.tensor([[1, 1], [2, 2]]), torch.tensor([1.0, 2.0])
    old = torch.sparse_coo_tensor(places, values, (4, 4), check_invariants=True)
    old = old.coalesce() if coalesced else old
    new = one(old, device, depth)
    assert new.is_coalesced() == coalesced
    assert new.to_dense()[1, 2] == 3


def test_e04_sparse_tensors_keep_requires_grad(device: Any, depth: int) -> None:
    assert one(torch.eye(3).to_sparse().requires_grad_(), device, depth).requires_grad


def test_e05_other_leaves_are_the_same_objects(place: Any, depth: int) -> None:
    class Thing:
        x = fill(1)

    others = {
        "n": 3,
        "f": 1.5,
        "none": None,
        "raw": b"..",
        "fn": len,
        "path": pathlib.Path("p"),
        "thing": Thing(),
        "class": Tensor,
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "set": {1, 2},
        "range": range(3),
    }
    new = one({"x": fill(1), **others}, place, depth)
    assert_moved(new["x"], fill(1), place)
    assert list(new) == ["x", *others]
    for key, other in others.items():
        assert new[key] is other, key


def test_e05_containers_and_arrays_of_a_source_that_may_write_to_them_are_copied(
    place: Any, depth: int
) -> None:
    batch = {"x": fill(1), "names": ["a", "b"], "array": fill(1).numpy()}
    new = one(batch, place, depth)
    assert new["names"] == ["a", "b"]
    assert new["names"] is not batch["names"]
    assert new["array"].tolist() == [1] * 4
    assert new["array"] is not batch["array"]


def test_e05_a_size_arrives() -> None:
    assert one({"x": fill(1), "size": torch.Size([1, 2])}, FakeDevice(), 2)["size"] == (1, 2)


@pytest.mark.parametrize("batch", [None, 3, "text", (), [], {}, [{}, ()], (None, "a")], ids=repr)
def test_i07_batches_without_tensors_pass(place: Any, depth: int, batch: Any) -> None:
    source = [fill(0), batch, fill(1), batch]
    loader = StreamLoader(source, place, prefetch_batches=depth)
    first, second, third, fourth = loader
    assert_moved(first, fill(0), place)
    assert_moved(third, fill(1), place)
    assert second == fourth == batch
    assert type(second) is type(batch)


class DeviceOnly:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> DeviceOnly:
        return type(self)(self.x.to(device))


class KeywordOnly(DeviceOnly):
    @override
    def to(self, device: torch.device, *, non_blocking: bool = False) -> KeywordOnly:
        return type(self)(self.x.to(device, non_blocking=non_blocking))


class InPlace(DeviceOnly):
    @override
    def to(self, device: Any, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        assert not args
        assert not kwargs
        self.x = self.x.to(device)


class Broken(DeviceOnly):
    @override
    def to(self, device: torch.device, non_blocking: bool = False) -> Broken:
        raise TypeError("inside")


class Encoding(UserDict[str, Any]):
    """Like transformers' BatchEncoding."""

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


@dataclass
class Own:
    """A dataclass that knows better which fields to move."""

    x: Tensor
    host: Tensor

    def to(self, device: torch.device) -> Own:
        return Own(self.x.to(device), self.host)


@pytest.mark.parametrize("kind", [DeviceOnly, KeywordOnly, InPlace])
def test_e06_objects_with_their_own_to_are_moved_by_it(place: Any, depth: int, kind: Any) -> None:
    new = one({"a": kind(fill(1)), "x": fill(2)}, place, depth)
    assert type(new["a"]) is kind
    assert_moved(new["a"].x, fill(1), place)
    assert_moved(new["x"], fill(2), place)


def test_e06_an_error_inside_to_is_shown(device: Any, depth: int) -> None:
    source: list[Any] = [fill(0), Broken(fill(1))]
    loader = StreamLoader(source, device, prefetch_batches=depth)
    seen: list[Tensor] = []
    with pytest.raises(TypeError, match=r"^inside$"):
        seen.extend(loader)
    assert [number_of(batch) for batch in seen] == [0]


def test_e02_a_batch_encoding_is_moved_by_its_own_to(place: Any, depth: int) -> None:
    new = one(Encoding({"ids": fill(1), "mask": fill(2)}), place, depth)
    assert type(new) is Encoding
    assert list(new) == ["ids", "mask"]
    assert_moved(new["ids"], fill(1), place)
    assert_moved(new["mask"], fill(2), place)


def test_an_own_to_comes_before_the_rule_for_dataclasses(depth: int) -> None:
    new = one(Own(fill(1), fill(2)), elsewhere(), depth)
    assert new.x.device.type == "meta"
    assert new.host.device.type == "cpu"


@pytest.mark.parametrize("make", [InPlace, lambda x: Encoding({"x": x})])
def test_a_to_that_works_in_place_leaves_the_sources_object_alone(depth: int, make: Any) -> None:
    old = make(fill(1))
    one(old, elsewhere(), depth)
    inside = old.x if isinstance(old, InPlace) else old["x"]
    assert inside.device.type == "cpu"


def test_a_tensordict_is_moved_by_its_own_to(place: Any, depth: int) -> None:
    old = TensorDict({"x": torch.ones(2, 3), "in": {"y": torch.zeros(2)}}, batch_size=[2])
    new = one((old, fill(1)), place, depth)
    assert isinstance(new[0], TensorDict)
    assert new[0].batch_size == (2,)
    assert_moved(new[0]["x"], torch.ones(2, 3), place)
    assert_moved(new[0]["in", "y"], torch.zeros(2), place)
    assert_moved(new[1], fill(1), place)


def test_e07_packed_sequences_stay_whole(place: Any, depth: int) -> None:
    old = pack_sequence([fill(1, 2), fill(2, 4), fill(3, 1)], enforce_sorted=False)
    new = one({"ps": old, "x": fill(1)}, place, depth)["ps"]
    assert type(new) is PackedSequence
    assert new.batch_sizes.device.type == "cpu"
    assert torch.equal(new.batch_sizes, old.batch_sizes)
    assert_moved(new.data, old.data, place)
    if isinstance(place, Streamless):
        return
    for got, wanted in zip(pad_packed_sequence(new), pad_packed_sequence(old), strict=True):
        assert torch.equal(got, wanted)


def test_e08_tensors_on_the_device_stay_and_are_not_copied(depth: int) -> None:
    device = FakeDevice()
    here, there = fill(1), device.put(fill(2))
    new = one({"cpu": here, "there": there}, device, depth)
    assert new["there"] is there
    assert number_of(new["cpu"]) == 1
    assert sum(nbytes for *_, nbytes in device.verbs("copy")) == (here.nbytes if depth else 0)


@pytest.mark.parametrize("transform", [None, lambda x: x])
def test_e08_tensors_on_the_device_are_waited_for(depth: int, transform: Any) -> None:
    device = FakeDevice(looks=3)

    def source() -> Iterator[Tensor]:
        for number in range(6):
            late = device.put(fill(-1))
            device.copy(late, fill(number))  # submitted to the stream that is current, not run
            yield late

    loader = StreamLoader(source(), device, prefetch_batches=max(depth, 1), transform=transform)
    assert ids(loader) == [0, 1, 2, 3, 4, 5]


def test_e08_a_transform_waits_for_tensors_on_the_device(depth: int) -> None:
    device = FakeDevice(looks=3)
    seen: list[int] = []

    def source() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(6):
            late = device.put(fill(-1))
            device.copy(late, fill(number))
            yield late, fill(number)

    def look(batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(number_of(batch[0]))
        return batch[0] + batch[1]

    loader = StreamLoader(source(), device, prefetch_batches=max(depth, 1), transform=look)
    assert ids(loader) == [0, 2, 4, 6, 8, 10]
    assert seen == [0, 1, 2, 3, 4, 5]


def test_e08_the_callers_stream_is_recorded_on_tensors_that_were_there() -> None:
    device = FakeDevice()
    there = device.put(fill(2, 512))
    one(there, device, 2)
    assert ("uses", "default", there.nbytes) in device.log


def test_e10_any_nesting_and_arity(place: Any, depth: int) -> None:
    item = ([fill(1), fill(2), fill(3)], {"boxes": [fill(4), fill(5)], "n": 2}, "id", (fill(6),))
    new = one(item, place, depth)
    assert [type(part) for part in new] == [list, dict, str, tuple]
    assert list(new[1]) == ["boxes", "n"]
    assert (new[1]["n"], new[2]) == (2, "id")
    moved = [*new[0], *new[1]["boxes"], *new[3]]
    assert len(moved) == 6
    for number, tensor in enumerate(moved, 1):
        assert_moved(tensor, fill(number), place)


def test_e10_a_deep_batch(device: Any, depth: int) -> None:
    batch: Any = fill(7)
    for _ in range(50):
        batch = [(batch,), {"k": None}]
    batch = one(batch, device, depth)
    for _ in range(50):
        (batch,), other = batch
        assert other == {"k": None}
    assert number_of(batch) == 7


class Titled(list[Tensor]):
    def __init__(self, title: str, items: Any) -> None:
        super().__init__(items)
        self.title = title


def test_a_list_subclass_keeps_class_and_attributes(place: Any, depth: int) -> None:
    old = Titled("t", [fill(1), fill(2)])
    new = one(old, place, depth)
    assert type(new) is Titled
    assert_moved(old[1], fill(2), None)
    assert new.title == "t"
    assert_moved(new[1], fill(2), place)


# -- 4: tensors -----------------------------------------------------------------------------------


class Tagged(Tensor):
    tag: str


def tagged(tensor: Tensor, tag: str) -> Tagged:
    new = tensor.as_subclass(Tagged)
    new.tag = tag
    return new


def test_tensor_subclasses_keep_class_and_metadata(place: Any, depth: int) -> None:
    new = one([tagged(fill(1), "a"), tagged(fill(2), "b")], place, depth)
    assert [type(tensor) for tensor in new] == [Tagged, Tagged]
    assert [tensor.tag for tensor in new] == ["a", "b"]


def test_torchvisions_tensors_keep_class_and_metadata(place: Any, depth: int) -> None:
    image = tv_tensors.Image(torch.arange(48, dtype=torch.uint8).view(3, 4, 4))
    boxes = tv_tensors.BoundingBoxes([[0, 1, 2, 3]], format="XYWH", canvas_size=(4, 4))
    mask = tv_tensors.Mask(torch.ones(4, 4, dtype=torch.bool))
    new = one({"image": image, "boxes": boxes, "mask": mask}, place, depth)
    assert_moved(new["image"], image, place)
    assert_moved(new["boxes"], boxes, place)
    assert_moved(new["mask"], mask, place)
    assert new["boxes"].format is tv_tensors.BoundingBoxFormat.XYWH
    assert new["boxes"].canvas_size == (4, 4)


def test_parameters_stay_parameters(place: Any, depth: int) -> None:
    new = one(nn.Parameter(torch.ones(3)), place, depth)
    assert isinstance(new, nn.Parameter)
    assert new.requires_grad
    frozen = one(nn.Parameter(torch.ones(3), requires_grad=False), place, depth)
    assert not frozen.requires_grad


def test_requires_grad_arrives_and_the_tensor_is_the_callers_leaf(place: Any, depth: int) -> None:
    old = [torch.ones(3, requires_grad=True), torch.ones(3)]
    new = one(old, place, depth)
    assert [tensor.requires_grad for tensor in new] == [True, False]
    assert new[0].is_leaf
    if not isinstance(place, Streamless):
        new[0].sum().backward()
        assert torch.equal(new[0].grad, torch.ones(3))


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def test_l02_no_dtype_changes(place: Any, depth: int) -> None:
    old = [torch.tensor([1, 0, 1]).to(dtype) for dtype in DTYPES]  # 3 items: odd sizes, all packed
    new = one(old, place, depth)
    for got, wanted in zip(new, old, strict=True):
        assert_moved(got, wanted, place)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_l02_eight_bit_floats_too(device: Any, depth: int, dtype: torch.dtype) -> None:
    new = one((torch.tensor([1.0, 2.0]).to(dtype), fill(1)), device, depth)
    assert new[0].dtype == dtype
    assert new[0].float().tolist() == [1.0, 2.0]


def test_l02_ids_are_exact(device: Any, depth: int) -> None:
    old = {"ids": torch.arange(99_990, 100_001), "big": torch.tensor([2**62 + 1])}
    new = one(old, device, depth)
    assert new["ids"].tolist() == old["ids"].tolist()
    assert int(new["big"]) == 2**62 + 1


def test_k03_nothing_is_scaled_unasked(device: Any, depth: int) -> None:
    old = torch.arange(256, dtype=torch.uint8)
    assert_moved(one(old, device, depth), old, device)


def test_shapes_stay_0_d_and_empty_ones_too(place: Any, depth: int) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0, 4), (1,), (1, 1), (), (0, 0), (5, 1, 2)]
    old = [torch.full(shape, number) for number, shape in enumerate(shapes)]
    for got, wanted in zip(one(old, place, depth), old, strict=True):
        assert_moved(got, wanted, place)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_a_batch_may_be_one_0_d_or_empty_tensor(
    place: Any, depth: int, shape: tuple[int, ...]
) -> None:
    old = torch.full(shape, 3)
    assert_moved(one(old, place, depth), old, place)


def laid_out(number: int) -> dict[str, Tensor]:
    """Tensors, large and small, in every arrangement."""
    base = torch.arange(number, number + 2 * 3 * 8 * 8, dtype=torch.float32).view(2, 3, 8, 8)
    large = torch.arange(number, number + (1 << 18)).view(2, 2, 256, 256)
    volume = torch.arange(2 * 3 * 4 * 4 * 4).view(2, 3, 4, 4, 4)
    return {
        "contiguous": base,
        "channels_last": base.to(memory_format=torch.channels_last),
        "channels_last, large": large.to(memory_format=torch.channels_last),
        "channels_last_3d": volume.to(memory_format=torch.channels_last_3d),
        "transposed": base.transpose(0, 3),
        "permuted": base.permute(3, 1, 0, 2),
        "one channel": base[:, :1].contiguous(memory_format=torch.channels_last),
        "row": base[1],
        "tail": base.flatten()[5:],
        "column": base[:, :, :, 1],
        "step": base[:, :, ::2, ::3],
        "expanded": torch.arange(3).view(3, 1).expand(3, 4),
        "expanded scalar": torch.tensor(5).expand(2, 2),
        "unfolded": torch.arange(10).unfold(0, 4, 2),
        "flipped": base.flip(3),
        "odd strides of one": torch.arange(3).as_strided((1, 3), (7, 1)),
        "tail, large": large.flatten()[3:],
        "step, large": large[:, :, :, ::2],
    }


def test_l03_strides_come_out_as_they_went_in(place: Any, depth: int) -> None:
    batch = laid_out(1)
    new = one(batch, place, depth)
    for name, old in batch.items():
        assert_moved(new[name], old, place)
    assert new["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert new["channels_last, large"].is_contiguous(memory_format=torch.channels_last)
    assert new["transposed"].stride() == (1, 64, 8, 192)


def test_l03_a_transform_sees_the_strides_too(device: Any, depth: int) -> None:
    old = torch.rand(4, 3, 8, 8).to(memory_format=torch.channels_last)
    new = one(old, device, depth, transform=lambda x: (x[:, :, 1:5, 1:5] - 0.5) / 0.2)
    assert new.is_contiguous(memory_format=torch.channels_last)


def test_conjugate_and_negative_views_arrive(device: Any, depth: int) -> None:
    old = torch.tensor([1 + 2j, 3 - 4j])
    new = one((old.conj(), old.conj().imag), device, depth)
    assert new[0].tolist() == [1 - 2j, 3 + 4j]
    assert new[1].tolist() == [-2, 4]


def test_quantized_and_nested_tensors_arrive(device: Any, depth: int) -> None:
    nested = torch.nested.nested_tensor([fill(1, 2), fill(2, 3)], layout=torch.jagged)
    new = one(nested, device, depth)
    assert [part.tolist() for part in new.unbind()] == [[1, 1], [2, 2, 2]]


# -- 5: whose memory ------------------------------------------------------------------------------


def reusing(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A source that fills one large and one small buffer over and over."""
    large, small = torch.empty(1 << 15, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    for number in range(count):
        large.fill_(number)
        small.fill_(number)
        yield large, small


def test_a_reusing_source_can_go_wrong() -> None:
    assert [number_of(small) for _, small in list(reusing(4))] == [3, 3, 3, 3]


def test_a02_a_generator_that_reuses_its_buffers(apart: tuple[Any, int]) -> None:
    device, depth = apart
    kept = list(StreamLoader(reusing(30), device, prefetch_batches=depth))
    assert [number_of(large) for large, _ in kept] == list(range(30))
    assert [number_of(small) for _, small in kept] == list(range(30))


def test_a_fake_device_has_memory_of_its_own_inline_too() -> None:
    old = fill(1)
    new = one(old, FakeDevice(), 0)
    assert not same_memory(new, old)


class Refill:
    """A collate function that fills the same buffer each time."""

    def __init__(self) -> None:
        self.buffer = torch.empty(4, dtype=torch.int64)

    def __call__(self, items: list[int]) -> Tensor:
        return self.buffer.copy_(torch.tensor(items))


def test_a02_a_dataloader_whose_collate_refills_one_buffer(apart: tuple[Any, int]) -> None:
    device, depth = apart
    dataset: Any = [number for number in range(20) for _ in range(4)]
    inner: DataLoader[Tensor] = DataLoader(dataset, batch_size=4, collate_fn=Refill())
    assert [number_of(batch) for batch in list(inner)] == [19] * 20  # it can go wrong
    kept = list(StreamLoader(inner, device, prefetch_batches=depth))
    assert [number_of(batch) for batch in kept] == list(range(20))


class Reusing(DataLoader[Tensor]):
    """A DataLoader with an iterator of its own."""

    @override
    def __iter__(self) -> Any:
        buffer = torch.empty(4, dtype=torch.int64)
        for batch in super().__iter__():
            yield buffer.copy_(batch)


def test_a02_a_dataloader_whose_iterator_refills_one_buffer(apart: tuple[Any, int]) -> None:
    device, depth = apart
    dataset: Any = [number for number in range(20) for _ in range(4)]
    kept = list(StreamLoader(Reusing(dataset, batch_size=4), device, prefetch_batches=depth))
    assert [number_of(batch) for batch in kept] == list(range(20))


class Box:
    """An object with its own `.to`, which a source may fill again."""

    def __init__(self) -> None:
        self.x = fill(0)

    def to(self, device: torch.device) -> Box:
        moved = Box()
        moved.x = self.x.to(device)
        return moved


def test_a02_an_object_that_its_source_fills_again(apart: tuple[Any, int]) -> None:
    device, depth = apart

    def source() -> Iterator[Box]:
        box = Box()
        for number in range(10):
            box.x.fill_(number)
            yield box

    kept = list(StreamLoader(source(), device, prefetch_batches=depth))
    assert [number_of(box.x) for box in kept] == list(range(10))


def test_a02_a_packed_sequence_that_its_source_fills_again(apart: tuple[Any, int]) -> None:
    device, depth = apart
    sequence = pack_sequence([fill(0, 3), fill(0, 2)])

    def source() -> Iterator[PackedSequence]:
        for number in range(10):
            sequence.data.fill_(number)
            yield sequence

    kept = list(StreamLoader(source(), device, prefetch_batches=depth))
    assert [number_of(sequence.data) for sequence in kept] == list(range(10))


def test_a03_kept_batches_are_the_callers(device: Any, depth: int) -> None:
    inner: DataLoader[Tensor] = DataLoader(batches(12), batch_size=2)  # type: ignore[arg-type]
    for source in (batches(12), inner):
        kept = list(StreamLoader(source, device, prefetch_batches=depth))
        assert len({batch.untyped_storage().data_ptr() for batch in kept}) == len(kept)
        for number, batch in enumerate(kept):
            batch.fill_(100 + number)
        assert [number_of(batch) for batch in kept] == [100 + n for n, _ in enumerate(kept)]


def test_writing_to_a_batch_does_not_write_to_the_list_it_came_from(apart: tuple[Any, int]) -> None:
    device, depth = apart
    source: list[Any] = [{"x": tensor, "y": [tensor + 1]} for tensor in batches(5)]
    for batch in StreamLoader(source, device, prefetch_batches=depth):
        batch["x"].fill_(-1)
        batch["y"][0].fill_(-1)
        batch["new"] = 3
        batch["y"].append(4)
    assert [number_of(item["x"]) for item in source] == [0, 1, 2, 3, 4]
    assert [number_of(item["y"][0]) for item in source] == [1, 2, 3, 4, 5]
    assert [(list(item), len(item["y"])) for item in source] == [(["x", "y"], 1)] * 5


def test_a_transform_that_works_in_place_leaves_the_list_alone(apart: tuple[Any, int]) -> None:
    device, depth = apart
    source = [(tensor, {"k": tensor + 10}) for tensor in batches(5)]

    def scale(batch: tuple[Tensor, dict[str, Tensor]]) -> Any:
        batch[0].mul_(2)
        batch[1]["k"].mul_(2)
        return batch

    loader = StreamLoader(source, device, transform=scale, prefetch_batches=depth)
    for _ in range(2):  # a second epoch would show it too
        assert [number_of(x) for x, _ in loader] == [0, 2, 4, 6, 8]
    assert [number_of(x) for x, _ in source] == [0, 1, 2, 3, 4]
    assert [number_of(k["k"]) for _, k in source] == [10, 11, 12, 13, 14]


def test_a_transform_that_works_in_place_leaves_a_shared_dataset_alone(depth: int) -> None:
    dataset: Any = [tensor.share_memory_() for tensor in batches(5)]
    inner: DataLoader[Tensor] = DataLoader(dataset, batch_size=None, num_workers=1)
    for batch in inner:
        batch.mul_(2)
    assert [number_of(tensor) for tensor in dataset] == [0, 2, 4, 6, 8]  # it can go wrong
    loader = StreamLoader(inner, transform=lambda x: x.add_(1), prefetch_batches=depth)
    assert ids(loader) == [1, 3, 5, 7, 9]
    assert [number_of(tensor) for tensor in dataset] == [0, 2, 4, 6, 8]


def test_on_the_cpu_a_dataloaders_batch_is_passed_on_as_it_is(depth: int) -> None:
    made: list[Tensor] = []
    inner: DataLoader[Tensor] = DataLoader(batches(6), batch_size=2)  # type: ignore[arg-type]
    source = StreamLoader(inner, prefetch_batches=depth)
    with pytest.MonkeyPatch.context() as patch:
        stack = torch.stack

        def remembered(*args: Any, **kwargs: Any) -> Tensor:
            made.append(stack(*args, **kwargs))
            return made[-1]

        patch.setattr(torch, "stack", remembered)
        kept = list(source)
    assert len(made) == len(kept) == 3
    assert all(out is batch for out, batch in zip(kept, made, strict=True))


@pytest.mark.parametrize("wrap", [list, iter, Recording])
def test_on_the_cpu_any_other_batch_is_copied(depth: int, wrap: Any) -> None:
    old = [tagged(tensor, "t") for tensor in batches(3)]
    new = list(StreamLoader(wrap(old), prefetch_batches=depth))
    assert [number_of(batch) for batch in new] == [0, 1, 2]
    assert not any(same_memory(*pair) for pair in zip(new, old, strict=True))


# -- pinned sources -------------------------------------------------------------------------------

LARGE = 1 << 18
"""Elements of a tensor of 2 MB."""


@pytest.fixture
def _all_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all tensors were pinned."""
    monkeypatch.setattr(Tensor, "is_pinned", lambda *_: True)


def pinned_loader(count: int) -> DataLoader[Any]:
    dataset: Any = [(fill(number, LARGE), number) for number in range(count)]
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=1)
    loader.pin_memory = True  # given to the constructor, it would do nothing here
    return loader


@pytest.mark.usefixtures("_all_pinned")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
def test_a_dataloaders_pinned_tensor_is_sent_from_where_it_lies() -> None:
    device = FakeDevice(looks=3)
    kept = list(StreamLoader(pinned_loader(6), device))
    assert [number_of(images) for images, _ in kept] == [0, 1, 2, 3, 4, 5]
    assert [number_of(labels) for _, labels in kept] == [0, 1, 2, 3, 4, 5]
    assert max(nbytes for _, nbytes in device.verbs("slab")) < 1000  # never a second pin
    large = [nbytes for *_, nbytes in device.verbs("copy") if nbytes >= LARGE]
    assert large == [LARGE * 8] * 6


@pytest.mark.usefixtures("_all_pinned")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
def test_a04_a_pinned_tensor_lives_until_the_host_has_seen_its_copy_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice()
    sources: list[int] = []
    copy = FakeDevice.copy

    def watched(self: FakeDevice, destination: Tensor, source: Tensor) -> None:
        sources.append(source.data_ptr())
        copy(self, destination, source)

    monkeypatch.setattr(FakeDevice, "copy", watched)
    loader = StreamLoader(pinned_loader(4), device)
    iterator = iter(loader)
    loader._settled()[1]._copy_stream.held = True  # the host sees no copy complete
    images, _ = next(iterator)
    epoch = next(iter(loader._live))
    lent = [source for _, _, direct in epoch.slabs._busy for source in direct]
    assert any(source.data_ptr() == sources[0] for source in lent)
    assert number_of(images) == 0
    loader._settled()[1]._copy_stream.held = False
    assert [number_of(images) for images, _ in iterator] == [1, 2, 3]


@pytest.mark.usefixtures("_all_pinned")
def test_any_other_pinned_tensor_has_been_copied_before_the_next_pull(depth: int) -> None:
    kept = list(StreamLoader(reusing(20), FakeDevice(looks=3), prefetch_batches=max(depth, 1)))
    assert [number_of(large) for large, _ in kept] == list(range(20))


# -- the accelerator's memory, as far as the fake shows it -----------------------------------------


def pairs(count: int, images: int = LARGE, labels: int = 32) -> list[tuple[Tensor, Tensor]]:
    return [(fill(number, images), fill(number, labels)) for number in range(count)]


def test_small_tensors_share_one_copy_and_large_ones_have_their_own(depth: int) -> None:
    depth = max(depth, 1)
    device = FakeDevice()
    small = [fill(number, 1 + number) for number in range(40)]
    batch = {"a": fill(1, LARGE), "small": small, "b": fill(2, LARGE)}
    new = one(batch, device, depth)
    assert [number_of(tensor) for tensor in new["small"]] == list(range(40))
    assert [number_of(new[key]) for key in "ab"] == [1, 2]
    sizes = sorted(nbytes for *_, nbytes in device.verbs("copy"))
    assert len(sizes) == 3
    assert sizes[1:] == [LARGE * 8] * 2
    assert sizes[0] < sum(tensor.nbytes for tensor in small) + 64 * 40
    assert len(device.verbs("arena")) == 3
    assert len(device.verbs("slab")) == depth + 2  # all at once; one of them is used
    assert len(set(device.verbs("slab"))) == 1


def test_a_few_middling_tensors_have_their_own_copies_and_many_do_not() -> None:
    for count, copies in ((3, 3), (100, 9)):
        device = FakeDevice()
        one([fill(number, 4000) for number in range(count)], device, 2)
        assert len(device.verbs("copy")) == copies


@pytest.mark.parametrize("batch", [(), "text", torch.empty(0), [torch.empty(2, 0)] * 3], ids=repr)
def test_nothing_is_copied_of_a_batch_without_bytes(batch: Any) -> None:
    device = FakeDevice()
    one(batch, device, 2)
    assert device.verbs("copy") == []
    assert device.verbs("slab") == []


def test_tensors_are_aligned_for_any_kernel(depth: int) -> None:
    new = one([fill(n, 1 + n).to(torch.uint8) for n in range(20)], FakeDevice(), max(depth, 1))
    assert {tensor.data_ptr() % 16 for tensor in new} == {0}


def test_a_large_images_memory_is_not_kept_by_its_labels() -> None:
    for images in (1 << 12, LARGE):  # 32 kB and 2 MB
        for _, labels in StreamLoader(pairs(5, images), FakeDevice()):
            file = io.BytesIO()
            torch.save(labels, file)
            assert labels.untyped_storage().nbytes() == labels.nbytes
            assert len(file.getvalue()) < 3000


@pytest.mark.slow
def test_labels_of_1000_batches_can_be_kept() -> None:
    device = FakeDevice(looks=3)
    batch = (fill(1, 1 << 12), fill(2, 32))
    kept: list[Tensor] = []
    held: list[int] = []
    for _, labels in StreamLoader([batch] * 1000, device):
        kept.append(labels)
        held.append(sum(device._memory.values()) - sum(tensor.nbytes for tensor in kept))
    assert max(held) <= 5 * sum(tensor.nbytes for tensor in batch)
    assert sum(device._memory.values()) <= sum(tensor.nbytes for tensor in kept) + batch[0].nbytes
    assert {number_of(labels) for labels in kept} == {2}


def test_labels_may_be_edited_between_forward_and_backward(device: Any, depth: int) -> None:
    source = [(torch.ones(8), torch.arange(8.0), torch.ones(8)) for _ in range(4)]
    for images, labels, weights in StreamLoader(source, device, prefetch_batches=depth):
        parameter = torch.ones(8, requires_grad=True)
        versions = images._version, weights._version
        loss = (parameter * images * weights).sum()
        labels.add_(1)
        loss.backward()
        assert parameter.grad is not None
        assert (images._version, weights._version) == versions


def test_editing_through_views_of_one_block_would_fail() -> None:
    block = torch.ones(16)
    images, labels = block[:8], block[8:]
    loss = (torch.ones(8, requires_grad=True) * images).sum()
    labels.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_tensor_is_a_view(device: Any, depth: int) -> None:
    for tensor in one([fill(1), fill(2, LARGE), tagged(fill(3), "t")][:2], device, depth):
        assert not tensor._is_view()
        tensor.requires_grad_(requires_grad=False)
        tensor.resize_(2)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_all_slabs_are_made_when_the_first_is_wanted(ahead: int) -> None:
    device = FakeDevice()
    iterator = iter(StreamLoader([fill(0), *pairs(9)], device, prefetch_batches=ahead))
    next(iterator)
    assert device.verbs("slab")[: ahead + 2] == [("slab", 64)] * (ahead + 2)


def test_no_slab_is_made_once_batches_of_one_size_flow() -> None:
    device = FakeDevice(looks=3)
    loader = StreamLoader(pairs(4, 1 << 12) * 10, device, prefetch_batches=2)
    for _ in range(3):
        assert sum(1 for _ in loader) == 40
        assert len(device.verbs("slab")) == 4
    assert len({nbytes for _, nbytes in device.verbs("slab")}) == 1


def test_no_slab_is_made_once_batches_of_varying_sizes_have_flowed() -> None:
    device = FakeDevice()
    source = [fill(n, 500 + 37 * (n * 7919 % 101)) for n in range(200)]
    loader = StreamLoader(source, device, prefetch_batches=2)
    for _ in range(3):
        assert ids(loader) == list(range(200))
    made = len(device.verbs("slab"))
    assert made < 40
    assert ids(loader) == list(range(200))
    assert len(device.verbs("slab")) <= made + 2


def test_streams_live_as_long_as_the_loader(depth: int) -> None:
    device = FakeDevice()
    loader = StreamLoader(
        batches(3), device, transform=[torch.neg, torch.neg], prefetch_batches=depth
    )
    for _ in range(5):
        assert ids(loader) == [0, 1, 2]
    names = [name for _, name in device.verbs("stream")]
    assert len(names) == len(set(names)) <= 3


def test_a01_every_stream_that_reads_memory_is_recorded_on_it_and_waits() -> None:
    device = FakeDevice(looks=2)
    size = fill(0, LARGE).nbytes
    loader = StreamLoader(batches(5, LARGE), device, transform=[torch.clone, lambda x: x])
    assert ids(loader) == [0, 1, 2, 3, 4]
    assert device.verbs("uses").count(("uses", "stage 0", size)) == 5
    waits = collections.Counter(device.verbs("wait"))
    assert waits["wait", "stage 0", "copy"] == 5
    assert waits["wait", "stage 1", "stage 0"] == 5
    assert waits["wait", "default", "stage 1"] == 5


def test_a01_the_callers_stream_is_recorded_on_all_memory_of_a_batch() -> None:
    device = FakeDevice()
    one((fill(1, LARGE), fill(2, 3), fill(3, 5)), device, 2)
    used = sorted(nbytes for _, stream, nbytes in device.verbs("uses") if stream == "default")
    assert set(used) == {nbytes for _, _, nbytes in device.verbs("arena")}


def test_a05_the_stream_that_waits_is_the_one_that_is_current_at_each_next() -> None:
    device = FakeDevice(looks=2)
    sides = [device.stream("one"), device.stream("two")]
    iterator = iter(StreamLoader(batches(20), device))
    for number in range(20):
        with device.on(sides[number % 2]):
            batch = next(iterator)
            assert number_of(batch) == number
            assert device.log[-1][:2] == ("uses", f"{('one', 'two')[number % 2]}")
    assert not [entry for entry in device.verbs("uses") if entry[1] == "default"]


def test_a02_a_slab_is_filled_again_only_after_its_copy(depth: int) -> None:
    device = FakeDevice(looks=5)
    loader = StreamLoader(batches(200, 64), device, prefetch_batches=max(depth, 1))
    kept = list(loader)
    assert [number_of(batch) for batch in kept] == list(range(200))


def test_b03_host_batches_are_dropped_once_copied() -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Array(UserDict[str, Tensor]):
        __hash__ = object.__hash__

    def source() -> Iterator[Any]:
        for number in range(50):
            item = Array({"x": fill(number)})
            alive.add(item)
            yield item
            del item

    for batch in StreamLoader(source(), FakeDevice(), prefetch_batches=3):
        del batch
        most = max(most, len(alive))
    assert most <= 3 + 3
    assert len(alive) == 0


# -- opaque objects, at hand-over -----------------------------------------------------------------


class Where:
    """Says on which stream it was moved."""

    def __init__(self, device: FakeDevice, x: Tensor) -> None:
        self.device, self.x, self.moved = device, x, ["not"]

    def __deepcopy__(self, memo: object) -> Where:
        return Where(self.device, self.x.clone())

    def to(self, _: torch.device) -> Where:
        self.moved = [self.device.current().name, threading.current_thread().name]
        return self


def test_opaque_objects_are_moved_at_hand_over_on_the_callers_stream(depth: int) -> None:
    device = FakeDevice(looks=1)
    transformed: list[str] = []

    def look(batch: Any) -> Any:
        transformed.append(device.current().name)
        return batch

    source: list[Any] = [{"o": Where(device, fill(n)), "x": fill(n)} for n in range(6)]
    loader = StreamLoader(source, device, transform=look, prefetch_batches=depth)
    side = device.stream("side")
    iterator = iter(loader)
    for number in range(6):
        with device.on(side):
            batch = next(iterator)
        assert batch["o"].moved == ["side", threading.current_thread().name]
        assert number_of(batch["o"].x) == number
        assert number_of(batch["x"]) == number
    assert transformed == ["side"] * 6


def test_opaque_and_other_batches_may_alternate(device: Any, depth: int) -> None:
    source: list[Any] = [Box() if n % 2 else fill(n) for n in range(8)]
    new = list(StreamLoader(source, device, prefetch_batches=depth))
    assert [type(batch) for batch in new] == [Tensor, Box] * 4
    assert [number_of(batch) for batch in new[::2]] == [0, 2, 4, 6]


class Closed:
    """Moves itself, and keeps its tensor in a closure."""

    def __init__(self, x: Tensor) -> None:
        self.ask: Callable[[], Tensor] = lambda: x

    def to(self, device: torch.device) -> Closed:
        return Closed(self.ask().to(device, copy=True))


class Copied(Closed):
    """One that copies what its closure has."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        return Copied(self.ask().clone())


def refilled(kind: type[Closed]) -> Iterator[Closed]:
    buffer = fill(0)
    for number in range(6):
        buffer.fill_(number)
        yield kind(buffer)


def test_a02_an_opaque_object_that_copies_its_closure_may_come_from_a_refilled_buffer() -> None:
    moved = StreamLoader(refilled(Copied), "cpu", prefetch_batches=2)
    assert [number_of(closed.ask()) for closed in moved] == list(range(6))


# -- 12: is it the loader? ------------------------------------------------------------------------


@pytest.fixture
def _disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLOADER_DISABLE", "1")


@pytest.mark.usefixtures("_disabled")
def test_disabled_there_is_no_thread_and_no_look_ahead(device: Any) -> None:
    source = Recording(batches(10))
    loader = StreamLoader(source, device, prefetch_batches=3, transform=lambda x: x + 1)
    before = set(threading.enumerate())
    iterator = iter(loader)
    for number in range(10):
        assert number_of(next(iterator)) == number + 1
        assert source.pulls == number + 1
        assert set(threading.enumerate()) == before
    assert next(iterator, None) is None


@pytest.mark.usefixtures("_disabled")
def test_disabled_there_is_a_plain_to_and_nothing_else() -> None:
    device = FakeDevice()
    loader = StreamLoader(batches(3), device, transform=torch.neg)
    assert ids(loader) == [0, -1, -2]
    assert {entry[0] for entry in device.log} <= {"stream", "draws", "current"}


@pytest.mark.usefixtures("_disabled")
def test_disabled_batches_still_arrive() -> None:
    new = one({"x": fill(1)}, elsewhere(), 3)
    assert new["x"].device.type == "meta"


@pytest.mark.parametrize("value", ["0", ""])
def test_only_1_disables(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("STREAMLOADER_DISABLE", value)
    device = FakeDevice()
    assert ids(StreamLoader(batches(3), device)) == [0, 1, 2]
    assert device.verbs("copy")


def test_each_pass_asks_whether_it_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    loader = StreamLoader(batches(3), device)
    monkeypatch.setenv("STREAMLOADER_DISABLE", "1")
    assert ids(loader) == [0, 1, 2]
    assert not device.verbs("copy")
    monkeypatch.delenv("STREAMLOADER_DISABLE")
    assert ids(loader) == [0, 1, 2]
    assert len(device.verbs("copy")) == 3
