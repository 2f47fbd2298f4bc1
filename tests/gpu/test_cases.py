"""Public failure cases that need a GPU: what the fake cannot show of groups A to F."""

import collections
import ctypes
import signal
import subprocess
import sys
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from streamloader import StreamLoader, on, tree
from streamloader.device.accelerator import Accelerator

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
ROWS = 4 * MIB


def busy(milliseconds: float = 4) -> None:
    """Queues work that takes about so long on the current stream."""
    torch.cuda._sleep(int(milliseconds * 1.7e6))


def fill(number: int, nbytes: int = ROWS) -> Tensor:
    return torch.full((nbytes,), number % 251, dtype=torch.uint8)


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


class Foreign:
    """Memory pinned past torch's allocator: scribbled over, and given out again, once dropped."""

    def __init__(self) -> None:
        self.free: list[Any] = []
        self.made: list[Any] = []

    def put(self, tensor: Tensor) -> Tensor:
        buffer = self.free.pop() if self.free else self._make(tensor.nbytes)
        array = np.frombuffer(buffer, dtype=np.uint8)
        weakref.finalize(array, self._back, buffer)
        placed = torch.from_numpy(array).view(tensor.shape)
        del array
        return placed.copy_(tensor)

    def _make(self, nbytes: int) -> Any:
        buffer = (ctypes.c_char * nbytes)()
        status = torch.cuda.cudart().cudaHostRegister(ctypes.addressof(buffer), nbytes, 0)
        assert int(status) == 0
        self.made.append(buffer)
        return buffer

    def _back(self, buffer: Any) -> None:
        ctypes.memset(buffer, 0xFB, len(buffer))
        self.free.append(buffer)

    def close(self) -> None:
        torch.cuda.synchronize()
        for buffer in self.made:
            torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(buffer))


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    torch.cuda.init()
    memory = Foreign()
    yield memory
    memory.close()


def test_a04_foreign_pinned_memory_can_go_wrong(foreign: Foreign) -> None:
    busy(100)
    moved = foreign.put(fill(7)).to("cuda", non_blocking=True)  # dropped before it is sent
    assert int(moved.sum()) == 0xFB * ROWS


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


class Rows(Dataset[Tensor]):
    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return fill(index, self.nbytes)


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
    loader = StreamLoader(plain, "cuda", prefetch_batches=4)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for _ in range(5):
        assert sum(1 for _ in loader) == 1000
    grown = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert slabs == ([] if pinned else [2 * MIB] * 6)
    # Torch's own read-ahead, which is 64 batches here, and what the copies under way hold.
    assert grown <= (8 * 8 + 4 + 4) * 2 * MIB


# -- C -------------------------------------------------------------------------------------------


INTERRUPTED = """
import torch
from torch.utils.data import DataLoader
from streamloader import StreamLoader

class Rows:
    def __len__(self): return 100_000
    def __getitem__(self, index): return torch.zeros(1 << 20)

held = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda")
plain = DataLoader(Rows(), 8, num_workers=4, pin_memory=True)
for number, batch in enumerate(StreamLoader(plain, "cuda", transform=torch.Tensor.half)):
    torch.cuda._sleep(2_000_000)
    batch.sum()
    if number == 5:
        print("now", flush=True)
"""


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
        assert torch.cuda.mem_get_info()[0] < before - (1 << 32)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in err
    assert "Fatal" not in err
    for child in listed.split():
        stat = Path(f"/proc/{child}/stat")
        assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    assert torch.cuda.mem_get_info()[0] > before - (1 << 30)


# -- E -------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Bag(dict[str, Any]):
    def n(self) -> int:
        return len(self["x"])


@dataclass
class Sample:
    x: Tensor
    ids: list[str]
    meta: dict[str, Tensor]


class DeviceOnly:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "DeviceOnly":
        return DeviceOnly(self.x.to(device))


Point = collections.namedtuple("Point", "x y")

STRUCTURES: dict[str, Any] = {
    "e01 typed": Pair(fill(1, 9), fill(2, 9)),
    "e01 untyped": Point(fill(1, 9), fill(2, 9)),
    "e02 dict class": Bag(x=fill(1, 9)),
    "e02 ordered": OrderedDict(b=fill(1, 9), a=fill(2, 9)),
    "e02 default": defaultdict(list, x=fill(1, 9)),
    "e02 user": UserDict(x=fill(1, 9)),
    "e02 proxy": types.MappingProxyType({"x": fill(1, 9)}),
    "e03 dataclass": Sample(fill(1, 9), ["a"], {"k": fill(2, 9)}),
    "e05 others": {"x": fill(1, 9), "name": ["a"], "n": 3, "none": None, "raw": b"..", "fn": len},
    "e10 nested": ([fill(1, 9), fill(2, 9)], {"boxes": [fill(3, 9)], "n": 2}, "id", (fill(4, 9),)),
    "e10 tensor": fill(1, 9),
    "e10 tuple": (fill(1, 9),),
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("batch", STRUCTURES.values(), ids=STRUCTURES)
def test_e01_e02_e03_e05_e10_a_batchs_structure_arrives_on_the_gpu(batch: Any, depth: int) -> None:
    (moved,) = StreamLoader([batch], "cuda", prefetch_batches=depth)
    assert type(moved) is type(batch)
    old, new = tree.leaves(batch), tree.leaves(moved)
    assert len(old) == len(new) > 0
    assert all(tensor.is_cuda for tensor in new)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(new, old, strict=True))
    if isinstance(moved, Sample):
        assert moved.ids == ["a"]
    if isinstance(moved, Bag):
        assert moved.n() == 9
    if isinstance(moved, dict) and "fn" in moved:
        assert {key: moved[key] for key in moved if key != "x"} == {
            key: batch[key] for key in batch if key != "x"
        }


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr], ids=str
)
def test_e04_every_sparse_layout_arrives_beside_dense_tensors(layout: torch.layout) -> None:
    blocks = (2, 2) if layout == torch.sparse_bsr else None
    batch = {"a": torch.eye(4).to_sparse(layout=layout, blocksize=blocks), "x": fill(1, 9)}
    (moved,) = StreamLoader([batch], "cuda")
    assert moved["a"].is_cuda
    assert moved["x"].is_cuda
    assert moved["a"].layout == layout
    assert torch.equal(moved["a"].to_dense().cpu(), torch.eye(4))


def test_e06_an_object_that_takes_only_a_device_is_moved() -> None:
    batch: dict[str, Any] = {"a": DeviceOnly(fill(3, 9)), "x": fill(1, 9)}
    (moved,) = StreamLoader([batch], "cuda")
    assert moved["a"].x.is_cuda
    assert moved["x"].is_cuda


@pytest.mark.multi_gpu
@pytest.mark.parametrize("depth", [0, 2])
def test_e08_a_tensor_on_another_gpu_is_moved(depth: int) -> None:
    batch = {
        "cpu": fill(1, 9),
        "gpu": torch.ones(3, device="cuda:0"),
        "other": torch.full((3,), 2.0, device="cuda:1"),
    }
    torch.cuda.synchronize(1)
    (moved,) = StreamLoader([batch], "cuda:0", prefetch_batches=depth)
    assert moved["gpu"] is batch["gpu"]
    assert {tensor.device.index for tensor in moved.values()} == {0}
    assert moved["other"].tolist() == [2, 2, 2]


# -- F -------------------------------------------------------------------------------------------


def test_f02_with_cuda_in_use_workers_are_forked_and_transforms_run_here() -> None:
    def augment(rows: Tensor) -> Tensor:
        assert rows.is_cuda
        return rows.float() + 1

    torch.ones(1, device="cuda")
    plain = DataLoader(Rows(8, 9), batch_size=2, num_workers=4, multiprocessing_context="fork")
    got = [batch[:, 0].tolist() for batch in StreamLoader(plain, "cuda", transform=augment)]
    assert got == [[1, 2], [3, 4], [5, 6], [7, 8]]


class OnTheGpu(Rows):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index).cuda()


def test_f02_a_dataset_that_uses_cuda_in_a_worker_is_told_where_to_do_it() -> None:
    torch.ones(1, device="cuda")
    plain = DataLoader(OnTheGpu(4, 9), batch_size=2, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="CUDA in forked subprocess") as caught:
        list(StreamLoader(plain, "cuda"))
    told = "".join([*getattr(caught.value, "__notes__", []), str(caught.value)])
    assert "pass it to StreamLoader as transform=..." in told


@pytest.mark.multi_gpu
def test_f04_data_parallel_gets_the_same_from_batches_on_the_first_gpu() -> None:
    torch.manual_seed(0)
    single = nn.Linear(8, 1).to("cuda:0")
    source = [(torch.rand(4, 8), torch.rand(4, 1)) for _ in range(5)]
    source.append((torch.rand(1, 8), torch.rand(1, 1)))  # the last has one sample

    def gradients(model: nn.Module, loader: Any) -> Tensor:
        single.zero_grad()
        for x, y in loader:
            nn.functional.mse_loss(model(x.to("cuda:0")), y.to("cuda:0")).backward()
        assert single.weight.grad is not None
        return single.weight.grad.clone()

    expected = gradients(single, source)
    parallel: nn.DataParallel[nn.Linear] = nn.DataParallel(single, [0, 1])
    torch.testing.assert_close(gradients(parallel, source), expected)  # the plain loader's
    loader = StreamLoader(source, "cuda:0", transform=on(0, torch.Tensor.contiguous))
    torch.testing.assert_close(gradients(parallel, loader), expected)
