"""Public failure cases, groups D to G: what is iterated, what arrives, who is asked and told."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from tqdm import tqdm

from streamloader import StreamLoader, on
from streamloader.testing import FakeDevice
from tests.loaders import SWEPT, batches, devices, fill, ids, number_of


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(batches(5))


class Growing:
    """Samples what there is when a pass starts."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.items)))


# -- D: the protocol -----------------------------------------------------------------------------


@pytest.mark.parametrize("total", [None, 5])
def test_d01_a_progress_bar_works_with_and_without_a_length(total: int | None) -> None:
    shown = io.StringIO()
    source = batches(5) if total else (fill(number) for number in range(5))
    bar = tqdm(StreamLoader(source), file=shown)
    assert bar.total == total
    assert ids(bar) == [0, 1, 2, 3, 4]
    assert ("5/5" if total else "5it") in shown.getvalue()


def test_d01_a_length_that_the_dataset_claims_wrongly_is_not_ours_to_count_by() -> None:
    class Short(Stream):
        def __len__(self) -> int:
            return 3

    plain = DataLoader(Short(), batch_size=None)
    loader = StreamLoader(plain)
    assert len(loader) == len(plain) == 3
    with pytest.warns(UserWarning, match="Length of IterableDataset"):  # torch's own
        assert ids(plain) == [0, 1, 2, 3, 4]
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert ids(loader) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_d02_d04_every_number_of_batches_at_every_depth(depth: int, make_device: Any) -> None:
    for count in range(12):
        loader = StreamLoader(batches(count), make_device(), prefetch_batches=depth)
        assert ids(loader) == list(range(count))


@pytest.mark.parametrize("depth", SWEPT)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_d04_a_dataset_without_one_whole_batch_yields_nothing(depth: int, workers: int) -> None:
    for count in (0, 3):
        plain = DataLoader(Numbers(count), batch_size=4, drop_last=True, num_workers=workers)
        loader = StreamLoader(plain, FakeDevice(), prefetch_batches=depth)
        assert len(loader) == 0
        assert list(loader) == list(loader) == []


def test_d04_a_dataset_that_was_empty_is_read_once_it_has_something() -> None:
    items: list[Any] = []
    dataset: Any = items
    loader = StreamLoader(DataLoader(dataset, batch_size=None, sampler=Growing(items)))
    assert ids(loader) == []
    items.extend(batches(3))
    assert ids(loader) == [0, 1, 2]


def test_d05_a_generator_of_the_loader_and_an_unhandled_attribute() -> None:
    plain = DataLoader(Numbers(4), shuffle=True, generator=torch.Generator())
    loader = StreamLoader(plain)
    assert loader.generator is plain.generator
    assert not hasattr(loader, "no_such")


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_d07_a_calibration_on_workers_shows_nothing_in_the_epoch_after_it(
    persistent: bool,  # noqa: FBT001
) -> None:
    plain = DataLoader(Numbers(24), batch_size=2, num_workers=2, persistent_workers=persistent)
    loader = StreamLoader(plain, FakeDevice(looks=1))
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(3)]
    if persistent:
        del iterator  # they have one iterator: see D06
    assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 24, 2)]
    assert [batch.tolist() for batch in kept] == [[0, 1], [2, 3], [4, 5]]


# -- E: what is in a batch -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", SWEPT)
def test_e05_a_picture_is_the_same_object(depth: int) -> None:
    picture = Image.new("RGB", (2, 2))
    [(moved, same)] = StreamLoader([(fill(1), picture)], FakeDevice(), prefetch_batches=depth)
    assert same is picture
    assert number_of(moved) == 1


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
def test_e10_a_bare_tensor_and_a_one_tuple(depth: int, make_device: Any) -> None:
    source: list[Any] = [fill(1), (fill(2),), [fill(3)], {"x": fill(4)}, ()]
    loader = StreamLoader(source, make_device(), prefetch_batches=depth)
    bare, single, listed, named, nothing = loader
    assert type(single) is tuple
    assert type(listed) is list
    assert nothing == ()
    assert [number_of(tensor) for tensor in (bare, *single, *listed, *named.values())] == [
        1,
        2,
        3,
        4,
    ]


# -- F: workers ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_f02_transforms_run_in_the_main_process_whatever_the_workers_do() -> None:
    where: set[tuple[int, str]] = set()

    def augment(batch: Tensor) -> Tensor:
        where.add((os.getpid(), threading.current_thread().name))
        return batch + 1

    plain = DataLoader(Numbers(8), batch_size=2, num_workers=2)
    loader = StreamLoader(plain, FakeDevice(), transform=augment)
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert where == {(os.getpid(), threading.current_thread().name)}


class OnTheGpu(Numbers):
    """Its samples are moved to the GPU, wherever they are made."""

    def __getitem__(self, index: int) -> Tensor:
        torch.get_device_module("cuda").init()
        raise AssertionError("torch should have refused")


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_f02_a_dataset_that_uses_cuda_in_a_worker_is_told_where_to_do_it(
    workers: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.get_device_module("cuda")
    monkeypatch.setattr(cuda, "_is_in_bad_fork", lambda: True)  # as after model.cuda() and a fork
    plain = DataLoader(OnTheGpu(4), batch_size=2, num_workers=workers)
    with pytest.raises(RuntimeError, match="CUDA in forked subprocess") as caught:
        list(StreamLoader(plain, FakeDevice(), prefetch_batches=depth))
    told = "".join([*getattr(caught.value, "__notes__", []), str(caught.value)])
    assert "pass it to StreamLoader as transform=..., which runs in this process" in told
    del caught
    gc.collect()  # a DataLoader that raised joins its workers only now, for 5 s, wrapped or not


def test_f02_other_errors_are_left_as_they_are() -> None:
    def source() -> Iterator[Tensor]:
        yield fill(0)
        raise RuntimeError("of my own")

    with pytest.raises(RuntimeError, match=r"^of my own$") as caught:
        ids(StreamLoader(source()))
    assert not getattr(caught.value, "__notes__", [])


# -- G: samplers and epochs ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", SWEPT)
@pytest.mark.parametrize("way", ["the loader", "its sampler"])
def test_g01_both_ways_of_telling_the_epoch_take_effect_in_the_next_pass(
    way: str, depth: int
) -> None:
    dataset = Numbers(12)

    def loader() -> DataLoader[Tensor]:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, 2, 0, shuffle=True)
        return DataLoader(dataset, 2, sampler=sampler)

    plain, wrapped = loader(), StreamLoader(loader(), prefetch_batches=depth)
    orders = []
    for epoch in (3, 0, 1):
        plain.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        (wrapped if way == "the loader" else wrapped.sampler).set_epoch(epoch)
        orders.append([batch.tolist() for batch in wrapped])
        assert orders[-1] == [batch.tolist() for batch in plain]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("depth", SWEPT)
def test_g02_an_epoch_is_told_to_a_dataset_of_ready_batches(depth: int) -> None:
    class Ready(Numbers):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> Tensor:
            return fill(10 * self.epoch + index)

    loader = StreamLoader(DataLoader(Ready(3), batch_size=None), prefetch_batches=depth)
    loader.set_epoch(2)
    assert ids(loader) == [20, 21, 22]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
def test_g03_every_option_of_the_loader_counts_and_its_hooks_run_as_often(depth: int) -> None:
    context = multiprocessing.get_context("fork")
    begun, collated = context.Value("i", 0), context.Value("i", 0)

    def begin(_: int) -> None:
        with begun.get_lock():
            begun.value += 1

    def collate(items: list[Tensor]) -> list[Any]:
        with collated.get_lock():
            collated.value += 1
        return [torch.stack(items), len(items)]

    def loader() -> DataLoader[Any]:
        return DataLoader(
            Numbers(11),
            batch_size=2,
            shuffle=True,
            drop_last=True,
            num_workers=2,
            timeout=30,
            worker_init_fn=begin,
            generator=torch.Generator().manual_seed(3),
            prefetch_factor=1,
            collate_fn=collate,
            multiprocessing_context=context,
        )

    def seen(of: Any) -> tuple[Any, ...]:
        begun.value = collated.value = 0
        read = [(batch.tolist(), count) for _ in range(2) for batch, count in of]
        return read, begun.value, collated.value

    expected = seen(loader())
    assert expected[1:] == (4, 10)
    wrapped = StreamLoader(loader(), FakeDevice(), prefetch_batches=depth, transform=on(0, abs))
    assert seen(wrapped) == expected
