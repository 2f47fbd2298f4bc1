"""Public failure cases that need a GPU, groups A to C: what the fake cannot show."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from streamloader import StreamLoader
from streamloader.device.accelerator import Accelerator
from tests.gpu.sources import MIB, ROWS, Rows, busy, fill
from tests.loaders import Foreign, ended

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def sums(loader: Any, milliseconds: float = 4) -> list[int]:
    """Each batch's sum, taken by a step that the host is far ahead of; and the batch dropped."""
    found = []
    for batch in loader:
        busy(milliseconds)
        found.append(batch.sum())
        del batch
    return [int(total) for total in found]


def right(count: int) -> list[int]:
    """What `sums` finds of `fill(0)`, `fill(1)`, ..."""
    return [number % 251 * ROWS for number in range(count)]


# -- A -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("pinned", [False, True])
def test_a02_200_fillings_of_one_buffer_arrive(pinned: bool, depth: int) -> None:  # noqa: FBT001
    def source() -> Iterator[Tensor]:
        buffer = fill(0).pin_memory() if pinned else fill(0)
        for number in range(200):
            yield buffer.fill_(number % 251)

    busy(100)
    assert sums(StreamLoader(source(), "cuda", prefetch_batches=depth), 1) == right(200)


def register(address: int, nbytes: int) -> None:
    status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
    assert int(status) == 0


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    torch.cuda.init()
    memory = Foreign(register)
    yield memory
    torch.cuda.synchronize()
    for buffer in memory.made:
        torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(buffer))


def test_a04_foreign_pinned_memory_can_go_wrong(foreign: Foreign) -> None:
    source = foreign.put(fill(7))
    torch.empty(ROWS, dtype=torch.uint8, device="cuda")  # the first allocation may take longer than
    busy(100)  # this does, after which nothing can go wrong
    moved = source.to("cuda", non_blocking=True)
    del source  # before it is sent
    assert int(moved.sum()) == Foreign.SCRIBBLE * ROWS


def test_a04_foreign_pinned_memory_that_its_source_drops_arrives_1000_times(
    foreign: Foreign,
) -> None:
    source = (foreign.put(fill(number)) for number in range(1000))
    assert sums(StreamLoader(source, "cuda"), 0.2) == right(1000)
    assert len(foreign.made) <= 2


def test_a04_foreign_pinned_memory_of_a_dataloader_is_held_until_its_copy_is_over(
    foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda *args, **_: foreign.put(stack(*args)))
    dataset: Any = [fill(number) for number in range(20)] * 10
    plain: DataLoader[Tensor] = DataLoader(dataset, batch_size=1, pin_memory=True)
    assert sums(StreamLoader(plain, "cuda"), 1) == right(20) * 10
    assert len(foreign.made) <= 10


# -- B -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True])
def test_b04_pinned_memory_reaches_a_ceiling_and_is_not_doubled(
    pinned: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slabs: list[int] = []
    make = Accelerator.slab

    def noted(self: Accelerator, nbytes: int) -> Tensor:
        slabs.append(nbytes)
        return make(self, nbytes)

    monkeypatch.setattr(Accelerator, "slab", noted)
    plain = DataLoader(
        Rows(1000, 2 * MIB),
        batch_size=None,
        num_workers=8,
        prefetch_factor=8,
        pin_memory=pinned,
        persistent_workers=True,
    )
    # Through shared memory neither slabs nor torch's pinned memory would be needed.
    loader = StreamLoader(plain, "cuda", prefetch_batches=4, shared_memory=False)
    torch.cuda.init()  # which the statistics do not do by themselves
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for _ in range(5):
        assert sum(1 for _ in loader) == 1000
    grown = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert slabs == ([] if pinned else [2 * MIB] * 6)
    # Torch's own read-ahead, which is 64 batches here, and what is between its queue and the end of
    # a copy: torch frees a block only when it is asked for the next one.
    assert grown <= (8 * 8 + 16) * 2 * MIB


# -- C -------------------------------------------------------------------------------------------


INTERRUPTED = """
import torch
from torch.utils.data import DataLoader
from streamloader import StreamLoader

class Zeros:
    def __len__(self): return 100_000
    def __getitem__(self, index): return torch.zeros(1 << 20)

held = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda")
plain = DataLoader(Zeros(), 8, num_workers=4, pin_memory=True)
for number, batch in enumerate(StreamLoader(plain, "cuda", transform=torch.Tensor.half)):
    torch.cuda._sleep(2_000_000)
    batch.sum()
    if number == 5:
        print("now", flush=True)
"""


OTHERS = "what other processes take of this GPU, or give back, counts too"


def test_c03_after_ctrl_c_the_gpus_memory_is_free() -> None:
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "now\n"
        taken = before - torch.cuda.mem_get_info()[0]
        assert taken > 1 << 32, f"{taken} bytes: {OTHERS}"
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in err
    assert "Fatal" not in err
    assert ended(map(int, listed.split()))
    kept = before - torch.cuda.mem_get_info()[0]
    assert kept < 1 << 30, f"{kept} bytes: {OTHERS}"
