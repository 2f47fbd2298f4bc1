"""The CPU and MPS: everything happens when it is called."""

import pytest
import torch

from streamloader.device.streamless import Streamless

CPU = Streamless(torch.device("cpu"))
MPS = Streamless(torch.device("mps"))
META = Streamless(torch.device("meta"))  # memory that is not the host's, on every machine


def test_only_the_cpu_is_the_host() -> None:
    assert CPU.host
    assert not MPS.host


def test_streams_and_events_are_nothing() -> None:
    stream = CPU.stream("copy")
    event = CPU.record(CPU.current())
    CPU.wait(stream, event)
    CPU.uses(torch.empty(0), stream)
    with CPU.on(stream), CPU.inherit():
        pass

    assert stream is event is CPU.current() is None
    assert CPU.done(event)
    assert CPU.join(event, lambda: True)


@pytest.mark.parametrize("nbytes", [0, 7])
def test_memory_is_plain_bytes(nbytes: int) -> None:
    for memory, where in [
        (CPU.slab(nbytes), "cpu"),
        (CPU.arena(nbytes), "cpu"),
        (META.slab(nbytes), "cpu"),
        (META.arena(nbytes), "meta"),
    ]:
        assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (nbytes,), where)


def test_memory_is_pinned_where_it_lies_for_nothing() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    for device in (CPU, MPS):
        unpin = device.pin(memory)
        assert unpin() is None


def test_a_copy_is_done_when_it_returns() -> None:
    destination = CPU.arena(3)

    CPU.copy(destination, torch.tensor([1, 2, 3], dtype=torch.uint8))

    assert destination.tolist() == [1, 2, 3]


def test_a_device_holds_its_own_tensors() -> None:
    host, there = torch.empty(1), torch.empty(1, device="meta")

    assert CPU.holds(host)
    assert not CPU.holds(there)
    assert META.holds(there)
    assert not META.holds(host)


# -- draws -------------------------------------------------------------------------------------


def draw() -> float:
    return torch.rand(()).item()


def test_draws_depend_on_the_seed_alone() -> None:
    with CPU.draws(5):
        first = draw()
    draw()
    with CPU.draws(5):
        again = draw()
    with CPU.draws(6):
        other = draw()

    assert first == again != other


def test_draws_do_not_move_the_callers_generator() -> None:
    before = torch.get_rng_state()

    with CPU.draws(5):
        draw()

    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_is_restored_after_an_error_too() -> None:
    before = torch.get_rng_state()

    with pytest.raises(KeyError, match=r"^'x'$"), CPU.draws(5):
        raise KeyError("x" if draw() < 1 else "y")

    assert torch.equal(torch.get_rng_state(), before)


def test_mps_seeds_its_own_generator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator().manual_seed(1)
    state = own.get_state()
    monkeypatch.setattr(torch.mps, "_get_default_mps_generator", lambda: own)

    with MPS.draws(5):
        seeds = own.initial_seed(), torch.initial_seed()

    assert seeds == (5, 5)
    assert torch.equal(own.get_state(), state)
