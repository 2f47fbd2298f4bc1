"""Workers' shared memory on a real accelerator: registered in place, read by its copy engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from streamloader import StreamLoader
from streamloader.device import RefusedError
from streamloader.device.accelerator import Accelerator
from streamloader.shared import Shared
from tests.gpu.sources import MIB, busy

pytestmark = pytest.mark.gpu


class Noise(Dataset[dict[str, Tensor]]):
    """Batches of bytes that nothing else has: sample `n` is that of generator `n`.

    Args:
        count: How many.
        sizes: Bytes of them, in turn.
    """

    def __init__(self, count: int, sizes: tuple[int, ...]) -> None:
        self._count, self._sizes = count, sizes

    def __len__(self) -> int:
        return self._count

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        size = self._sizes[index % len(self._sizes)]
        images = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        return {"images": images, "small": images[:1000].clone(), "index": torch.tensor(index)}


class Numbered(Dataset[Tensor]):
    """Batches that are full of their numbers, made quickly."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._count, self._nbytes = count, nbytes

    def __len__(self) -> int:
        return self._count

    @override
    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self._nbytes,), index % 251, dtype=torch.uint8)


def loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": None, "num_workers": 2, **options})


def memory_of(made: StreamLoader[Any]) -> Shared:
    """What its last pass used."""
    return made._transport._regions[-1].shared


def is_pinned(shared: Shared, number: int) -> bool:
    """Whether a slab's first page is."""
    return torch.frombuffer(shared._memory(number)[:4096], dtype=torch.uint8).is_pinned()


SIZES = {"one size": (3 * MIB + 17,), "varying": (5000, 3 * MIB + 17, MIB, 70_000, 0, 2 * MIB)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_batches_are_right_to_the_bit(depth: int, sizes: tuple[int, ...]) -> None:
    dataset = Noise(24, sizes)
    made = StreamLoader(loader(dataset), "cuda", prefetch_batches=depth)
    for _ in range(3):
        for number, batch in enumerate(made):
            busy(1)
            expected = dataset[number]
            assert list(batch) == list(expected)
            for name, tensor in expected.items():
                assert batch[name].is_cuda
                assert torch.equal(batch[name].cpu(), tensor)
    assert made.stats.total.shared == (72 if depth else 0)
    made.close()


def test_a_later_loop_of_the_users_own_over_the_same_workers_may_copy_without_waiting() -> None:
    plain = loader(Numbered(60, MIB), persistent_workers=True)
    made = StreamLoader(plain, "cuda")
    assert [int(batch.max()) for batch in made] == [*range(60)]

    copied = []
    for batch in plain:  # on the host: were it in a pinned slab, the copy would run after its end
        busy(2)
        copied.append(batch.to("cuda", non_blocking=True))
    assert [(int(one.min()), int(one.max())) for one in copied] == [(n, n) for n in range(60)]


def test_slabs_are_registered_in_place_and_unregistered_when_it_is_closed() -> None:
    plain = loader(Numbered(40, MIB), persistent_workers=True)
    made = StreamLoader(plain, "cuda")
    for batch in made:
        batch.sum()
    shared = memory_of(made)
    pinned = list(shared._pins)
    assert pinned
    assert all(is_pinned(shared, number) for number in pinned)
    del batch
    made.close()
    assert shared._pins == {}
    assert not any(is_pinned(shared, number) for number in pinned)


def test_dropped_it_unregisters_and_unmaps() -> None:
    gc.collect()
    before = mapped()
    made = StreamLoader(loader(Numbered(20, MIB)), "cuda")
    for batch in made:
        batch.sum()
    assert mapped() == before + 1
    del made, batch
    gc.collect()
    assert mapped() == before


def mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:streamloader")


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every slab that is pinned, a worker's or the loader's own."""
    made: list[int] = []
    pin, slab = Accelerator.pin, Accelerator.slab

    def noted_pin(self: Accelerator, memory: Tensor) -> Callable[[], object] | None:
        made.append(memory.nbytes)
        return pin(self, memory)

    def noted_slab(self: Accelerator, nbytes: int) -> Tensor:
        made.append(nbytes)
        return slab(self, nbytes)

    monkeypatch.setattr(Accelerator, "pin", noted_pin)
    monkeypatch.setattr(Accelerator, "slab", noted_slab)
    return made


def allocated() -> dict[str, int]:
    """How often the driver was asked for device memory, and what torch has pinned."""
    found = {"device": int(torch.cuda.memory_stats()["num_device_alloc"])}
    host: dict[str, Any] = getattr(torch.cuda, "host_memory_stats", dict)()
    return found | {name: int(n) for name, n in host.items() if "num_host_alloc" in name}


def test_nothing_is_allocated_or_pinned_between_step_50_and_step_1000(pins: list[int]) -> None:
    made = StreamLoader(loader(Numbered(1000, MIB), prefetch_factor=2), "cuda")
    before: dict[str, int] = {}
    early, wrong = 0, torch.zeros((), device="cuda", dtype=torch.int64)
    shared = None
    for step, batch in enumerate(made):
        wrong += (batch != step % 251).sum()
        busy(1)
        if step == 50:
            before, early, shared = allocated(), len(pins), memory_of(made)
    assert allocated() == before
    assert shared is not None
    shape = shared.shape
    # A slab may be used for the first time later, and is pinned once then.
    assert len(pins) <= shape.workers * shape.each
    assert set(pins) == {MIB}
    assert early > 0
    assert int(wrong) == 0


def test_workers_do_not_refill_what_the_device_has_yet_to_read() -> None:
    """The caller's stream is far behind, and so are copies that wait for memory."""
    made = StreamLoader(loader(Numbered(200, 2 * MIB)), "cuda", prefetch_batches=4)
    sums = []
    for batch in made:
        busy(5)
        sums.append(batch.view(torch.int64).sum())
        sums.append((batch != batch[0]).sum())
    for number, (total, unlike) in enumerate(zip(sums[::2], sums[1::2], strict=True)):
        one = int.from_bytes(bytes([number % 251]) * 8, "little")
        wrapped = (one * (2 * MIB // 8) + 2**63) % 2**64 - 2**63
        assert (int(total), int(unlike)) == (wrapped, 0)
    assert made.stats.total.shared > 100


def test_a_driver_that_refuses_is_warned_of_once_and_batches_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Accelerator, memory: Tensor) -> None:  # noqa: ARG001
        raise RefusedError("no pages left")

    monkeypatch.setattr(Accelerator, "pin", refuse)
    made = StreamLoader(loader(Numbered(40, MIB)), "cuda")
    text = "^shared memory of workers stays unpinned, .*: no pages left; "
    with pytest.warns(UserWarning, match=text) as caught:
        found = [(int(batch.min()), int(batch.max())) for batch in made]
    assert found == [(number, number) for number in range(40)]
    assert sum(str(one.message).startswith("shared memory of") for one in caught) == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_100_early_breaks_leave_no_descriptor(persistent: bool) -> None:  # noqa: FBT001
    plain = loader(Numbered(20, 4096), persistent_workers=persistent)
    made, found = StreamLoader(plain, "cuda"), []
    for number in range(100):
        assert int(next(iter(made))[0]) == 0
        if number in (20, 99):
            gc.collect()
            found.append((len(list(Path("/proc/self/fd").iterdir())), mapped()))
    assert abs(found[0][0] - found[1][0]) < 10  # of what is on its way
    assert found[0][1] == found[1][1]
