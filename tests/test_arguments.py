"""What is accepted, what is refused and how, what is warned of."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from streamloader import StreamLoader, arguments

DATA = TensorDataset(torch.arange(4))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Indexed:
    def __getitem__(self, index: int) -> int:
        return [1, 2][index]


# -- iterable ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loader", [[], (), {}, iter([]), range(3), Indexed(), DataLoader(DATA), Stream()]
)
def test_whatever_can_be_iterated_over_is_a_loader(loader: Any) -> None:
    assert arguments.iterable(loader) is loader


@pytest.mark.parametrize("loader", [42, None, 1.5, list, DataLoader, len])
def test_what_cannot_be_iterated_over_is_refused(loader: Any) -> None:
    shown = re.escape(repr(loader))
    with pytest.raises(TypeError, match=f"^loader must be an iterable of batches, got {shown}$"):
        arguments.iterable(loader)


class Mapped(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [DATA, Mapped()])
def test_a_dataset_is_refused_with_what_to_do(dataset: Any) -> None:
    with pytest.raises(
        TypeError,
        match=rf"^loader must be an iterable of batches, got {type(dataset).__name__}, a dataset: "
        r"wrap it first, as in StreamLoader\(DataLoader\(dataset, batch_size=\.\.\.\)\)$",
    ):
        arguments.iterable(dataset)


# -- whole -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1, 2**70])
def test_a_whole_number_is_taken(value: int) -> None:
    assert arguments.whole("depth", value) == value


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [1]])
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    shown = re.escape(repr(value))
    with pytest.raises(TypeError, match=f"^depth must be a whole number, got {shown}$"):
        arguments.whole("depth", value)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^depth must be at least 0, got -1$"):
        arguments.whole("depth", -1)


# -- size --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "expected"), [(True, 42), (False, 0), (0, 0), (1, 1), (7, 7)])
def test_a_size_is_a_number_of_bytes_or_whether_there_are_any(value: Any, expected: int) -> None:
    assert arguments.size("memory", value, lambda: 42) == expected


@pytest.mark.parametrize("value", [1.0, "1", None])
def test_what_is_no_number_of_bytes_is_refused(value: Any) -> None:
    text = f"^memory must be True, False or a number of bytes, got {re.escape(repr(value))}$"
    with pytest.raises(TypeError, match=text):
        arguments.size("memory", value, lambda: 42)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^memory must be at least 0, got -1$"):
        arguments.size("memory", -1, lambda: 42)


# -- draws_apart -------------------------------------------------------------------------------


class WebLoader:
    """As webdataset's: a pipeline whose first part is a DataLoader."""

    def __init__(self, first: Any) -> None:
        self.pipeline = [first]


@pytest.mark.parametrize(
    ("loader", "apart"),
    [
        ([1, 2], True),
        ((1, 2), True),
        (iter([1, 2]), False),
        (DataLoader(DATA), False),
        (DataLoader(DATA, num_workers=1), True),
        (WebLoader(DataLoader(DATA, num_workers=1)), True),
        (WebLoader(DataLoader(DATA)), False),
        (WebLoader([1]), False),
        (Stream(), False),
    ],
)
def test_only_lists_and_workers_surely_draw_nothing_here(loader: Any, *, apart: bool) -> None:
    assert arguments.draws_apart(loader) is apart


# -- epoch_setters -----------------------------------------------------------------------------


class Told:
    """Has a `set_epoch`, and whatever parts it is given."""

    def __init__(self, **parts: Any) -> None:
        self.epochs: list[int] = []
        vars(self).update(parts)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Untold:
    set_epoch = None

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def tell(loader: Any) -> None:
    for setter in arguments.epoch_setters(loader):
        setter(7)


def test_the_loader_itself_is_told_and_nobody_else() -> None:
    sampler = Told()
    loader = Told(sampler=sampler)

    tell(loader)

    assert (loader.epochs, sampler.epochs) == ([7], [])


def test_each_part_is_told_once() -> None:
    sampler, dataset = Told(), Told()
    batch_sampler = Told(sampler=sampler)

    tell(Untold(sampler=sampler, batch_sampler=batch_sampler, dataset=dataset))

    assert [part.epochs for part in (sampler, batch_sampler, dataset)] == [[7], [7], [7]]


def test_a_sampler_within_the_batch_sampler_is_told() -> None:
    inner = Told()

    tell(Untold(batch_sampler=Untold(sampler=inner)))

    assert inner.epochs == [7]


@pytest.mark.parametrize("loader", [[], DataLoader(DATA), Untold(dataset=Untold()), iter([])])
def test_where_nobody_listens_nobody_is_told(loader: Any) -> None:
    assert arguments.epoch_setters(loader) == []


# -- second_pass -------------------------------------------------------------------------------


def test_the_message_for_a_second_pass_says_what_to_do() -> None:
    assert arguments.second_pass(iter([])) == (
        "a second pass over this list_iterator cannot start while the first is live, since both "
        "would share its one iterator: finish the first, or close() its iterator"
    )


# -- advise ------------------------------------------------------------------------------------


def mover(name: str, **attributes: Any) -> Any:
    module, _, kind = name.rpartition(".")
    return type(kind, (), {"__module__": module, **attributes})()


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        (
            "accelerate.data_loader.DataLoaderShard",
            "prepare the DataLoader with device_placement=False",
        ),
        ("timm.data.loader.PrefetchLoader", "build the loader with use_prefetcher=False"),
        ("torchtnt.utils.data.data_prefetcher.CudaDataPrefetcher", "wrap the loader that it wraps"),
    ],
)
def test_a_loader_that_moves_batches_is_warned_of(module: str, advice: str) -> None:
    message = (
        f"{module.rpartition('.')[2]} moves batches to the device itself, before StreamLoader "
        f"can do it ahead of the step: {advice}"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        arguments.advise(mover(module, device="cuda"))


def test_accelerates_dispatcher_is_warned_of_though_it_has_no_device_of_its_own() -> None:
    with pytest.warns(UserWarning, match=r"^DataLoaderDispatcher moves .*device_placement=False$"):
        arguments.advise(mover("accelerate.data_loader.DataLoaderDispatcher"))


def test_a_subclass_of_one_is_warned_of_once() -> None:
    kind = type("Mine", (type(mover("timm.data.loader.PrefetchLoader")),), {})

    with pytest.warns(UserWarning, match=r"^Mine moves batches ") as warned:
        arguments.advise(kind())

    assert len(warned) == 1


@pytest.mark.parametrize(
    "loader", [[], DataLoader(DATA), mover("accelerate.data_loader.DataLoaderShard", device=None)]
)
def test_a_loader_that_leaves_batches_on_the_host_is_no_reason_to_warn(loader: Any) -> None:
    assert arguments.advise(loader) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    "module",
    ["timm.data.loader.PrefetchLoader", "torchtnt.utils.data.data_prefetcher.CudaDataPrefetcher"],
)
def test_others_than_accelerates_are_warned_of_without_a_device(module: str) -> None:
    with pytest.warns(UserWarning, match=r"^[A-Z]\w+ moves batches "):
        arguments.advise(mover(module, device=None))


# -- warn_of_seed ------------------------------------------------------------------------------


def test_a_seed_that_does_not_reach_the_transforms_is_warned_of() -> None:
    with pytest.warns(
        UserWarning,
        match=r"^seed does not reach the transforms: list_iterator may draw from torch's "
        r"generators in this process while they run\. Use a DataLoader with num_workers >= 1, or "
        r"prefetch_batches=0$",
    ):
        arguments.warn_of_seed(iter([1]))


@pytest.mark.parametrize("loader", [[1], (1,), DataLoader(DATA, num_workers=1)])
def test_a_seed_that_reaches_them_is_not(loader: Any) -> None:
    assert arguments.warn_of_seed(loader) is None  # type: ignore[func-returns-value]


# -- advise, of StreamLoaders ------------------------------------------------------------------

ONCE = r"^StreamLoader moves batches .* wrap the DataLoader once, with all transforms in a list$"


def test_a_stream_loader_within_another_is_warned_of_where_it_is_made() -> None:
    inner = StreamLoader([1], "cpu")

    with pytest.warns(UserWarning, match=ONCE) as warned:
        StreamLoader(inner)

    assert [warning.filename for warning in warned] == [__file__]


def test_a_stream_loader_whose_device_is_not_settled_is_warned_of_too() -> None:
    inner = StreamLoader([1])

    with pytest.warns(UserWarning, match=ONCE):
        StreamLoader(inner)
