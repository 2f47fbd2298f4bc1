"""What the user holds: arguments, attributes, length, epochs, copies, warnings."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import webdataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import streamloader.loader
from streamloader import Counts, StreamLoader, on
from streamloader.testing import FakeDevice
from tests.loaders import SWEPT, batches, devices, fill, ids

WAIT = 10.0


class Numbers(Dataset[Tensor]):
    """Samples 0, 1, ..., each a tensor."""

    def __init__(self, count: int = 8) -> None:
        self.count = count
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.count:
            raise IndexError(index)
        return torch.tensor(index)


class Telling(Numbers):
    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(batches(3))


def ready(count: int) -> DataLoader[Tensor]:
    """A loader of a dataset of ready batches."""
    dataset: Any = batches(count)
    return DataLoader(dataset, batch_size=None)


def double(batch: Tensor) -> Tensor:
    return batch * 2


def flat(loader: Any) -> list[int]:
    return [int(number) for batch in loader for number in batch]


# -- bad arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, -7])
def test_a_negative_depth_is_an_error_that_quotes_it(value: int) -> None:
    with pytest.raises(ValueError, match=rf"^prefetch_batches must be at least 0, got {value}$"):
        StreamLoader([], prefetch_batches=value)


@pytest.mark.parametrize("value", [1.5, "2", None, True])
def test_a_depth_that_is_no_whole_number_is_an_error_that_quotes_it(value: Any) -> None:
    text = rf"^prefetch_batches must be a whole number, got {re.escape(repr(value))}$"
    with pytest.raises(TypeError, match=text):
        StreamLoader([], prefetch_batches=value)


@pytest.mark.parametrize("value", [3, "flip", [double, 3], iter([double])])
def test_a_transform_that_cannot_be_called_is_an_error_that_quotes_it(value: Any) -> None:
    text = r"^transform must be a callable \(batch -> batch\), a Stage, or a list of them, got "
    with pytest.raises(TypeError, match=text + re.escape(repr(value)) + "$"):
        StreamLoader([], transform=value)


@pytest.mark.parametrize("value", [42, None, 1.5, DataLoader, list])
def test_a_loader_that_cannot_be_iterated_over_is_an_error_that_quotes_it(value: Any) -> None:
    text = rf"^loader must be an iterable of batches, got {re.escape(repr(value))}$"
    with pytest.raises(TypeError, match=text):
        StreamLoader(value)


def test_a_dataset_is_an_error_that_says_to_wrap_it_in_a_loader() -> None:
    text = r"^loader must be an iterable of batches, got Numbers, a dataset: .*DataLoader\(dataset"
    dataset: Any = Numbers()
    with pytest.raises(TypeError, match=text):
        StreamLoader(dataset)


@pytest.mark.parametrize("value", ["nonsense", 1.5, "cpu:x", [], "meta"])
def test_a_device_that_does_not_exist_is_an_error_that_quotes_it(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^device must be .*got {re.escape(repr(value))}:"):
        StreamLoader([], value)


def test_an_accelerator_that_is_not_there_is_an_error_at_construction() -> None:
    with pytest.raises(ValueError, match=r"^device must .*got 'cuda:99'"):
        StreamLoader([], "cuda:99")


@pytest.mark.parametrize(("value", "kind"), [(-1, ValueError), ("a", TypeError), (0.5, TypeError)])
def test_a_seed_is_a_whole_number_from_0(value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^seed must be .*, got "):
        StreamLoader([], seed=value)


def test_all_but_the_loader_and_the_device_is_by_name() -> None:
    make: Any = StreamLoader
    with pytest.raises(TypeError, match="positional"):
        make([], None, double)


def test_bad_arguments_are_found_without_touching_the_loader() -> None:
    class Untouchable:
        def __iter__(self) -> Iterator[Tensor]:
            raise AssertionError("iterated over")

        def __len__(self) -> int:
            raise AssertionError("asked for its length")

    loader = StreamLoader(Untouchable())
    with pytest.raises(ValueError, match=r"^prefetch_batches must be at least 0"):
        StreamLoader(Untouchable(), prefetch_batches=-1)
    assert bool(loader)
    iter(loader)


# -- wrapped movers ------------------------------------------------------------------------------

MOVERS = {
    "accelerate.data_loader.DataLoaderShard": r"device_placement=False",
    "timm.data.loader.PrefetchLoader": r"use_prefetcher=False",
    "torchtnt.utils.data.data_prefetcher.CudaDataPrefetcher": r"wrap the loader that it wraps",
}


def mover(name: str, **attributes: object) -> Any:
    """A loader whose class has that name, module and all."""
    module, _, kind = name.rpartition(".")

    def __iter__(_: object) -> Iterator[Tensor]:  # noqa: N807  # the class is made by hand
        return iter(batches(2))

    return type(kind, (), {"__module__": module, "__iter__": __iter__, **attributes})()


@pytest.mark.parametrize("module", list(MOVERS))
def test_a_loader_that_moves_batches_itself_is_warned_of_once(module: str) -> None:
    with pytest.warns(UserWarning, match=rf"^\w+ moves batches .*{MOVERS[module]}") as caught:
        loader = StreamLoader(mover(module, device="cuda"))
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the caller's line, where it is to be changed
    assert ids(loader) == [0, 1]  # and no warning at a pass


def test_a_subclass_of_such_a_loader_is_warned_of() -> None:
    kind = type("Mine", (type(mover("timm.data.loader.PrefetchLoader")),), {})
    with pytest.warns(UserWarning, match=r"^Mine moves batches to the device itself"):
        StreamLoader(kind())


def test_such_a_loader_that_is_told_not_to_move_is_not_warned_of() -> None:
    StreamLoader(mover("accelerate.data_loader.DataLoaderShard", device=None))


@pytest.mark.parametrize(
    "module", ["accelerate.DataLoaderShard", "timm.data.loader.Other", "my.DataLoaderShard"]
)
def test_other_loaders_are_not_warned_of(module: str) -> None:
    StreamLoader(mover(module))


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("used", [False, True])
def test_another_stream_loader_is_warned_of_once(make_device: Any, used: bool) -> None:  # noqa: FBT001
    inner = StreamLoader(batches(2), make_device())
    if used:
        list(inner)
    with pytest.warns(UserWarning, match=r"^StreamLoader moves batches .*transforms in a list$"):
        outer = StreamLoader(inner)
    assert ids(outer) == [0, 1]


# -- length and truth ----------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("depth", SWEPT)
def test_d01_len_is_the_loaders(depth: int, drop_last: bool) -> None:  # noqa: FBT001
    plain = DataLoader(Numbers(10), batch_size=4, drop_last=drop_last)
    loader = StreamLoader(plain, prefetch_batches=depth)
    assert len(loader) == len(plain) == len(list(loader)) == (2 if drop_last else 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(), batch_size=None),
        lambda: iter(batches(3)),
        lambda: (fill(number) for number in range(3)),
        lambda: webdataset.WebLoader(Stream(), batch_size=None),
    ],
)
def test_d01_len_is_a_type_error_where_the_loader_has_none(make: Any) -> None:
    with pytest.raises(TypeError) as plain:  # in the plain loader's own words
        len(make())
    loader: Any = StreamLoader(make())
    with pytest.raises(TypeError, match=f"^{re.escape(str(plain.value))}$"):
        len(loader)
    assert bool(loader)
    assert ids(loader) == [0, 1, 2]


def test_len_is_asked_for_each_time() -> None:
    items = batches(2)
    loader = StreamLoader(items)
    assert len(loader) == 2
    items.append(fill(2))
    assert len(loader) == 3
    items.clear()
    assert len(loader) == 0
    assert bool(loader)


# -- attributes ----------------------------------------------------------------------------------


ATTRIBUTES = [
    *("dataset", "batch_size", "sampler", "batch_sampler", "num_workers", "drop_last"),
    *("collate_fn", "pin_memory", "generator", "timeout", "worker_init_fn", "prefetch_factor"),
]


def test_d05_attributes_are_the_loaders() -> None:
    generator = torch.Generator()
    plain = DataLoader(Numbers(), batch_size=2, shuffle=True, generator=generator)
    loader = StreamLoader(plain)
    for name in ATTRIBUTES:
        assert getattr(loader, name) is getattr(plain, name)
    assert loader.loader is plain
    plain.sampler.extra = 3  # type: ignore[attr-defined]
    assert loader.sampler.extra == 3


def test_d05_attributes_are_looked_up_each_time() -> None:
    plain = mover("mine", mode="train")
    loader = StreamLoader(plain)
    assert loader.mode == "train"
    plain.mode = "eval"
    assert loader.mode == "eval"


def test_d05_a_missing_attribute_names_both_classes() -> None:
    loader = StreamLoader(DataLoader(Numbers()))
    assert not hasattr(loader, "no_such")
    with pytest.raises(AttributeError, match=r"^neither StreamLoader .* DataLoader .* 'no_such'$"):
        _ = loader.no_such


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_the_state_of_a_stateful_loader_is_out_of_reach_and_says_why(name: str) -> None:
    plain = StatefulDataLoader(Numbers())
    assert hasattr(plain, name)
    loader = StreamLoader(plain)
    assert not hasattr(loader, name)
    with pytest.raises(AttributeError, match=rf"^StreamLoader has no {name}: .*read ahead"):
        getattr(loader, name)


@pytest.mark.parametrize("name", ["batch_size", "dataset", "prefetch", "device", "stats"])
def test_an_attribute_cannot_be_set_by_mistake(name: str) -> None:
    plain = DataLoader(Numbers(), batch_size=2)
    loader = StreamLoader(plain)
    with pytest.raises(AttributeError, match=rf"'?{name}'?"):
        setattr(loader, name, 3)
    assert plain.batch_size == 2


def test_dunders_are_not_looked_up_in_the_loader() -> None:
    loader = StreamLoader(mover("mine", __array__=3, __cuda_array_interface__={}))
    assert not hasattr(loader, "__array__")
    assert not hasattr(loader, "__cuda_array_interface__")


def test_a_loader_is_no_iterator() -> None:
    loader: Any = StreamLoader(batches(2))
    with pytest.raises(TypeError, match="not an iterator"):
        next(loader)


def test_it_is_generic_in_its_batch() -> None:
    loader = StreamLoader[Tensor](batches(2))
    assert isinstance(loader, StreamLoader)
    assert ids(loader) == [0, 1]


def test_the_depth_and_the_loader_can_be_read() -> None:
    items = batches(1)
    loader = StreamLoader(items, prefetch_batches=5)
    assert loader.prefetch_batches == 5
    assert loader.loader is items


def test_the_device_is_settled_at_the_first_next() -> None:
    loader = StreamLoader(batches(1))
    assert repr(loader.device) == "None"  # not "is None", which mypy would hold on to
    iterator = iter(loader)
    assert repr(loader.device) == "None"
    next(iterator)
    found = torch.accelerator.current_accelerator(check_available=True)
    assert loader.device is not None
    assert loader.device.type == (found.type if found else "cpu")


def test_a_named_device_is_known_at_once() -> None:
    assert StreamLoader([], "cpu").device == torch.device("cpu")
    assert StreamLoader([], torch.device("cpu", 0)).device == torch.device("cpu")
    assert StreamLoader([], FakeDevice()).device == torch.device("cpu")


# -- set_epoch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", SWEPT)
def test_g01_set_epoch_reaches_a_distributed_sampler(depth: int) -> None:
    dataset = Numbers(12)
    plain = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, 2, 0, shuffle=True))
    loader = StreamLoader(plain, prefetch_batches=depth)
    orders = []
    for epoch in (0, 1, 0):
        assert isinstance(plain.sampler, DistributedSampler)
        plain.sampler.set_epoch(epoch)
        expected = flat(plain)
        plain.sampler.set_epoch(99)
        loader.set_epoch(epoch)
        assert flat(loader) == expected
        loader.sampler.set_epoch(epoch)  # the other way that people write it
        assert flat(loader) == expected
        orders.append(expected)
    assert orders[0] == orders[2] != orders[1]


def test_g01_set_epoch_reaches_every_part_that_has_one_once() -> None:
    told: list[tuple[str, int]] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def set_epoch(self, epoch: int) -> None:
            told.append((self.name, epoch))

    sampler = Part("sampler")
    batch_sampler = Part("batch sampler")
    batch_sampler.sampler = sampler  # type: ignore[attr-defined]
    parts = {"sampler": sampler, "batch_sampler": batch_sampler, "dataset": Part("dataset")}
    StreamLoader(mover("mine", **parts)).set_epoch(3)
    assert sorted(told) == [("batch sampler", 3), ("dataset", 3), ("sampler", 3)]


def test_g01_a_batch_samplers_inner_sampler_is_told() -> None:
    dataset = Telling(12)
    inner: DistributedSampler[int] = DistributedSampler(dataset, 2, 0)
    batch_sampler = torch.utils.data.BatchSampler(inner, 2, drop_last=False)
    loader = StreamLoader(DataLoader(dataset, batch_sampler=batch_sampler))
    loader.set_epoch(7)
    assert inner.epoch == 7
    assert dataset.epochs == [7]


def test_g01_a_loader_with_its_own_set_epoch_is_told_alone() -> None:
    told: list[int] = []
    dataset = Telling()
    loader = StreamLoader(
        mover("mine", set_epoch=lambda _, epoch: told.append(epoch), dataset=dataset)
    )
    loader.set_epoch(4)
    assert told == [4]
    assert dataset.epochs == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: batches(2),
        lambda: iter(batches(2)),
        lambda: DataLoader(Stream(), batch_size=None),
        lambda: DataLoader(Numbers(2), batch_size=None),
        lambda: webdataset.WebLoader(Stream(), batch_size=None),
    ],
)
def test_g01_g02_set_epoch_is_silent_where_nobody_has_one(make: Any) -> None:
    loader = StreamLoader(make())
    loader.set_epoch(1)
    assert len(list(loader)) >= 2


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
def test_g02_a_loader_of_ready_batches_works(make_device: Any, depth: int) -> None:
    plain = ready(5)
    loader = StreamLoader(plain, make_device(), prefetch_batches=depth)
    assert loader.batch_sampler is None
    assert loader.batch_size is None
    assert len(loader) == 5
    assert ids(loader) == [0, 1, 2, 3, 4]


def test_g03_the_loader_is_used_as_it_is() -> None:
    collated: list[int] = []

    def collate(items: list[Tensor]) -> Tensor:
        collated.append(len(items))
        return torch.stack(items)

    plain = DataLoader(Numbers(7), batch_size=3, drop_last=True, collate_fn=collate)
    loader = StreamLoader(plain)
    assert flat(loader) == [0, 1, 2, 3, 4, 5]
    assert collated == [3, 3]


# -- repr, copies --------------------------------------------------------------------------------


def test_repr_shows_loader_device_depth_and_transforms() -> None:
    transforms: list[Any] = [double, on("image", double)]
    text = repr(StreamLoader(["a"], "cpu", transform=transforms, prefetch_batches=3))
    for part in ("StreamLoader(", "['a']", "'cpu'", "double", "on(key='image'", "batches=3"):
        assert part in text


def test_repr_of_an_unsettled_device_is_none() -> None:
    assert "device=None" in repr(StreamLoader([]))


def test_repr_does_no_work_and_works_during_a_pass() -> None:
    loader = StreamLoader(batches(3))
    before = repr(loader)
    iterator = iter(loader)
    next(iterator)
    assert "StreamLoader(" in before
    assert "StreamLoader(" in repr(loader)


COPIES: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
}


def make_loader() -> StreamLoader[Tensor]:
    return StreamLoader(batches(4), "cpu", transform=[double], prefetch_batches=1, seed=3)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("used", [False, True])
def test_d05_f03_an_idle_loader_can_be_copied(make_copy: Any, used: bool) -> None:  # noqa: FBT001
    loader = make_loader()
    if used:
        list(loader)
    copied = make_copy(loader)
    assert type(copied) is StreamLoader
    assert copied.prefetch_batches == 1
    assert copied.device == torch.device("cpu")
    assert copied.stats.total == Counts()
    assert ids(copied) == ids(loader) == [0, 2, 4, 6]
    assert not hasattr(copied, "no_such")


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_f03_a_live_loader_cannot_be_copied_and_says_why(make_copy: Any) -> None:
    loader = make_loader()
    iterator = iter(loader)
    next(iterator)  # batches wait to be pulled, so its thread is there
    with pytest.raises(TypeError, match=r"^a StreamLoader cannot be copied or pickled during"):
        make_copy(loader)
    assert ids(iterator) == [2, 4, 6]
    make_copy(loader)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_f03_a_live_loader_is_live_though_its_source_has_ended(make_copy: Any) -> None:
    ended = threading.Event()

    class Short:
        def __iter__(self) -> Iterator[Tensor]:
            yield from batches(2)
            ended.set()

        def __reduce__(self) -> str | tuple[Any, ...]:
            return (list, ())

    loader = StreamLoader(Short(), prefetch_batches=3)
    iterator = iter(loader)
    next(iterator)
    assert ended.wait(WAIT)
    for source in loader._sources:
        source.join(WAIT)
    with pytest.raises(TypeError, match=r"^a StreamLoader cannot be copied or pickled during"):
        make_copy(loader)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_f03_after_close_it_can_be_copied_again(make_copy: Any) -> None:
    loader = make_loader()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert ids(make_copy(loader)) == [0, 2, 4, 6]


def test_f03_after_an_error_that_is_kept_it_can_be_copied() -> None:
    def fail(_: Tensor) -> Tensor:
        raise ValueError("boom")

    loader = StreamLoader(batches(4), "cpu", transform=fail)
    with pytest.raises(ValueError, match=r"^boom") as kept:
        list(loader)
    assert isinstance(copy.copy(loader), StreamLoader)
    del kept


def test_f03_a_module_as_transform_is_pickled_with_the_loader() -> None:
    loader = StreamLoader([torch.ones(2, 3)], "cpu", transform=nn.Flatten(0))
    assert pickle.loads(pickle.dumps(loader)).loader[0].shape == (2, 3)


def test_the_epoch_counts_on_in_a_copy() -> None:
    def noise(batch: Tensor) -> Tensor:
        return batch + torch.rand(4)

    loader = StreamLoader([torch.zeros(4)] * 2, "cpu", transform=noise, seed=1)
    first = torch.stack(list(loader))
    copied = copy.copy(loader)
    second = torch.stack(list(loader))
    assert not torch.equal(first, second)
    assert torch.equal(second, torch.stack(list(copied)))
    loader.set_epoch(0)
    assert torch.equal(first, torch.stack(list(loader)))


# -- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
def test_batches_and_bytes_are_counted_by_epoch_and_in_total(make_device: Any, depth: int) -> None:
    loader = StreamLoader(batches(5), make_device(), prefetch_batches=depth)
    assert loader.stats.total == loader.stats.epoch == Counts()
    list(loader)
    list(loader)
    stats = loader.stats
    assert (stats.epoch.batches, stats.total.batches) == (5, 10)
    assert (stats.epoch.nbytes, stats.total.nbytes) == (5 * 32, 10 * 32)


@pytest.mark.parametrize("depth", SWEPT)
def test_the_total_counts_passes_that_overlap(depth: int) -> None:
    loader = StreamLoader(batches(4), prefetch_batches=depth)
    list(zip(loader, loader, strict=True))
    assert loader.stats.total.batches == 8


def test_statistics_are_frozen_and_can_be_printed() -> None:
    loader = StreamLoader(batches(2))
    list(loader)
    stats: Any = loader.stats
    assert re.match(r"^epoch: 2 batches, .*waited for the source .*for the device", str(stats))
    with pytest.raises(AttributeError, match="epoch"):
        stats.epoch = None
    with pytest.raises(AttributeError, match="batches"):
        stats.epoch.batches = 3
    list(loader)
    assert stats.total.batches == 2  # what was read before stays


# -- small print ---------------------------------------------------------------------------------


def test_a_loader_leaves_no_warning_behind() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = StreamLoader(batches(3))
        next(iter(loader))
        del loader


def test_the_public_class_is_where_it_says() -> None:
    assert StreamLoader is streamloader.loader.StreamLoader
    assert StreamLoader.__module__ in sys.modules
