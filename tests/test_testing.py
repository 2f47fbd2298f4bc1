"""The fake device does late what a real one does late, and notices what a real one would not."""

import functools
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from streamloader.context import Context
from streamloader.device import Event, Stream
from streamloader.pack import Packer
from streamloader.stages import Pipeline
from streamloader.testing import GARBAGE, FakeDevice


def content(value: int, nbytes: int = 4) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def sent(device: FakeDevice, source: Tensor, stream: Stream) -> tuple[Tensor, Event]:
    """Device memory that `source` is being copied to, and the event of that copy."""
    with device.on(stream):
        arena = device.arena(source.nbytes)
        device.copy(arena, source)
    return arena, device.record(stream)


# -- late work ---------------------------------------------------------------------------------


def test_fresh_memory_is_garbage() -> None:
    device = FakeDevice()

    assert device.slab(3).tolist() == device.arena(3).tolist() == [GARBAGE] * 3


def test_what_nobody_waited_for_has_not_happened() -> None:
    device = FakeDevice()

    arena, _ = sent(device, content(1), device.stream("copy"))

    assert torch.equal(arena, content(GARBAGE))


def test_a_wait_makes_it_happen() -> None:
    device = FakeDevice()
    arena, event = sent(device, content(1), device.stream("copy"))

    device.wait(device.current(), event)

    assert torch.equal(arena, content(1))


def test_a_wait_makes_nothing_later_happen() -> None:
    device = FakeDevice()
    stream = device.stream("copy")
    first, event = sent(device, content(1), stream)
    second, _ = sent(device, content(2), stream)

    device.wait(device.current(), event)

    assert torch.equal(first, content(1))
    assert torch.equal(second, content(GARBAGE))


def test_a_stream_runs_in_order_and_each_piece_of_work_once() -> None:
    device = FakeDevice()
    stream = device.stream("copy")
    ran: list[int] = []
    for number in range(3):
        stream.submit(functools.partial(ran.append, number))
    event = device.record(stream)

    device.wait(device.current(), event)
    device.wait(device.current(), event)

    assert ran == [0, 1, 2]


def test_a_source_written_before_its_copy_ran_sends_the_wrong_bytes() -> None:
    device = FakeDevice()
    slab = device.slab(4).fill_(1)
    arena, event = sent(device, slab, device.stream("copy"))

    slab.fill_(2)
    device.wait(device.current(), event)

    assert torch.equal(arena, content(2))


def test_a_source_written_after_the_host_saw_the_copy_complete_does_no_harm() -> None:
    device = FakeDevice()
    slab = device.slab(4).fill_(1)
    arena, event = sent(device, slab, device.stream("copy"))

    assert device.done(event)
    slab.fill_(2)

    assert torch.equal(arena, content(1))


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_the_host_must_look_so_many_times_at_each_event(looks: int) -> None:
    device = FakeDevice(looks)
    events = [sent(device, content(1), device.stream("copy"))[1] for _ in range(2)]

    for event in events:
        assert [device.done(event) for _ in range(looks + 2)] == [False] * looks + [True] * 2


def test_a_look_makes_nothing_later_happen() -> None:
    device = FakeDevice()
    stream = device.stream("copy")
    first, event = sent(device, content(1), stream)
    second, _ = sent(device, content(2), stream)

    assert device.done(event)

    assert torch.equal(first, content(1))
    assert torch.equal(second, content(GARBAGE))


def test_looking_in_vain_makes_nothing_happen() -> None:
    device = FakeDevice(looks=1)
    arena, event = sent(device, content(1), device.stream("copy"))

    assert not device.done(event)

    assert torch.equal(arena, content(GARBAGE))


def test_the_host_sees_no_event_of_a_held_stream_complete() -> None:
    device = FakeDevice()
    stream = device.stream("copy")
    arena, event = sent(device, content(1), stream)

    stream.held = True
    assert not any(device.done(event) for _ in range(10))
    assert torch.equal(arena, content(GARBAGE))

    stream.held = False
    assert device.done(event)
    assert torch.equal(arena, content(1))


def test_another_stream_is_not_held() -> None:
    device = FakeDevice()
    device.stream("copy").held = True

    assert device.done(device.record(device.current()))


# -- mistakes in the loader's code -------------------------------------------------------------


class NeverWaits(FakeDevice):
    def wait(self, stream: Stream, event: Event) -> None:
        self.log.append(("wait", stream.name, event.stream.name))


@pytest.mark.parametrize("transforms", [[], [lambda batch: batch.clone()]])
def test_a_pipeline_that_forgets_to_wait_gives_out_garbage(transforms: list[Any]) -> None:
    def through(device: FakeDevice) -> Any:
        pipeline = Pipeline(device, transforms)
        pack = Packer(device, lambda nbytes, _: device.slab(nbytes), fresh=True, pinned=False)
        batch = pack(0, content(1), lambda: False)
        assert batch is not None
        pipeline.send(batch)
        pipeline.transform(batch, Context(0, 0, 0, 0, apart=False))
        return pipeline.hand_over(batch, Context(0, 0, 0, 0, apart=False))

    assert torch.equal(through(FakeDevice()), content(1))
    assert torch.equal(through(NeverWaits()), content(GARBAGE))


# -- streams -----------------------------------------------------------------------------------


def test_the_current_stream_is_restored_after_an_error_too() -> None:
    device = FakeDevice()
    before = device.current()

    with pytest.raises(KeyError, match=r"^'x'$"), device.on(device.stream("copy")):
        raise KeyError("x")

    assert device.current() is before


def test_the_current_stream_is_a_threads_own_until_it_is_inherited() -> None:
    device = FakeDevice()
    side = device.stream("side")
    seen: list[str] = []
    with device.on(side):
        inherited = device.inherit()

        def look() -> None:
            seen.append(device.current().name)
            with inherited:
                seen.append(device.current().name)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(10)

    assert seen == ["default", "side"]


# -- memory ------------------------------------------------------------------------------------


def test_a_device_holds_what_lies_in_its_memory() -> None:
    device = FakeDevice()
    arena = device.arena(8)
    on_it = torch.empty(0).set_(arena.untyped_storage(), 1, (1,), (1,))

    assert device.holds(arena)
    assert device.holds(on_it)
    assert device.holds(arena[2:])
    assert not device.holds(arena.clone())
    assert not FakeDevice().holds(arena)


def test_a_tensor_without_one_storage_is_not_held() -> None:
    assert not FakeDevice().holds(torch.eye(2).to_sparse())


@pytest.mark.slow
def test_arenas_are_counted_while_a_tensor_on_them_lives() -> None:
    device = FakeDevice()
    arena = device.arena(8)
    on_it = torch.empty(0).set_(arena.untyped_storage(), 0, (2,), (1,))
    assert device.arenas == 1

    del arena
    gc.collect()
    assert device.arenas == 1
    assert device.holds(on_it)

    del on_it
    gc.collect()
    assert device.arenas == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(3),
        torch.empty(0, 2),
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(3, 1).expand(3, 4),
        torch.tensor([True, False]),
    ],
)
def test_a_tensor_that_is_put_is_on_the_device_at_once(tensor: Tensor) -> None:
    device = FakeDevice()

    placed = device.put(tensor)

    assert device.holds(placed)
    assert torch.equal(placed, tensor)
    assert placed.dtype == tensor.dtype
    assert not device.holds(tensor)


# -- the log -----------------------------------------------------------------------------------


def test_the_log_has_verbs_streams_and_bytes() -> None:
    device = FakeDevice()
    stream = device.stream("copy")
    arena, event = sent(device, device.slab(4), stream)
    device.wait(device.current(), event)
    device.uses(arena[:2], device.current())
    unpin = device.pin(device.slab(8))
    with device.draws(7):
        pass
    assert unpin is not None
    unpin()

    assert device.log == [
        ("stream", "copy"),
        ("slab", 4),
        ("arena", "copy", 4),
        ("copy", "copy", 4),
        ("record", "copy"),
        ("wait", "default", "copy"),
        ("uses", "default", 4),
        ("slab", 8),
        ("pin", 8),
        ("draws", 7),
        ("unpin", 8),
    ]
    assert device.verbs("copy") == [("copy", "copy", 4)]
    assert device.verbs("nothing") == []


def test_draws_are_seeded_and_leave_the_generator_alone() -> None:
    device, before = FakeDevice(), torch.get_rng_state()

    with device.draws(7):
        assert torch.initial_seed() == 7
        torch.rand(1)

    assert torch.equal(torch.get_rng_state(), before)
