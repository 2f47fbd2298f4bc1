"""Public failure cases that need a GPU, groups E and F: what is in a batch, and where it goes."""

import collections
import types
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from streamloader import StreamLoader, on, tree
from tests.gpu.sources import Rows, fill

pytestmark = pytest.mark.gpu


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
    assert moved["a"].x.tolist() == [3] * 9
    assert moved["x"].tolist() == [1] * 9


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
