"""The loader on a real accelerator: what the fake cannot show."""

import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from streamloader import StreamLoader, on
from tests.gpu.sources import MIB, ROWS, busy, listed, nothing_waits, workers

pytestmark = pytest.mark.gpu


def test_labels_may_be_edited_between_forward_and_backward() -> None:
    weight = torch.ones(1, device="cuda", requires_grad=True)
    source = [(torch.ones(4, 8), torch.zeros(4))]
    for images, labels in StreamLoader(source, "cuda"):
        loss = (weight * images).sum()
        labels.add_(1)
        loss.backward()
    assert weight.grad is not None


def test_saving_labels_saves_labels_alone() -> None:
    ((_, labels),) = StreamLoader(listed(1), "cuda")
    file = io.BytesIO()
    torch.save(labels, file)
    assert file.tell() < 4096


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_on_the_training_thread_waits_for_the_device() -> None:
    loader = StreamLoader(workers(40), "cuda", transform=on(0, torch.Tensor.float))
    batches = iter(loader)
    next(batches)
    with nothing_waits():
        for images, _ in batches:
            busy(2)
            images.sum()
    assert loader.stats.epoch.batches == 40


def test_e08_tensors_on_the_device_already_stay_and_are_waited_for() -> None:
    def source() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(20):
            there = torch.zeros(1000, device="cuda")
            busy(5)
            there.fill_(number)
            yield there, torch.full((3,), number)

    addresses = []
    for number, (there, moved) in enumerate(StreamLoader(source(), "cuda")):
        addresses.append(there.data_ptr())
        assert bool((there == number).all())
        assert bool((moved == number).all())
    resident = torch.ones(5, device="cuda")
    ((same,),) = StreamLoader([(resident,)], "cuda")
    assert same is resident


def test_e07_a_packed_sequence_is_moved_by_itself() -> None:
    sequence = pack_sequence([torch.arange(3.0), torch.arange(5.0)], enforce_sorted=False)
    ((moved,),) = StreamLoader([(sequence,)], "cuda")
    assert type(moved) is PackedSequence
    assert moved.data.is_cuda
    assert not moved.batch_sizes.is_cuda
    padded, lengths = pad_packed_sequence(moved)
    assert lengths.tolist() == [3, 5]
    assert padded[:, 1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_e04_sparse_tensors_arrive(layout: torch.layout) -> None:
    dense = torch.eye(4)
    ((moved,),) = StreamLoader([(dense.to_sparse(layout=layout),)], "cuda")
    assert moved.is_cuda
    assert moved.layout == layout
    assert torch.equal(moved.to_dense().cpu(), dense)


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_l01_a_graph_can_be_captured_during_a_pass(mode: Any) -> None:
    static, total = torch.zeros(4, ROWS // 4, device="cuda"), torch.zeros(1, device="cuda")
    total.copy_(static.sum())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for number, (images, _) in enumerate(StreamLoader(workers(60), "cuda")):
        if number == 5:
            with torch.cuda.graph(graph, capture_error_mode=mode):
                total.copy_(static.sum())
        static.copy_(images)
        if number >= 5:
            graph.replay()
            assert float(total) == number * ROWS
    assert number == 59


def test_random_transforms_are_the_same_at_every_depth_and_leave_the_loop_its_own() -> None:
    def noise(images: Tensor) -> Tensor:
        return images.float() + torch.rand(images.shape, device=images.device)

    def run(depth: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        loop, batches = [], []
        source = [torch.zeros(8) for _ in range(12)]
        for batch in StreamLoader(source, "cuda", transform=noise, prefetch_batches=depth, seed=1):
            batches.append(batch)
            loop.append(torch.rand(2, device="cuda"))
        return torch.stack(batches), torch.stack(loop)

    inline, own = run(0)
    assert len(inline.unique()) > 90
    for depth in (1, 2, 5):
        batches, loop = run(depth)
        assert torch.equal(batches, inline)
        assert torch.equal(loop, own)


def test_strides_and_dtypes_arrive() -> None:
    batch = {
        "channels_last": torch.rand(8, 3, 32, 32).to(memory_format=torch.channels_last),
        "transposed": torch.rand(64, 300).T,
        "half": torch.rand(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 5),
    }
    (moved,) = StreamLoader([batch], "cuda")
    for name, tensor in batch.items():
        assert moved[name].is_cuda
        assert moved[name].dtype == tensor.dtype
        assert moved[name].stride() == tensor.stride()
        assert torch.equal(moved[name].cpu(), tensor)


def test_l05_copies_and_transforms_hide_behind_the_step() -> None:
    """Events on the caller's stream: what lies between two steps is next to nothing."""
    source = [torch.zeros(64 * MIB, dtype=torch.uint8) for _ in range(4)] * 5
    marks = []
    for images in StreamLoader(source, "cuda"):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        busy(20)
        images[:8].sum()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    gaps = [a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(marks[4:])]
    step = marks[10][0].elapsed_time(marks[10][1])
    assert sorted(gaps)[len(gaps) // 2] < 0.02 * step


def test_batches_launched_in_the_callers_inference_mode_can_be_trained_on() -> None:
    weight = torch.ones(1, device="cuda", requires_grad=True)
    batches = iter(StreamLoader([torch.ones(4) for _ in range(6)], "cuda"))
    with torch.inference_mode():
        next(batches)
    for images in batches:
        (weight * images).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_a_transform_makes_arrive(layout: torch.layout) -> None:
    def nest(batch: Tensor) -> Tensor:
        return torch.nested.nested_tensor([batch[0], batch[1, :2]], layout=layout)

    for nested in StreamLoader([torch.ones(2, 5) for _ in range(5)], "cuda", transform=nest):
        assert nested.is_nested
        assert float(nested.values().sum()) == 7
