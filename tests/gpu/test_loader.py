"""The loader on a real accelerator: what the fake cannot show."""

import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

from streamloader import StreamLoader, on
from streamloader.device.accelerator import Accelerator

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ROWS = 2 * MIB  # bytes of an image batch in most tests


def busy(milliseconds: float = 20) -> None:
    """Queues work that takes about so long on the current stream."""
    torch.cuda._sleep(int(milliseconds * 1.7e6))


def fill(number: int, nbytes: int = ROWS) -> tuple[Tensor, Tensor]:
    """Images and labels that all hold the batch's number."""
    return torch.full((4, nbytes // 4), number % 251, dtype=torch.uint8), torch.full((4,), number)


def listed(count: int) -> list[tuple[Tensor, Tensor]]:
    return [fill(number) for number in range(count)]


def one_buffer(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A source that fills the same memory for every batch."""
    images, labels = fill(0)
    for number in range(count):
        images.fill_(number % 251)
        labels.fill_(number)
        yield images, labels


def one_pinned_buffer(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = (tensor.pin_memory() for tensor in fill(0))
    for number in range(count):
        images.fill_(number % 251)
        labels.fill_(number)
        yield images, labels


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int, nbytes: int = ROWS // 4) -> None:
        self.count, self.nbytes = count, nbytes

    def __len__(self) -> int:
        return 4 * self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = index // 4
        image = torch.full((self.nbytes,), number % 251, dtype=torch.uint8)
        return image, torch.tensor(number)


def workers(count: int, *, pin_memory: bool = False) -> DataLoader[Any]:
    return DataLoader(Numbers(count), batch_size=4, num_workers=2, pin_memory=pin_memory)


SOURCES: dict[str, Callable[[int], Any]] = {
    "a list": listed,
    "one buffer": one_buffer,
    "one pinned buffer": one_pinned_buffer,
    "workers": workers,
    "pinned by the loader": lambda count: workers(count, pin_memory=True),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a01_every_batch_is_right_however_late_the_step_reads_it(
    source: Callable[[int], Any], depth: int
) -> None:
    sums, labels = [], []
    loader = StreamLoader(source(40), "cuda", prefetch_batches=depth)
    for images, label in loader:
        busy(4)
        sums.append(images.sum())
        labels.append(label)
        del images
        torch.full((ROWS,), 255, dtype=torch.uint8, device="cuda")  # reuses what can be reused
    numbers = list(range(40))
    assert [int(total) for total in sums] == [number * ROWS for number in numbers]
    assert [label.tolist() for label in labels] == [[number] * 4 for number in numbers]


def test_a06_no_foreign_value_appears_in_what_a_transform_makes() -> None:
    def double(images: Tensor) -> Tensor:
        halves = images.float()
        del images
        return halves * 2

    for number, (images, _) in enumerate(
        StreamLoader(listed(40), "cuda", transform=[on(0, double), on(0, torch.Tensor.half)])
    ):
        busy(4)
        copied = images * 1
        del images
        torch.full_like(copied, torch.nan)
        assert bool((copied == 2 * number).all())


def test_a03_kept_batches_stay_as_they_were() -> None:
    kept = list(StreamLoader(listed(30), "cuda"))
    assert [int(images[0, 0]) for images, _ in kept] == list(range(30))


@pytest.mark.parametrize("every", [1, 2])
def test_a05_batches_are_ready_for_the_stream_that_is_current(every: int) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    sums = []
    batches = iter(StreamLoader(listed(40), "cuda"))
    for number in range(40):
        with torch.cuda.stream(streams[number // every % 2]):
            images, _ = next(batches)
            busy(3)
            sums.append(images.sum())
            del images
    torch.cuda.synchronize()
    assert [int(total) for total in sums] == [number * ROWS for number in range(40)]


def test_every_label_kept_keeps_no_images() -> None:
    labels = []
    torch.cuda.synchronize()
    before = 0
    for number, (_, label) in enumerate(StreamLoader(workers(1000), "cuda")):
        labels.append(label)
        if number == 20:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() - before < MIB
    assert [int(label[0]) for label in labels] == list(range(1000))


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


def allocations() -> int:
    """How often the driver was asked for device memory."""
    return int(torch.cuda.memory_stats()["num_device_alloc"])


def test_after_warm_up_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs: list[int] = []
    make = Accelerator.slab

    def noted(self: Accelerator, nbytes: int) -> Tensor:
        slabs.append(nbytes)
        return make(self, nbytes)

    monkeypatch.setattr(Accelerator, "slab", noted)
    before = 0
    loader = StreamLoader(listed(30), "cuda", transform=on(0, torch.Tensor.float))
    for epoch in range(4):
        for images, _ in loader:
            busy(2)
            images.sum()
        if epoch == 0:
            before = allocations()
    assert allocations() == before
    assert len(slabs) <= 4
    assert set(slabs) == {ROWS + 64}


def test_sizes_that_vary_find_freed_blocks() -> None:
    sizes = torch.randint(MIB, 4 * MIB, (300,), generator=torch.Generator().manual_seed(0))
    source = [torch.full((int(size),), i % 251, dtype=torch.uint8) for i, size in enumerate(sizes)]
    before, sums = 0, []
    for number, images in enumerate(StreamLoader(source, "cuda")):
        busy(1)
        sums.append(images.sum())
        if number == 100:
            before = allocations()
    assert allocations() - before <= 4
    assert [int(s) for s in sums] == [i % 251 * int(size) for i, size in enumerate(sizes)]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_on_the_training_thread_waits_for_the_device() -> None:
    loader = StreamLoader(workers(40), "cuda", transform=on(0, torch.Tensor.float))
    batches = iter(loader)
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for images, _ in batches:
            busy(2)
            images.sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loader.stats.epoch.batches == 40


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_b02_memory_is_bounded_however_far_python_runs(depth: int) -> None:
    size = 16 * MIB
    source = [torch.full((size,), n, dtype=torch.uint8) for n in range(8)] * 10
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for images in StreamLoader(source, "cuda", prefetch_batches=depth):
        busy(10)
        images.max()
        del images
    assert torch.cuda.max_memory_allocated() - before <= (depth + 2) * size + MIB


def test_b01_reserved_memory_is_flat_over_epochs() -> None:
    loader = StreamLoader(listed(10), "cuda", transform=on(0, torch.Tensor.float))
    reserved = []
    for _ in range(40):
        for images, _ in loader:
            images.sum()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[39] == reserved[2]


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


def test_objects_that_a_transform_makes_are_as_safe_as_tensors() -> None:
    def packed(batch: Tensor) -> PackedSequence:
        return pack_sequence(list(batch.float()))

    sums = []
    source = [torch.full((4, 100_000), n) for n in range(40)]
    for sequence in StreamLoader(source, "cuda", transform=packed):
        busy(4)
        sums.append(sequence.data.sum())
        del sequence
        torch.full((400_000,), torch.nan, device="cuda")
    assert [float(total) for total in sums] == [n * 400_000.0 for n in range(40)]


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


def test_memory_is_bounded_over_many_short_passes_too() -> None:
    size = 16 * MIB
    loader = StreamLoader([torch.ones(size, dtype=torch.uint8)], "cuda", prefetch_batches=2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(40):
        for images in loader:
            busy(10)
            images.max()
            del images
    assert torch.cuda.max_memory_allocated() - before <= 4 * size + MIB


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


def test_objects_of_any_kind_are_as_safe_as_tensors() -> None:
    class Thing:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    sums = []
    source = [torch.full((4, 100_000), n) for n in range(40)]
    for thing in StreamLoader(source, "cuda", transform=lambda batch: Thing(batch.float() * 1)):
        busy(4)
        sums.append(thing.value.sum())  # type: ignore[attr-defined]  # the transform's
        del thing
        torch.full((400_000,), torch.nan, device="cuda")
    assert [float(total) for total in sums] == [n * 400_000.0 for n in range(40)]
