"""Public failure cases, groups A and B: whose memory it is, and how much of it there is."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from streamloader import StreamLoader
from streamloader.checker import CheckedDevice
from streamloader.testing import FakeDevice
from tests.loaders import DEPTHS, SWEPT, Foreign, batches, devices, fill
from tests.scenarios import LATE, NBYTES, double, floats, run, settle, step

ROOT = Path(__file__).parent.parent
AHEAD = SWEPT[1:]
LARGE = 1 << 17
"""Elements of a tensor that is sent from where it lies, if its loader has pinned it: 1 MB."""


# -- A04: pinned memory that no allocator of torch's watches over --------------------------------


class Raw(FakeDevice):
    """Its copies hold no reference to what they read, as those of a GPU do not."""

    @override
    def copy(self, destination: Tensor, source: Tensor) -> None:
        move = functools.partial(ctypes.memmove, destination.data_ptr(), source.data_ptr())
        self.current().submit(functools.partial(move, source.nbytes))


def first(tensor: Tensor) -> int:
    """The number of a large batch; the ends show whether it was overwritten as well as the rest."""
    ends = {int(tensor.flatten()[place]) for place in (0, LARGE // 2, -1)}
    assert len(ends) == 1
    return ends.pop()


def test_a04_a_copy_that_holds_nothing_reads_what_was_dropped() -> None:
    """The scenario can fail: pin, copy and drop in one expression."""
    device, foreign = Raw(), Foreign()
    arena = device.arena(LARGE * 8)
    device.copy(arena, foreign.put(fill(7, LARGE)).view(torch.uint8))
    device.current().run(1)
    assert set(arena.tolist()) == {Foreign.SCRIBBLE}


@pytest.mark.slow
def test_a04_foreign_pinned_memory_that_its_source_drops_arrives_1000_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda *_: True)
    device, foreign = Raw(looks=2), Foreign()
    source = (foreign.put(fill(number, LARGE)) for number in range(1000))
    got = [first(batch) for batch in StreamLoader(source, device)]
    assert got == list(range(1000))
    assert len(foreign.made) <= 2  # packed, and let go, before the next pull


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
def test_a04_foreign_pinned_memory_of_a_dataloader_is_held_until_its_copy_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a batch class with a `pin_memory` of its own may do it; sent from where it lies."""
    device, foreign, stack = Raw(looks=1), Foreign(), torch.stack
    monkeypatch.setattr(Tensor, "is_pinned", lambda *_: True)
    monkeypatch.setattr(torch, "stack", lambda *args, **_: foreign.put(stack(*args)))
    dataset: Any = [fill(number, LARGE) for number in range(20)] * 10
    plain: DataLoader[Tensor] = DataLoader(dataset, batch_size=1)
    plain.pin_memory = True  # given to the constructor, it would do nothing here
    got = [first(batch) for batch in StreamLoader(plain, device)]
    assert got == list(range(20)) * 10
    assert device.verbs("slab") == []  # none of it was packed
    assert len(foreign.made) <= 2 + 4


# -- B01: streams, and what each strands ---------------------------------------------------------


@pytest.mark.slow
def test_b01_40_epochs_have_the_streams_and_the_slabs_of_one() -> None:
    device = CheckedDevice(looks=2)
    loader = StreamLoader(floats(), device, transform=[double, double])
    peaks = []
    for _ in range(40):
        run(device, loader)
        peaks.append(device.peak)
    device.verify()
    assert sorted(device.verbs("stream")) == [("stream", n) for n in ("copy", "stage 0", "stage 1")]
    assert len(device.verbs("slab")) == 4
    assert {stream for _, stream, _ in device.verbs("arena")} <= {"copy", "default"}
    assert peaks[39] == peaks[2]
    assert device.arenas <= 1  # the one that this test's own total has


# -- B02: however far Python runs ahead ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_b02_200_steps_that_are_only_launched_keep_to_the_bound(depth: int) -> None:
    """`peak` counts as an allocator does: memory is free once all that read it have come so far."""
    device = CheckedDevice(cost=lambda stream, _: float(stream == "default"))
    total = device.put(torch.zeros(NBYTES // 4))
    with device.on(device.current()):
        for batch in StreamLoader(floats(200), device, prefetch_batches=depth):
            step(total, batch)
            settle(device)
    device.verify()
    assert device.peak - NBYTES <= (depth + 2) * NBYTES


# -- B03: descriptors ----------------------------------------------------------------------------


DESCRIPTORS = """
import os, resource, sys, torch
from torch.utils.data import DataLoader
from streamloader import StreamLoader
from streamloader.testing import FakeDevice

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

class Many:
    def __len__(self): return 120
    def __getitem__(self, index): return {str(key): torch.full((3,), index) for key in range(20)}

plain = DataLoader(Many(), batch_size=2, num_workers=4)
loader = StreamLoader(plain, FakeDevice(), prefetch_batches=8) if sys.argv[1:] else plain
kept, late = [], []
try:
    for batch in loader:
        kept.append(batch)
        late.append(len(os.listdir("/proc/self/fd")))
except (RuntimeError, OSError):
    print("too many", len(kept) < 60)
    os._exit(0)  # what is left of the workers is of no interest
assert [int(batch["19"][1, 0]) for batch in kept] == list(range(1, 120, 2))
print("all", max(late) < 256)
"""


def described(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DESCRIPTORS, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    torch.multiprocessing.get_sharing_strategy() != "file_descriptor",
    reason="workers share memory by name here",
)
def test_b03_all_batches_of_four_workers_can_be_kept_with_256_descriptors() -> None:
    assert described() == "too many True\n"  # it can fail: the plain loader's are kept on the host
    assert described("wrapped") == "all True\n"


# -- B04: pinned memory --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_b04_5000_steps_pin_what_the_first_ones_did(depth: int) -> None:
    device = FakeDevice(looks=1)
    source = batches(50, 64)
    loader = StreamLoader(source, device, prefetch_batches=depth)
    for _ in range(100):
        assert sum(1 for _ in loader) == 50
    size = source[0].nbytes
    assert device.verbs("slab") == [("slab", size)] * (depth + 2)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
def test_b04_what_the_loader_has_pinned_is_not_pinned_again(
    pinned: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda *_: pinned)
    device = FakeDevice(looks=2)
    dataset: Any = [fill(number, LARGE) for number in range(10)]
    plain: DataLoader[Tensor] = DataLoader(dataset, batch_size=1)
    plain.pin_memory = pinned
    assert [first(batch) for batch in StreamLoader(plain, device)] == list(range(10))
    made = [nbytes for _, nbytes in device.verbs("slab")]
    assert made == ([] if pinned else [LARGE * 8] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
def test_b04_workers_that_hand_over_large_batches_pin_no_more(*, shared_memory: bool) -> None:
    device = FakeDevice(looks=1)
    dataset: Any = [fill(number, LARGE) for number in range(12)]
    plain: DataLoader[Tensor] = DataLoader(
        dataset, batch_size=None, num_workers=2, prefetch_factor=8
    )
    loader = StreamLoader(plain, device, prefetch_batches=4, shared_memory=shared_memory)
    for _ in range(5):
        assert [first(batch) for batch in loader] == list(range(12))
    if shared_memory:  # the workers' slabs, each once
        assert 0 < len(device.verbs("pin")) <= 2 * (8 + 6 + 1)
    assert device.verbs("slab") == [("slab", LARGE * 8)] * (0 if shared_memory else 6)
    assert multiprocessing.active_children() == []


# -- A02, A03: buffers that are used again -------------------------------------------------------


def one_buffer(count: int) -> Iterator[Tensor]:
    """Fills the same memory for every batch."""
    buffer = torch.empty(NBYTES // 4)
    for number in range(count):
        yield buffer.fill_(number)


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), *AHEAD[1:]])
def test_a02_no_buffer_is_refilled_before_its_copy_is_over_in_200_batches(depth: int) -> None:
    """Not the source's one, and none of the loader's own, though the device is far behind."""
    device = CheckedDevice(looks=LATE)
    total, kept = device.put(torch.zeros(NBYTES // 4)), []
    with device.on(device.current()):
        for batch in StreamLoader(one_buffer(200), device, prefetch_batches=depth):
            step(total, batch)
            kept.append(batch)  # not its number: to get that is to wait for the device
    device.verify()
    assert [int(batch[0]) for batch in kept] == list(range(200))
    assert len(device.verbs("slab")) == depth + 2  # each was used again, many times


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", AHEAD)
def test_a03_ten_batches_of_one_buffer_can_be_kept(depth: int, make_device: Any) -> None:
    assert [int(batch[0]) for batch in list(one_buffer(10))] == [9] * 10  # it can go wrong
    kept = list(StreamLoader(one_buffer(10), make_device(), prefetch_batches=depth))
    assert [int(batch[0]) for batch in kept] == list(range(10))
