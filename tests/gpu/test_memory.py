"""Bounded memory: on the device, pinned on the host, and file descriptors."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks._memory import MEMORY, STEP_MS, Cycled, Step, graph_step, launch
from benchmarks._setting import Setting
from benchmarks.races import settle
from streamloader import StreamLoader, on
from streamloader.device.accelerator import Accelerator
from tests.gpu.sources import MIB, ROWS, Numbers, busy, listed, workers

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
IMAGES = 16 * MIB  # bytes of a raw batch where memory is measured: whole blocks of the allocator
FORMS = [on(0, torch.Tensor.float), on(0, torch.Tensor.half)]
IN_EACH_FORM = IMAGES * (1 + 4 + 2)


@pytest.fixture(autouse=True)
def _from_a_fresh_start() -> None:
    settle(CUDA)


# -- on the device -----------------------------------------------------------------------------


def source(steps: int) -> Cycled:
    """So many pinned batches, a few different ones."""
    images = [torch.full((16, MIB), n, dtype=torch.uint8).pin_memory() for n in range(4)]
    return Cycled([(image, torch.zeros(16, dtype=torch.int64)) for image in images], steps)


def slow(batch: Iterable[Tensor]) -> None:
    busy(STEP_MS)
    next(iter(batch)).amax()


STEPS: dict[str, Callable[[], Step]] = {
    "launches": lambda: slow,
    "one graph": lambda: graph_step(CUDA, STEP_MS),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(("depth", "steps"), [(1, 20), (2, 200), (4, 20)])
def test_b02_memory_is_bounded_in_each_form_however_far_python_runs(
    depth: int, steps: int, step: Callable[[], Step]
) -> None:
    made = step()
    loader = StreamLoader(source(steps), CUDA, transform=FORMS, prefetch_batches=depth)
    most = launch(CUDA, loader, made)
    assert most <= (depth + 2) * IN_EACH_FORM + MIB


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_b02_memory_is_bounded_without_transforms(depth: int, step: Callable[[], Step]) -> None:
    made = step()
    most = launch(CUDA, StreamLoader(source(20), CUDA, prefetch_batches=depth), made)
    assert most <= (depth + 2) * IMAGES + MIB


def test_memory_is_bounded_over_many_short_passes_too() -> None:
    loader = StreamLoader(source(1), CUDA, prefetch_batches=2)
    passes = itertools.chain.from_iterable(itertools.repeat(loader, 40))
    most = launch(CUDA, passes, slow)
    assert most <= 4 * IMAGES + MIB


@pytest.mark.parametrize("transform", [None, FORMS], ids=["raw", "two transforms"])
def test_b01_reserved_memory_is_flat_from_the_third_epoch_to_the_fortieth(transform: Any) -> None:
    def wrap(batches: Iterable[Any], _transform: Any) -> Iterable[Any]:
        return StreamLoader(batches, CUDA, transform=transform)

    found = MEMORY["grown"].run(Setting(wrap, CUDA))
    assert (found.batches, found.unit > IMAGES // 2) == (0, True), found.saw


def test_every_label_kept_keeps_no_images() -> None:
    labels: list[Tensor] = []
    before = 0
    for _, label in StreamLoader(workers(1000), CUDA):
        labels.append(label)
        if len(labels) == 20:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() - before < MIB
    assert [int(label[0]) for label in labels] == list(range(1000))


def allocations() -> int:
    """How often the driver was asked for device memory."""
    return int(torch.cuda.memory_stats()["num_device_alloc"])


def test_sizes_that_vary_find_freed_blocks() -> None:
    sizes = torch.randint(MIB, 4 * MIB, (300,), generator=torch.Generator().manual_seed(0))
    varying = [torch.full((int(size),), i % 251, dtype=torch.uint8) for i, size in enumerate(sizes)]
    sums: list[Tensor] = []
    before = 0
    for images in StreamLoader(varying, CUDA):
        busy(1)
        sums.append(images.sum())
        if len(sums) == 100:
            before = allocations()
    assert allocations() - before <= 4
    assert [int(s) for s in sums] == [i % 251 * int(size) for i, size in enumerate(sizes)]


# -- pinned on the host ------------------------------------------------------------------------


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every slab that is made."""
    made: list[int] = []
    make = Accelerator.slab

    def noted(self: Accelerator, nbytes: int) -> Tensor:
        slab = make(self, nbytes)
        assert slab.untyped_storage().nbytes() == nbytes
        made.append(nbytes)
        return slab

    monkeypatch.setattr(Accelerator, "slab", noted)
    return made


PAGEABLE: dict[str, Callable[[int], Any]] = {"a list": listed, "workers": workers}


@pytest.mark.parametrize("feed", PAGEABLE.values(), ids=PAGEABLE.keys())
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_b04_what_is_pinned_is_a_few_slabs_of_the_size_that_a_batch_needs(
    feed: Callable[[int], Any], depth: int, slabs: list[int]
) -> None:
    options: Any = {"prefetch_batches": depth, "shared_memory": False}
    loader = StreamLoader(feed(30), CUDA, transform=on(0, Tensor.float), **options)
    for _ in range(3):
        for images, _ in loader:
            busy(1)
            images.sum()
    assert set(slabs) == {ROWS + 64}  # the labels take a cache line
    assert len(slabs) <= depth + 2


def test_b04_what_is_pinned_already_is_not_pinned_again(slabs: list[int]) -> None:
    loader = StreamLoader(workers(30, pin_memory=True), CUDA, prefetch_batches=2)
    for images, _ in loader:
        images.sum()
    assert sum(slabs) < ROWS // 100


def test_after_warm_up_nothing_is_allocated(slabs: list[int]) -> None:
    before = 0, 0
    loader = StreamLoader(listed(30), CUDA, transform=on(0, torch.Tensor.float))
    for epoch in range(4):
        for images, _ in loader:
            busy(2)
            images.sum()
        if epoch == 0:
            before = allocations(), len(slabs)
    assert (allocations(), len(slabs)) == before


# -- file descriptors --------------------------------------------------------------------------


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("persistent", [False, True], ids=["workers anew", "the same workers"])
def test_b03_descriptors_are_flat_over_steps_and_epochs(persistent: bool) -> None:  # noqa: FBT001
    """A host batch from a worker keeps one for each tensor, and none once it is on the device."""
    data = DataLoader(
        Numbers(60, nbytes=1024), batch_size=4, num_workers=2, persistent_workers=persistent
    )
    loader = StreamLoader(data, CUDA, prefetch_batches=4)
    kept, most = [], []
    for _ in range(6):
        seen = []
        for batch in loader:
            kept.append(batch)
            seen.append(descriptors())
        most.append((max(seen[:20]), max(seen[20:])))
    early, late = most[0]
    in_flight = 16  # of a few batches more or less
    assert late <= early + in_flight
    assert most[-1][1] <= early + in_flight
    assert len(kept) == 6 * 60
