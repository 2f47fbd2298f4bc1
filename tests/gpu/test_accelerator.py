"""The seam on a real accelerator."""

import gc
import mmap
import subprocess
import sys

import pytest
import torch

from streamloader.device import Device, resolve
from tests.gpu.sources import MIB, busy

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Device:
    return resolve(torch.device("cuda"))


def test_without_an_index_the_current_device_is_meant(device: Device) -> None:
    assert device.device == torch.device("cuda", torch.cuda.current_device())
    assert not device.host


def test_a_slab_is_pinned_and_of_the_size_asked_for(device: Device) -> None:
    slab = device.slab(3 * MIB + 5)
    assert slab.shape == (3 * MIB + 5,)
    assert slab.dtype == torch.uint8
    assert slab.is_pinned()


def test_slabs_are_unpinned_when_they_die(device: Device) -> None:
    slab = device.slab(MIB)
    address = slab.data_ptr()
    pages = slab.untyped_storage()  # keeps the memory, and not the tensor
    assert torch.empty(0, dtype=torch.uint8).set_(pages, 0, (MIB,), (1,)).is_pinned()
    del slab
    gc.collect()
    assert pages.data_ptr() == address
    assert not torch.empty(0, dtype=torch.uint8).set_(pages, 0, (MIB,), (1,)).is_pinned()


def test_a_copy_from_a_slab_returns_at_once_and_completes_with_its_event(device: Device) -> None:
    slab, stream = device.slab(16 * MIB), device.stream("copy")
    slab.fill_(7)
    with device.on(stream):
        busy(200)
        arena = device.arena(16 * MIB)
        device.copy(arena, slab)
    event = device.record(stream)
    assert not device.done(event)
    assert device.join(event, until=lambda: False)
    assert device.done(event)
    assert bool((arena == 7).all())


def test_memory_is_pinned_where_it_lies_and_a_copy_from_it_does_not_block(device: Device) -> None:
    pages = mmap.mmap(-1, 16 * MIB)
    memory = torch.frombuffer(pages, dtype=torch.uint8).fill_(7)
    assert not memory.is_pinned()
    unpin = device.pin(memory)
    assert unpin is not None
    assert memory.is_pinned()
    with device.on(device.stream("copy")):
        busy(200)
        arena = device.arena(16 * MIB)
        device.copy(arena, memory)
        event = device.record(device.current())
    assert not device.done(event)
    assert device.join(event, until=lambda: False)
    assert bool((arena == 7).all())
    unpin()
    assert not memory.is_pinned()


def test_memory_that_is_pinned_already_cannot_be_pinned_again(device: Device) -> None:
    memory = device.slab(MIB)
    text = r"^pinning 1048576 bytes of host memory failed with CUDA error \d+: free host memory, "
    with pytest.raises(RuntimeError, match=text):
        device.pin(memory)
    assert int(torch.ones(3, device="cuda").sum()) == 3  # no kernel pays for it


def test_join_ends_when_it_is_told_to(device: Device) -> None:
    busy(300)
    event = device.record(device.current())
    looks = iter([False, True])
    assert not device.join(event, until=lambda: next(looks))
    torch.cuda.synchronize()


def test_a_stream_waits_on_the_device_for_an_event(device: Device) -> None:
    first, second = device.stream("first"), device.stream("second")
    value = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with device.on(first):
        busy(100)
        value.fill_(3)
    event = device.record(first)
    device.wait(second, event)
    with device.on(second):
        seen = value.clone()
    torch.cuda.synchronize()
    assert seen.item() == 3


def test_on_makes_the_stream_current_and_restores_the_callers(device: Device) -> None:
    mine, theirs = device.stream("mine"), torch.cuda.Stream()
    with torch.cuda.stream(theirs):
        with device.on(mine):
            assert device.current() == mine
        assert device.current() == theirs


def test_memory_in_use_by_another_stream_is_not_given_out_again(device: Device) -> None:
    maker, reader = device.stream("maker"), device.stream("reader")
    for _ in range(10):
        with device.on(maker):
            victim = device.arena(4 * MIB).fill_(1)
        device.wait(reader, device.record(maker))
        device.uses(victim, reader)
        with device.on(reader):
            busy(5)
            total = victim.sum()
        del victim
        with device.on(maker):
            device.arena(4 * MIB).fill_(0)
        torch.cuda.synchronize()
        assert total.item() == 4 * MIB


def test_draws_seeds_both_generators_and_restores_them(device: Device) -> None:
    torch.manual_seed(5)
    before = (torch.get_rng_state(), torch.cuda.get_rng_state())
    with device.draws(9):
        first = (torch.rand(4), torch.rand(4, device="cuda"))
    with device.draws(9):
        second = (torch.rand(4), torch.rand(4, device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    after = (torch.get_rng_state(), torch.cuda.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


CONTEXTS = """
import ctypes, torch
from torch.utils.data import DataLoader, TensorDataset
from streamloader import StreamLoader, on
data = TensorDataset(torch.arange(64.0).repeat(8, 1).T.contiguous(), torch.arange(64))
loader = DataLoader(data, batch_size=8, num_workers=2)  # one that pins makes a context by itself
for source in (loader, list(loader)):
    for x, y in StreamLoader(source, "cuda:1", transform=on(0, lambda x: x + torch.rand_like(x))):
        assert x.device.index == y.device.index == 1
cuda = ctypes.CDLL("libcuda.so.1")
flags, active = ctypes.c_uint(), ctypes.c_int()
cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
print("active on 0:", bool(active.value))
"""


@pytest.mark.multi_gpu
def test_f01_a_loader_for_the_second_device_makes_no_context_on_the_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONTEXTS], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "active on 0: False"
