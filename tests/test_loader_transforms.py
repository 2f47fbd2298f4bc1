"""The contract about transforms: on what, when, in which state, with which randomness."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from typing_extensions import override

from streamloader import StreamLoader, on
from streamloader.batch import Batch
from streamloader.epoch import Epoch
from streamloader.testing import FakeDevice
from tests.loaders import SWEPT, Recording, batches, devices, fill, ids, number_of


@pytest.fixture(params=SWEPT)
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> Any:
    return request.param()


def one(batch: Any, device: Any, depth: int, transform: Any, **options: Any) -> Any:
    """What becomes of a batch from a list."""
    [out] = StreamLoader([batch], device, transform=transform, prefetch_batches=depth, **options)
    return out


# -- which, and in which order --------------------------------------------------------------------


def test_transforms_are_called_in_order_once_for_each_batch(device: Any, depth: int) -> None:
    calls: list[tuple[str, int]] = []

    def double(x: Tensor) -> Tensor:
        calls.append(("double", number_of(x)))
        return x * 2

    def add(x: Tensor) -> Tensor:
        calls.append(("add", number_of(x)))
        return x + 1

    loader = StreamLoader(batches(4), device, transform=[double, add], prefetch_batches=depth)
    assert ids(loader) == [1, 3, 5, 7]
    assert [number for name, number in calls if name == "double"] == [0, 1, 2, 3]
    assert [number for name, number in calls if name == "add"] == [0, 2, 4, 6]
    for number in range(4):
        assert calls.index(("double", number)) < calls.index(("add", 2 * number))


@pytest.mark.parametrize("transform", [None, [], ()])
def test_no_transform(device: Any, depth: int, transform: Any) -> None:
    assert number_of(one(fill(3), device, depth, transform)) == 3


def test_a_tuple_of_transforms(device: Any, depth: int) -> None:
    out = one(fill(3), device, depth, (torch.neg, functools.partial(torch.add, other=1)))
    assert number_of(out) == -2


def test_a_sequential_is_one_transform_and_not_a_list_of_them() -> None:
    device = FakeDevice()
    out = one(torch.ones(2, 3), device, 2, nn.Sequential(nn.Identity(), nn.Flatten(0)))
    assert out.tolist() == [1.0] * 6
    assert {name for _, name in device.verbs("stream")} == {"copy", "stage 0"}


def test_a_transform_gets_the_whole_batch_on_the_device(depth: int) -> None:
    device = FakeDevice(looks=2)
    held: list[bool] = []

    def look(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        held.extend(device.holds(tensor) for tensor in batch.values())
        return batch

    batch = {"x": fill(1), "y": fill(2)}
    loader = StreamLoader([batch] * 3, device, transform=look, prefetch_batches=max(depth, 1))
    assert sum(1 for _ in loader) == 3
    assert held == [True] * 6


def test_each_transform_runs_on_a_stream_of_its_own(depth: int) -> None:
    device = FakeDevice()
    seen: list[str] = []

    def look(x: Tensor) -> Tensor:
        seen.append(device.current().name)
        return x

    loader = StreamLoader(batches(3), device, transform=[look] * 2, prefetch_batches=depth)
    assert ids(loader) == [0, 1, 2]
    assert seen == (["stage 0", "stage 1"] if depth else ["default"] * 2) * 3


def test_transforms_run_on_the_callers_thread(device: Any, depth: int) -> None:
    seen: set[threading.Thread] = set()

    def look(x: Tensor) -> Tensor:
        seen.add(threading.current_thread())
        return x

    assert ids(StreamLoader(batches(5), device, transform=look, prefetch_batches=depth))
    assert seen == {threading.current_thread()}


class Ahead:
    """A source that says when it has been read far ahead, and what was transformed by then.

    Args:
        ahead: How many batches beyond the one in hand must be pulled.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.calls: list[int] = []
        self.reached = [threading.Event() for _ in range(20)]

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(20):
            yield fill(number)
            # Asked for another one: this one has been packed.
            if number >= self.ahead:
                self.reached[number - self.ahead].set()

    def transform(self, x: Tensor) -> Tensor:
        self.calls.append(number_of(x))
        return x


@pytest.mark.parametrize("make", [lambda: None, FakeDevice], ids=["cpu", "fake"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_source_is_read_and_packed_ahead_from_the_first_step_on(make: Any, ahead: int) -> None:
    source = Ahead(ahead)
    for number, _ in enumerate(StreamLoader(source, make(), prefetch_batches=ahead)):
        if number + ahead < 20:
            assert source.reached[number].wait(10), f"in step {number}"


def came(epoch: Epoch, number: int) -> bool:
    """Whether a batch was packed, and has not been launched."""
    return number in [item.number for item in epoch.source._items if isinstance(item, Batch)]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_transforms_run_ahead_of_the_step(ahead: int) -> None:
    source = Ahead(ahead)
    loader = StreamLoader(source, FakeDevice(), transform=source.transform, prefetch_batches=ahead)
    for number, _ in enumerate(loader):
        if number:
            assert len(source.calls) == min(number + ahead + 1, 20), f"in step {number}"
        # Each step is as long as packing takes: at its end all that may be pulled has been packed.
        last = number + ahead + 1
        [epoch] = loader._live
        with epoch.slabs.changed:
            assert last > 19 or epoch.slabs.changed.wait_for(
                functools.partial(came, epoch, last), 10
            )
    assert source.calls == list(range(20))


def test_inline_no_transform_runs_ahead() -> None:
    calls: list[int] = []

    def look(x: Tensor) -> Tensor:
        calls.append(number_of(x))
        return x

    for number, batch in enumerate(StreamLoader(batches(5), transform=look, prefetch_batches=0)):
        assert number_of(batch) == number
        assert calls == list(range(number + 1))


# -- what it may return ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [3, "text", [], {"a": None}, (1, "b"), {1, 2}, np.ones(2), len], ids=repr
)
def test_a_transform_may_return_anything(device: Any, depth: int, value: Any) -> None:
    out = list(StreamLoader(batches(3), device, transform=lambda _: value, prefetch_batches=depth))
    assert len(out) == 3
    assert all(batch is value for batch in out)


def test_a_transform_may_return_other_structures(device: Any, depth: int) -> None:
    out = one((fill(1), fill(2)), device, depth, lambda b: {"sum": b[0] + b[1], "n": [3]})
    assert number_of(out["sum"]) == 3
    assert out["n"] == [3]


class Boxes:
    """An object that is no container and has no `.to`."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Movable(Boxes):
    def to(self, device: torch.device) -> Movable:
        return Movable(self.x.to(device))


class Unpicklable(Boxes):
    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.callback = lambda: None


class Slots:
    """An object without a `__dict__`."""

    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


def large(x: Tensor) -> Tensor:
    return x.new_full((1000,), int(x[0]))


WRAPPERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": large,
    "list": lambda x: [(large(x),)],
    "object": lambda x: Boxes(large(x)),
    "object in a list": lambda x: [Boxes(large(x))],
    "movable": lambda x: Movable(large(x)),
    "tensordict": lambda x: TensorDict({"x": large(x)}, batch_size=[]),
    "packed": lambda x: pack_sequence([large(x)]),
    "sparse": lambda x: large(x).to_sparse(),
    "object in an object": lambda x: Boxes(Boxes(large(x))),  # type: ignore[arg-type]
    "set": lambda x: {large(x)},
    "frozenset": lambda x: frozenset([large(x)]),
    "deque": lambda x: collections.deque([large(x)]),
    "namespace": lambda x: types.SimpleNamespace(x=large(x)),
    "slots": lambda x: Slots(large(x)),
    "unpicklable": lambda x: Unpicklable(large(x)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a06_the_callers_stream_is_recorded_on_all_that_a_transform_returns(
    wrap: Callable[[Tensor], Any],
) -> None:
    device = FakeDevice()
    one(fill(7), device, 2, wrap)
    assert ("uses", "default", 8000) in device.log  # or its memory is reused while it is read


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_what_a_transform_returns_arrives(
    device: Any, depth: int, wrap: Callable[[Tensor], Any]
) -> None:
    out = one(fill(7), device, depth, wrap)
    assert type(out) is type(wrap(fill(7)))


# -- on -------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    y: str


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: str


class Bag(dict[str, Any]):
    pass


def test_on_a_mapping(device: Any, depth: int) -> None:
    out = one({"b": fill(1), "a": fill(2)}, device, depth, on("b", torch.neg))
    assert list(out) == ["b", "a"]
    assert number_of(out["b"]) == -1
    assert number_of(out["a"]) == 2


def test_on_a_mapping_with_other_keys(device: Any, depth: int) -> None:
    out = one({0: fill(1), ("k", 1): fill(2), None: 3}, device, depth, on(("k", 1), torch.neg))
    assert list(out) == [0, ("k", 1), None]
    assert number_of(out["k", 1]) == -2


@pytest.mark.parametrize("key", [1, -1])
@pytest.mark.parametrize("kind", [list, tuple])
def test_on_a_sequence(device: Any, depth: int, kind: Any, key: int) -> None:
    out = one(kind([fill(1), fill(2)]), device, depth, on(key, torch.neg))
    assert type(out) is kind
    assert [number_of(x) for x in out] == [1, -2]


@pytest.mark.parametrize("key", ["y", 1, -1])
def test_on_a_namedtuple(device: Any, depth: int, key: Any) -> None:
    out = one(Pair(fill(1), fill(2)), device, depth, on(key, torch.neg))
    assert type(out) is Pair
    assert [number_of(x) for x in out] == [1, -2]


@pytest.mark.parametrize("kind", [Sample, Frozen])
def test_on_a_dataclass(device: Any, depth: int, kind: Any) -> None:
    out = one(kind(fill(1), "y"), device, depth, on("x", torch.neg))
    assert type(out) is kind
    assert number_of(out.x) == -1
    assert out.y == "y"


def test_on_a_dict_of_another_class(device: Any, depth: int) -> None:
    out = one(Bag(x=fill(1)), device, depth, on("x", torch.neg))
    assert type(out) is Bag
    assert number_of(out["x"]) == -1


def test_on_a_tensordict(device: Any, depth: int) -> None:
    old = TensorDict({"x": torch.ones(2), "y": torch.ones(2)}, batch_size=[2])
    out = one(old, device, depth, on("x", torch.neg))
    assert out["x"].tolist() == [-1, -1]
    assert out["y"].tolist() == [1, 1]
    assert old["x"].tolist() == [1, 1]


def test_on_a_nested_part(device: Any, depth: int) -> None:
    batch = {"in": (fill(1), [Sample(fill(2), "y")]), "z": fill(3)}
    nested = on("in", on(1, on(0, on("x", torch.neg))))
    out = one(batch, device, depth, nested)
    assert number_of(out["in"][1][0].x) == -2
    assert number_of(out["in"][0]) == 1
    assert number_of(out["z"]) == 3


def test_on_what_torch_functions_return(device: Any, depth: int) -> None:
    out = one(torch.arange(6).view(2, 3).max(dim=1), device, depth, on("values", torch.neg))
    assert out.values.tolist() == [-2, -5]
    assert out.indices.tolist() == [2, 2]


def test_on_leaves_the_given_batch_alone() -> None:
    batches_: list[Any] = [{"x": 1}, [1], Sample(fill(1), "y"), Bag(x=1)]
    keys: list[Any] = ["x", 0, "y", "x"]
    for batch, key in zip(batches_, keys, strict=True):
        before = repr(batch)
        assert repr(on(key, lambda _: "new")(batch)) != before
        assert repr(batch) == before


@pytest.mark.parametrize(
    ("batch", "key", "error"),
    [
        ({"x": 1}, "image", KeyError),
        ((1, 2), 2, IndexError),
        ([1], -2, IndexError),
        (Pair(fill(1), fill(2)), "z", AttributeError),
        (Sample(fill(1), "y"), "z", AttributeError),
    ],
    ids=repr,
)
def test_on_a_part_that_is_missing_is_an_error(
    depth: int, batch: Any, key: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        one(batch, None, depth, on(key, torch.neg))
    [note] = raised.value.__notes__
    assert f"transform on({key!r}, neg) on batch 0, " in note


# -- transforms that raise ------------------------------------------------------------------------


def strict(x: Any) -> Any:
    """Takes tensors only."""
    if not isinstance(x, Tensor) or number_of(x) == 2:
        raise ValueError("strict")
    return x


class Strict(nn.Module):
    @override
    def forward(self, x: Any) -> Any:
        return strict(x)


def note_of(batch: Any, device: Any, depth: int, transform: Any) -> str:
    with pytest.raises(ValueError, match=r"^strict") as raised:
        one(batch, device, depth, transform)
    [note] = raised.value.__notes__
    return note


def test_an_error_names_the_transform_and_the_batch(device: Any, depth: int) -> None:
    note = note_of(fill(2, 5), device, depth, [torch.clone, strict])
    assert "transform strict on batch 0, int64[5]" in note
    assert "on(" not in note  # the batch is a tensor: nothing else could have been meant


def test_an_error_on_a_container_suggests_on(device: Any, depth: int) -> None:
    note = note_of((fill(1), fill(2, 3)), device, depth, strict)
    assert "tuple(int64[4], int64[3])" in note
    assert "transform=on(0, strict)" in note
    note = note_of({"image": fill(1)}, device, depth, strict)
    assert "dict('image': int64[4])" in note
    assert "transform=on('image', strict)" in note


def test_an_error_of_on_does_not_suggest_on(device: Any, depth: int) -> None:
    note = note_of({"image": fill(2)}, device, depth, on("image", strict))
    assert "strict" in note
    assert "'image'" in note
    assert "transform=on" not in note


def test_an_error_of_a_module_names_its_class(device: Any, depth: int) -> None:
    note = note_of([fill(1)], device, depth, Strict())
    assert "transform Strict on batch 0, list(int64[4])" in note


@pytest.mark.parametrize(
    "batch", [Sample(fill(1), "y"), Pair(fill(1), fill(2)), [fill(1)]], ids=repr
)
def test_the_on_that_an_error_suggests_works(depth: int, batch: Any) -> None:
    note = note_of(batch, None, depth, strict)
    suggested = eval(note.partition("transform=")[2], {"on": on, "strict": torch.neg})
    suggested(batch)


def test_an_error_comes_after_the_batches_before_it(device: Any, depth: int) -> None:
    seen: list[int] = []
    loader = StreamLoader(batches(5), device, transform=strict, prefetch_batches=depth)
    with pytest.raises(ValueError, match=r"^strict") as raised:
        seen.extend(map(number_of, loader))
    assert seen == [0, 1]
    assert raised.traceback[-1].name == "strict"


@pytest.mark.parametrize(
    "arguments", [(StopIteration,), (KeyError, 3), (ValueError,), (OSError, 2, "")]
)
def test_any_error_of_a_transform_arrives(device: Any, depth: int, arguments: Any) -> None:
    kind = arguments[0]

    def fail(_: Tensor) -> Tensor:
        raise kind(*arguments[1:])

    # A generator cannot end with StopIteration (PEP 479).
    with pytest.raises(RuntimeError if kind is StopIteration else kind) as raised:
        one(fill(1), device, depth, fail)
    notes = getattr(raised.value.__cause__ or raised.value, "__notes__", [])
    assert ["fail" in note for note in notes] == [True]


# -- the state it runs in -------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.float())
        return out


@pytest.mark.parametrize("grad", [True, False])
def test_l04_transforms_build_no_graph(device: Any, depth: int, *, grad: bool) -> None:
    loader = StreamLoader(batches(4), device, transform=Encoder(), prefetch_batches=depth)
    with torch.set_grad_enabled(grad):
        for batch in loader:
            assert not batch.requires_grad
            assert batch.grad_fn is None
            assert torch.is_grad_enabled() == grad
    assert Encoder()(fill(1)).requires_grad  # it can go wrong


def test_l04_after_an_error_the_callers_grad_mode_is_as_it_was(device: Any, depth: int) -> None:
    with pytest.raises(ValueError, match=r"^strict"):
        one(fill(2), device, depth, strict)
    assert torch.is_grad_enabled()


def test_l04_transforms_run_without_the_callers_autocast(device: Any, depth: int) -> None:
    seen: list[bool] = []

    def multiply(x: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return x.float().expand(4, 4) @ x.float().expand(4, 4)

    loader = StreamLoader(batches(4), device, transform=multiply, prefetch_batches=depth)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in loader:
            assert batch.dtype == torch.float32
            assert torch.is_autocast_enabled("cpu")
        assert multiply(fill(1)).dtype == torch.bfloat16  # it can go wrong
    assert seen == [False] * 4 + [True]


def test_l04_a_transform_may_use_its_own_autocast(device: Any, depth: int) -> None:
    def half(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x.float().expand(4, 4) @ x.float().expand(4, 4)

    assert one(fill(1), device, depth, half).dtype == torch.bfloat16


def test_l04_the_source_keeps_the_callers_grad_mode(device: Any, depth: int) -> None:
    weight = torch.ones(4, requires_grad=True)

    def source() -> Iterator[Tensor]:
        for number in range(4):
            yield weight * number

    with torch.no_grad():
        for batch in StreamLoader(source(), device, prefetch_batches=depth):
            assert not batch.requires_grad


def test_l04_in_inference_mode_batches_are_usable(device: Any, depth: int) -> None:
    with torch.inference_mode():
        loader = StreamLoader(batches(3), device, transform=lambda x: x + 1, prefetch_batches=depth)
        assert ids(loader) == [1, 2, 3]


def test_k06_image_and_mask_get_the_same_crop(device: Any, depth: int) -> None:
    torch.manual_seed(0)
    image = torch.rand(3, 16, 16)
    batch = {
        "image": tv_tensors.Image(image),
        "mask": tv_tensors.Mask(image[0] > 0.5),
        "name": "n",
    }
    crop = v2.Compose([v2.RandomCrop(8), v2.RandomHorizontalFlip()])
    loader = StreamLoader([batch] * 6, device, transform=crop, prefetch_batches=depth)
    crops = list(loader)
    for out in crops:
        assert torch.equal(out["mask"], out["image"][0] > 0.5)
        assert isinstance(out["mask"], tv_tensors.Mask)
        assert out["name"] == "n"
    assert any(not torch.equal(out["image"], crops[0]["image"]) for out in crops)


# -- randomness -----------------------------------------------------------------------------------


def draw(x: Tensor) -> Tensor:
    return x + torch.rand(4, dtype=torch.float64)


def drawn(depth: int, device: Any = None, epochs: int = 1, **options: Any) -> list[list[float]]:
    options = {"seed": 7, "transform": draw, **options}
    loader = StreamLoader(batches(6), device, prefetch_batches=depth, **options)
    return [batch.tolist() for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("seed", [0, 7, 2**64])
def test_k05_the_same_seed_is_the_same_batches_at_every_depth(
    device: Any, depth: int, seed: int
) -> None:
    torch.manual_seed(depth)  # the global generator is no part of it
    assert drawn(depth, device, 2, seed=seed) == drawn(0, None, 2, seed=seed)


def test_k05_without_a_seed_it_is_torchs(device: Any, depth: int) -> None:
    torch.manual_seed(3)
    expected = drawn(0, seed=None)
    torch.manual_seed(3)
    torch.rand(depth)
    assert drawn(depth, device, seed=None) == expected
    torch.manual_seed(4)
    assert drawn(depth, device, seed=None) != expected


class Gated(list[Tensor]):
    """A list whose batches come when they are let."""

    def __init__(self, items: list[Tensor], slow: set[int]) -> None:
        super().__init__(items)
        self.slow = slow
        self.gate = threading.Event()

    @override
    def __iter__(self) -> Iterator[Tensor]:
        for number in range(len(self)):
            if number in self.slow:
                self.gate.wait(0.02)
            yield self[number]


@pytest.mark.parametrize("slow", [{1}, {2, 3}, {5}])
def test_k05_the_source_threads_timing_does_not_matter(depth: int, slow: set[int]) -> None:
    loader = StreamLoader(
        Gated(batches(6), slow),
        FakeDevice(looks=3),
        transform=draw,
        prefetch_batches=depth,
        seed=7,
    )
    assert [batch.tolist() for batch in loader] == drawn(0)


def test_k05_what_the_step_draws_does_not_matter_and_is_not_changed(
    device: Any, depth: int
) -> None:
    torch.manual_seed(0)
    alone = [float(torch.rand(())) for _ in range(6)]
    torch.manual_seed(0)
    steps, outs = [], []
    loader = StreamLoader(batches(6), device, transform=draw, prefetch_batches=depth, seed=7)
    for batch in loader:
        outs.append(batch.tolist())
        steps.append(float(torch.rand(())))
    assert steps == alone
    assert outs == drawn(0)


def test_k05_the_global_generator_is_restored_after_an_error_too(device: Any, depth: int) -> None:
    def fail(_: Tensor) -> Tensor:
        torch.rand(3)
        raise ValueError("boom")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"^boom"):
        one(fill(1), device, depth, fail, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_k05_every_batch_epoch_and_transform_draws_anew(device: Any, depth: int) -> None:
    def twice(x: Tensor) -> Tensor:
        return torch.cat([x.double(), torch.rand(4, dtype=torch.float64)])

    loader = StreamLoader(
        [fill(0)] * 6, device, transform=[twice, twice], prefetch_batches=depth, seed=7
    )
    numbers = [number for _ in range(3) for batch in loader for number in batch[4:].tolist()]
    assert len(numbers) == len(set(numbers)) == 3 * 6 * 8


def test_k05_set_epoch_chooses_the_randomness(device: Any, depth: int) -> None:
    epochs = [drawn(0, epochs=3)[6 * n : 6 * n + 6] for n in range(3)]
    loader = StreamLoader(batches(6), device, transform=draw, prefetch_batches=depth, seed=7)
    loader.set_epoch(2)
    assert [batch.tolist() for batch in loader] == epochs[2]
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader] == epochs[0]
    assert [batch.tolist() for batch in loader] == epochs[1]


def test_k05_an_unfinished_pass_does_not_shift_the_batches_of_the_next(
    device: Any, depth: int
) -> None:
    epochs = drawn(0, epochs=2)
    loader = StreamLoader(batches(6), device, transform=draw, prefetch_batches=depth, seed=7)
    next(iter(loader))
    assert [batch.tolist() for batch in loader] == epochs[6:]


def test_k04_ranks_draw_differently(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    ranks = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(drawn(depth))
    assert all(ranks[0][n] != ranks[1][n] != ranks[2][n] != ranks[0][n] for n in range(6))


def in_process(items: list[Tensor]) -> DataLoader[Tensor]:
    dataset: Any = items
    return DataLoader(dataset, batch_size=None)


def in_workers(items: list[Tensor]) -> DataLoader[Tensor]:
    dataset: Any = items
    return DataLoader(dataset, batch_size=None, num_workers=1)


@pytest.mark.parametrize("make", [Recording, iter, in_process])
def test_k05_a_seed_that_cannot_count_is_warned_of(make: Any) -> None:
    source = make(batches(1))
    text = (
        rf"^seed does not reach the transforms: {type(source).__name__} may draw from torch's "
        r"generators in this process while they run\. Use a DataLoader with num_workers >= 1, or "
        r"prefetch_batches=0$"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        StreamLoader(source, transform=draw, prefetch_batches=1, seed=7)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("transform", [draw, None])
@pytest.mark.parametrize("ahead", [0, 1])
def test_k05_no_warning_of_a_seed_that_counts_or_is_not_needed(
    seed: int | None, transform: Any, ahead: int
) -> None:
    warned = seed is not None and transform is not None and ahead > 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        StreamLoader(in_process([]), transform=transform, prefetch_batches=ahead, seed=seed)
        assert len(caught) == warned
        StreamLoader(in_workers([]), transform=transform, prefetch_batches=ahead, seed=seed)
        StreamLoader([], transform=transform, prefetch_batches=ahead, seed=seed)
    assert len(caught) == warned


@pytest.mark.parametrize("make", [list, tuple, in_workers])
def test_k05_a_seed_counts_with_a_list_and_with_workers(depth: int, make: Any) -> None:
    loader = StreamLoader(make(batches(6)), transform=draw, prefetch_batches=depth, seed=7)
    assert [batch.tolist() for batch in loader] == drawn(0)


@pytest.mark.parametrize("make", [Recording, iter, in_process])
def test_k05_inline_a_seed_counts_whatever_the_source(make: Any) -> None:
    loader = StreamLoader(make(batches(6)), transform=draw, prefetch_batches=0, seed=7)
    assert [batch.tolist() for batch in loader] == drawn(0)


@pytest.mark.parametrize("make", [Recording, iter, in_process])
def test_k05_transforms_that_cannot_be_seeded_draw_as_they_come(make: Any) -> None:
    device = FakeDevice()
    loader = StreamLoader(make(batches(3)), device, transform=torch.neg)
    assert len(list(loader)) == 3
    assert device.verbs("draws") == []


def test_k05_an_opaque_batch_draws_the_same(device: Any, depth: int) -> None:
    source = [TensorDict({"x": torch.zeros(4)}, batch_size=[]) for _ in range(4)]

    def outs(depth: int, device: Any) -> list[list[float]]:
        loader = StreamLoader(
            source, device, transform=on("x", torch.rand_like), prefetch_batches=depth, seed=7
        )
        return [batch["x"].tolist() for batch in loader]

    assert outs(depth, device) == outs(0, None)


class Numpys(Dataset[float]):
    def __len__(self) -> int:
        return 8

    @override
    def __getitem__(self, index: int) -> float:
        return float(np.random.rand())  # what people write


@pytest.mark.slow
def test_k02_workers_draw_what_they_draw_in_the_plain_loader(device: Any) -> None:
    inner: DataLoader[Any] = DataLoader(Numpys(), batch_size=2, num_workers=2)

    def outs(loader: Any) -> list[list[float]]:
        torch.manual_seed(5)
        return [batch.tolist() for batch in loader]

    plain = outs(inner)
    assert outs(inner) == plain  # so it can be compared
    assert outs(StreamLoader(inner, device)) == plain


def test_k02_no_global_generator_is_touched(device: Any, depth: int) -> None:
    states = [torch.get_rng_state(), str(np.random.get_state())]
    loader = StreamLoader(batches(4), device, transform=torch.neg, prefetch_batches=depth)
    with contextlib.closing(loader):
        ids(loader)
    assert torch.equal(torch.get_rng_state(), states[0])  # type: ignore[arg-type]
    assert str(np.random.get_state()) == states[1]
