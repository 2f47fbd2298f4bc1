"""In a worker `default_collate` makes its tensors in a slab; the user's function knows nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from streamloader import augment
from streamloader.collate import Collate
from streamloader.sent import Sent
from streamloader.shared import Shape, Shared
from tests.transported import (
    BATCHES,
    MEDIUM,
    SAMPLES,
    Image,
    memory,
    moved,
    own,
    received,
    same,
    stacked,
)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """While it lasts, this process takes itself for a worker."""
    info = SimpleNamespace(id=0)
    monkeypatch.setitem(default_collate_fn_map, Tensor, collate_tensor_fn)  # undone afterwards
    monkeypatch.setattr("streamloader.collate.get_worker_info", lambda: info)
    monkeypatch.setattr("streamloader.collate.os", SimpleNamespace(getpid=lambda: 0))
    return info


def collated(shared: Shared, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    return received(bytes(ForkingPickler.dumps(Collate(collate_fn, shared)(samples))))


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_batch_is_what_default_collate_makes(kind: str, worker: object) -> None:  # noqa: ARG001
    shared, samples = memory(), [SAMPLES[kind](n) for n in range(4)]
    found = collated(shared, default_collate, samples)
    assert isinstance(found, Sent)
    same(own(found), default_collate(samples))


@pytest.mark.parametrize("collate_fn", [stacked, moved, augment.collate])
def test_a_batch_is_what_the_users_function_makes(collate_fn: Any, worker: object) -> None:  # noqa: ARG001
    shared = memory()
    samples: Any = [(torch.full((3, 64, 64 + n), n, dtype=torch.uint8), n) for n in range(4)]
    if collate_fn is not augment.collate:
        samples = [SAMPLES["tuples"](n) for n in range(4)]
    found = collated(shared, collate_fn, samples)
    assert isinstance(found, Sent)
    same(own(found), collate_fn(samples))


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|invariant):UserWarning")
def test_a_batch_that_is_not_collated_arrives(make: Any, worker: object) -> None:  # noqa: ARG001
    shared = memory()
    same(own(collated(shared, default_convert, make())), default_convert(make()))


ALIKE = [torch.arange(MEDIUM) for _ in range(2)]


@pytest.mark.parametrize(
    "samples",
    [
        [ALIKE[0].as_subclass(Image)] * 2,
        [torch.ones(MEDIUM, requires_grad=True)] * 2,
        [ALIKE[0], ALIKE[1].float()],
        [torch.ones(MEDIUM, dtype=torch.complex64).conj()] * 2,
    ],
    ids=["a subclass", "a gradient", "two dtypes", "conjugate"],
)
def test_samples_that_are_more_than_bytes_are_left_to_torch(
    samples: list[Tensor],
    worker: object,  # noqa: ARG001
) -> None:
    shared, expected = memory(), collate_tensor_fn(samples)
    found = own(collated(shared, lambda s: default_collate(s).detach(), samples))
    same(found, expected.detach().resolve_conj())


def test_samples_that_do_not_fit_each_other_are_torchs_error(worker: object) -> None:  # noqa: ARG001
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        collated(memory(), default_collate, [torch.ones(MEDIUM), torch.ones(MEDIUM + 1)])


# -- straight in ---------------------------------------------------------------------------------


def test_large_tensors_are_stacked_in_the_slab_and_small_ones_copied_there_together(
    worker: object,  # noqa: ARG001
) -> None:
    shared = memory()
    samples = [(torch.ones(MEDIUM), torch.tensor(n), torch.ones(3)) for n in range(4)]
    found = collated(shared, default_collate, samples)
    large, small = found.recipe.layout.blocks
    assert (large.nbytes, small.nbytes) == (MEDIUM * 16, 64 + 4 * 12)
    assert found.recipe.used == MEDIUM * 16 + 64 + 4 * 12  # and nothing beside


def test_the_users_function_runs_once_and_may_keep_its_batch(worker: object) -> None:  # noqa: ARG001
    """What it keeps is not overwritten, though the owner is done with it."""
    shared, kept = memory(each=2), []

    def collate(samples: Any) -> Any:
        kept.append(default_collate(samples))
        return kept[-1]

    for number in range(4):
        collated(shared, collate, [torch.full((MEDIUM,), number)] * 2)
    assert [set(batch.flatten().tolist()) for batch in kept] == [{0}, {1}, {2}, {3}]
    del kept[:]
    assert isinstance(collated(shared, collate, [torch.ones(3)]), Sent)


def test_without_a_free_slab_the_batch_goes_the_ordinary_way(worker: object) -> None:  # noqa: ARG001
    shared = memory(each=1)
    first = collated(shared, default_collate, ALIKE)
    second = collated(shared, default_collate, ALIKE)
    assert [type(first), type(second)] == [Sent, Tensor]
    same(second, default_collate(ALIKE))
    del first
    assert isinstance(collated(shared, default_collate, ALIKE), Sent)


def test_a_function_that_raises_leaves_the_slab_where_it_is(worker: object) -> None:  # noqa: ARG001
    shared = memory(each=1)

    def collate(samples: Any) -> Any:
        raise KeyError(f"{len(default_collate(samples))} samples")

    for _ in range(2):
        with pytest.raises(KeyError, match=r"^'2 samples'$"):
            collated(shared, collate, ALIKE)
    assert isinstance(collated(shared, default_collate, ALIKE), Sent)


def test_each_worker_has_slabs_of_its_own(worker: SimpleNamespace) -> None:
    shared, kept = Shared(Shape(2, 1, 1 << 20)), []
    for worker.id in (1, 0, 1):
        kept.append(collated(shared, default_collate, ALIKE))
    assert [getattr(found, "number", None) for found in kept] == [1, 0, None]


# -- elsewhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize("info", [None, SimpleNamespace(id=0)], ids=["no worker", "a thread"])
def test_in_the_owners_process_it_is_the_users_function(
    info: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamloader.collate.get_worker_info", lambda: info)
    found = Collate(default_collate, memory())(ALIKE)
    same(found, default_collate(ALIKE))
    assert default_collate_fn_map[Tensor] is collate_tensor_fn


def test_a_handler_of_the_users_own_stays(
    worker: object,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own_handler(samples: Any, *, collate_fn_map: Any = None) -> Tensor:  # noqa: ARG001
        return torch.stack(tuple(samples)) + 1

    monkeypatch.setitem(default_collate_fn_map, Tensor, own_handler)
    shared = memory()
    same(own(collated(shared, default_collate, ALIKE)), torch.stack(ALIKE) + 1)
    assert default_collate_fn_map[Tensor] is own_handler


def test_a_dataset_that_collates_by_itself_gets_memory_of_its_own(worker: object) -> None:  # noqa: ARG001
    """Before its batch is collated, and after another was."""
    shared = memory()
    collated(shared, default_collate, ALIKE)
    sample = default_collate(ALIKE)
    assert isinstance(collated(shared, default_convert, sample), Sent)
    same(sample, torch.stack(ALIKE))
