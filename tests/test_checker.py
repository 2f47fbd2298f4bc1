"""What may race is reported, with both places; what is ordered is not."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from streamloader import Stage, StreamLoader, pack
from streamloader.checker import CheckedDevice
from streamloader.device import Event, Stream
from tests.scenarios import COUNT, NBYTES, double, floats, run, settle, step

WAIT = 10.0
HERE = r"tests/test_checker\.py:\d+ in "


CONTENT = torch.zeros(4, dtype=torch.uint8)  # kept: the host may drop it only after its copy


def sent(device: CheckedDevice, source: Tensor, stream: Stream) -> tuple[Tensor, Event]:
    """Device memory that `source` is being copied to, and the event of that copy."""
    with device.on(stream):
        arena = device.arena(source.nbytes)
        device.copy(arena, source)
    return arena, device.record(stream)


def reads(device: CheckedDevice, tensor: Tensor, stream: Stream | None = None) -> None:
    with device.on(stream or device.current()):
        tensor.sum()


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="other", daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()


def found(device: CheckedDevice, *patterns: str) -> None:
    """Exactly these were reported."""
    assert len(device.reports) == len(patterns), device.reports
    for report, pattern in zip(device.reports, patterns, strict=True):
        assert re.search(f"^{pattern}$", report), report


# -- events --------------------------------------------------------------------------------------


def test_a_read_that_waits_for_nothing_is_reported_with_both_places() -> None:
    device = CheckedDevice()
    arena, _ = sent(device, CONTENT, device.stream("copy"))

    reads(device, arena)

    found(
        device,
        rf"read by stream 'default' at {HERE}reads: nothing orders it after "
        rf"written by stream 'copy' at {HERE}sent",
    )
    with pytest.raises(AssertionError, match=r"^read by stream 'default' at .* in sent$"):
        device.verify()


def test_a_read_that_waits_is_not() -> None:
    device = CheckedDevice()
    arena, event = sent(device, CONTENT, device.stream("copy"))

    device.wait(device.current(), event)
    device.uses(arena, device.current())
    reads(device, arena)

    del arena
    device.verify()


def test_a_wait_orders_nothing_that_was_submitted_after_its_event() -> None:
    device = CheckedDevice()
    copy = device.stream("copy")
    _, event = sent(device, CONTENT, copy)
    late, _ = sent(device, CONTENT, copy)

    device.wait(device.current(), event)
    reads(device, late)

    found(device, r"read by stream 'default' .* after written by stream 'copy' .*")


def test_an_edge_reaches_on_through_others() -> None:
    device = CheckedDevice()
    first, second, third = (device.stream(name) for name in "abc")
    arena, event = sent(device, CONTENT, first)
    device.wait(second, event)
    device.wait(third, device.record(second))

    device.uses(arena, third)
    reads(device, arena, third)

    device.verify()


def test_what_the_host_has_seen_complete_is_over_for_all_it_launches_then() -> None:
    device = CheckedDevice(looks=1)
    arena, event = sent(device, CONTENT, device.stream("copy"))

    assert not device.done(event)
    assert device.done(event)
    reads(device, arena)

    device.uses(arena, device.current())
    device.verify()


def test_two_reads_are_no_conflict_and_a_write_after_them_must_wait_for_both() -> None:
    device = CheckedDevice()
    tensor = device.put(torch.ones(4))
    ready = device.record(device.current())
    sides = [device.stream("left"), device.stream("right")]
    for side in sides:
        device.wait(side, ready)
        device.uses(tensor, side)
        reads(device, tensor, side)
    device.wait(device.current(), device.record(sides[0]))

    with device.on(device.current()):
        tensor.zero_()

    found(device, r"written by stream 'default' .* after read by stream 'right' .*")


def test_an_event_that_was_not_recorded_is_reported() -> None:
    device = CheckedDevice(skip=lambda verb, _: verb == "record")
    event = device.record(device.current())

    device.wait(device.current(), event)
    assert device.done(event)

    place = rf"waited for at {HERE}test_an_event_that_was_not_recorded_is_reported"
    found(device, place + ": an event .*never recorded", place + ": an event .*never recorded")


# -- memory that is given back -------------------------------------------------------------------


def test_memory_that_another_stream_reads_is_given_back_too_early() -> None:
    device = CheckedDevice()
    arena, event = sent(device, CONTENT, device.stream("copy"))
    device.wait(device.current(), event)
    reads(device, arena)

    del arena

    found(
        device,
        rf"given back too early: 4 bytes, made at {HERE}sent, may be in use: "
        rf"read by stream 'default' at {HERE}reads",
    )


def test_memory_is_not_too_early_once_its_stream_waits_for_the_reader() -> None:
    device = CheckedDevice()
    copy = device.stream("copy")
    arena, event = sent(device, CONTENT, copy)
    device.wait(device.current(), event)
    reads(device, arena)
    device.wait(copy, device.record(device.current()))

    del arena

    device.verify()


@pytest.mark.parametrize("verb", ["done", "join"])
def test_pinned_memory_is_the_hosts_to_give_back(verb: str) -> None:
    def through(*, seen: bool) -> CheckedDevice:
        device = CheckedDevice(looks=2)
        slab = device.slab(4)
        _, event = sent(device, slab, device.stream("copy"))
        if seen:
            while not (device.done(event) if verb == "done" else device.join(event, lambda: False)):
                pass
        del slab
        return device

    through(seen=True).verify()
    found(through(seen=False), r"given back too early: 4 bytes, .* read by stream 'copy' .*")


def test_waiting_in_vain_orders_nothing() -> None:
    device = CheckedDevice(looks=2)
    slab = device.slab(4)
    _, event = sent(device, slab, device.stream("copy"))

    assert not device.join(event, lambda: True)
    slab.data_ptr()

    found(device, r"written by thread 'MainThread' .* after read by stream 'copy' .*")


# -- kernels -------------------------------------------------------------------------------------


def kernel(run_it: Callable[[Tensor], Any], *, writes: bool) -> None:
    """Whether a kernel on memory that another stream reads, or writes, conflicts with it."""
    for other in (torch.sum, Tensor.zero_):
        device = CheckedDevice()
        tensor = device.put(torch.ones(4))
        side = device.stream("side")
        device.wait(side, device.record(device.current()))
        device.uses(tensor, side)
        with device.on(side):
            other(tensor)
        with device.on(device.current()):
            run_it(tensor)
        conflict = writes or other is not torch.sum
        assert bool(device.reports) == conflict, (other, device.reports)


@pytest.mark.parametrize(
    "run_it",
    [
        lambda tensor: tensor + 1,
        lambda tensor: torch.cat([torch.ones(1), tensor]),
        lambda tensor: tensor[1:].clone(),
        lambda tensor: tensor.sum().item(),
        lambda tensor: torch.add(tensor, 1, out=torch.empty(4)),
    ],
)
def test_a_kernel_that_reads_conflicts_with_writes(run_it: Any) -> None:
    kernel(run_it, writes=False)


@pytest.mark.parametrize(
    "run_it",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor[1:].add_(1),
        lambda tensor: torch.add(torch.ones(4), 1, out=tensor),
        lambda tensor: torch._foreach_add_([tensor], 1),
        lambda tensor: tensor.copy_(torch.ones(4)),
    ],
)
def test_a_kernel_that_writes_conflicts_with_reads_too(run_it: Any) -> None:
    kernel(run_it, writes=True)


@pytest.mark.parametrize(
    "run_it",
    [
        lambda tensor: tensor[1:],
        lambda tensor: tensor.view(2, 2).detach(),
        lambda tensor: torch.empty_like(tensor, dtype=torch.uint8),
        lambda tensor: tensor.is_pinned(),
        lambda tensor: torch.empty(0).set_(tensor.untyped_storage(), 0, (2,), (1,)),
        lambda tensor: torch.eye(len(tensor)).to_sparse(),
    ],
)
def test_what_touches_no_element_conflicts_with_nothing(run_it: Any) -> None:
    device = CheckedDevice()
    tensor = device.put(torch.ones(4))
    with device.on(device.stream("side")):
        run_it(tensor)
    device.verify()


def test_a_number_that_the_host_gets_has_been_waited_for() -> None:
    device = CheckedDevice(cost=lambda *_: 1.0)
    side = device.stream("side")
    with device.on(side):
        tensor = device.put(torch.ones(4))
        assert float(tensor.sum()) == 4

    reads(device, tensor)

    assert device.time == 3
    device.uses(tensor, device.current())
    device.verify()


def test_memory_of_no_known_origin_is_the_devices_once_it_is_used_with_the_devices() -> None:
    device = CheckedDevice()
    weight, side = torch.ones(4), device.stream("side")
    with device.on(device.current()):
        weight.add_(1)
    with device.on(side):
        device.put(torch.ones(4)).mul_(weight)

    found(device, r"read by stream 'side' .* after written by stream 'default' .*")


def test_memory_that_stays_on_the_host_is_ordered_by_its_thread() -> None:
    device = CheckedDevice()
    plan = torch.ones(4)
    for name in "ab":
        with device.on(device.stream(name)):
            plan.add_(1)
    device.verify()


def test_kernels_are_seen_once_however_often_on_is_entered() -> None:
    device = CheckedDevice(cost=lambda *_: 1.0)
    tensor = device.put(torch.ones(4))
    with device.on(device.current()), device.on(device.current()):
        tensor.add_(1)
    assert device.finished(device.current()) == 2


# -- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_threads_are_ordered_by_the_devices_condition(*, ordered: bool) -> None:
    device = CheckedDevice()
    slab, condition = device.slab(4), device.condition()

    def write() -> None:
        slab.data_ptr()
        with condition:
            condition.notify_all()

    if ordered:
        with condition:
            thread = threading.Thread(target=write, name="other", daemon=True)
            thread.start()
            assert condition.wait(WAIT)
        thread.join(WAIT)
    else:
        in_thread(write)
    slab.data_ptr()

    if ordered:
        device.verify()
    else:
        found(device, r"written by thread 'MainThread' .* after written by thread 'other' .*")


@pytest.mark.parametrize("inherits", [True, False])
def test_a_thread_that_inherits_knows_what_its_maker_did(*, inherits: bool) -> None:
    device = CheckedDevice()
    slab = device.slab(4)
    slab.data_ptr()
    state = device.inherit()

    def write() -> None:
        if inherits:
            with state:
                slab.data_ptr()
        else:
            slab.data_ptr()

    in_thread(write)

    assert bool(device.reports) != inherits


def test_what_a_forked_process_does_concerns_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CheckedDevice()
    arena, _ = sent(device, CONTENT, device.stream("copy"))
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)

    reads(device, arena)
    del arena

    device.verify()


# -- NOTE [Memory rules] -------------------------------------------------------------------------
# Rules 1 to 3 are proved call by call, in test_mutations.py.


def test_rule_2_a_batch_that_the_caller_reads_on_a_stream_of_its_own_is_its_own_to_record() -> None:
    device = CheckedDevice()
    side = device.stream("side")
    with device.on(device.current()):
        batch = next(iter(StreamLoader(floats(), device)))
        device.wait(side, device.record(device.current()))
        reads(device, batch, side)
        del batch

    found(device, r"given back too early: 64 bytes, .* read by stream 'side' .*")


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_rule_3_a_caller_that_only_launches_has_so_many_batches_on_the_device(depth: int) -> None:
    def most(legs: tuple[Any, ...]) -> int:
        device = CheckedDevice(cost=lambda stream, _: float(stream == "default"))
        total = device.put(torch.zeros(NBYTES // 4))
        with device.on(device.current()):
            loader = StreamLoader(floats(20), device, transform=legs, prefetch_batches=depth)
            for batch in loader:
                step(total, batch)
                settle(device)
            assert device.time >= 20 - 1 - depth
        device.verify()
        return device.peak - NBYTES

    assert most(()) == (depth + 1) * NBYTES
    assert most((double,)) <= (depth + 2) * 2 * NBYTES


def test_rule_4_a_loader_has_its_streams_for_life() -> None:
    device = CheckedDevice()
    loader = StreamLoader(floats(), device, transform=[double, double])
    for _ in range(3):
        run(device, loader)
    assert sorted(device.verbs("stream")) == [("stream", n) for n in ("copy", "stage 0", "stage 1")]
    device.verify()


class Refilled(list[Tensor]):
    """A source that yields the same buffer again, though it says that its batches are pinned."""

    pin_memory = True

    def __iter__(self) -> Iterator[Tensor]:
        buffer = torch.zeros(1 << 14, dtype=torch.uint8)
        for number in range(COUNT):
            yield buffer.fill_(number)


@pytest.mark.parametrize("fresh", [True, False])
def test_rule_5_a_buffer_that_is_sent_from_where_it_lies_must_not_be_refilled(
    *, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(pack, "fresh", lambda *_: fresh)
    device = CheckedDevice(looks=20)
    with device.on(device.current()):
        for _ in StreamLoader(Refilled(), device):
            pass

    if fresh:
        assert re.search(
            rf"written by thread '[^']*' at {HERE}__iter__: nothing orders it after read by "
            rf"stream 'copy' at streamloader/stages\.py:\d+ in _sent",
            "\n".join(device.reports),
        )
    else:
        device.verify()


def taught(
    device: CheckedDevice,
    teacher: list[Tensor],
    after: Callable[[Tensor], None],
    *,
    after_step: bool = False,
) -> None:
    """A loop with a transform that reads `teacher[0]`; `after` is called with each batch but one.

    By then the transforms of two batches more are under way, unless they wait for the step.
    """

    def teach(batch: Tensor) -> Tensor:
        return batch * teacher[0]

    with device.on(device.current()):
        stage = Stage(teach, after_step=after_step)
        loader = StreamLoader(floats(), device, transform=[double, stage], prefetch_batches=4)
        for number, batch in enumerate(loader):
            if number:
                after(batch)
            settle(device)


TEACH = rf"read by stream 'stage 1' at {HERE}teach"


def test_rule_6_a_transform_may_read_a_weight_that_nobody_writes() -> None:
    device = CheckedDevice(looks=20)
    teacher = [torch.ones(NBYTES // 4)]
    taught(device, teacher, lambda _: None)
    device.verify()


@pytest.mark.parametrize("after_step", [False, True])
def test_rule_6_a_weight_that_the_step_updates_while_a_transform_reads_it_is_reported(
    *, after_step: bool
) -> None:
    device = CheckedDevice(looks=20)
    teacher = [torch.ones(NBYTES // 4)]

    def update(batch: Tensor) -> None:
        teacher[0].add_(batch)

    taught(device, teacher, update, after_step=after_step)

    if after_step:  # then nothing of the kind happens
        device.verify()
        return
    pattern = rf"^written by stream 'default' at {HERE}update: nothing orders it after {TEACH}$"
    assert re.search(pattern, "\n".join(device.reports), re.MULTILINE)


@pytest.mark.parametrize("after_step", [False, True])
def test_rule_6_a_weight_that_is_replaced_while_a_transform_reads_it_is_reported(
    *, after_step: bool
) -> None:
    device = CheckedDevice(looks=20)
    teacher = [device.put(torch.ones(NBYTES // 4))]

    def replace(batch: Tensor) -> None:
        teacher[0] = batch.clone()

    taught(device, teacher, replace, after_step=after_step)

    if after_step:
        device.verify()
        return
    pattern = rf"^given back too early: 64 bytes, made at {HERE}\w+, may be in use: {TEACH}$"
    assert re.search(pattern, "\n".join(device.reports), re.MULTILINE)


@pytest.mark.parametrize("passes", [1, 2])
def test_rule_6_a_transform_reads_what_the_caller_wrote_before_the_pass(passes: int) -> None:
    device = CheckedDevice(looks=20)
    encoder = device.put(torch.ones(NBYTES // 4))

    def encode(batch: Tensor) -> Tensor:
        return batch * encoder

    with device.on(device.current()):
        loader = StreamLoader(floats(), device, transform=encode)
        for _ in range(passes):
            encoder.add_(1)  # by a kernel on the caller's stream
            for _ in loader:
                pass
    device.verify()


def test_rule_5_a_buffer_on_the_device_must_not_be_refilled_and_is_reported() -> None:
    device = CheckedDevice(looks=20)

    def source() -> Iterator[Tensor]:
        buffer = device.put(torch.zeros(4))
        for number in range(COUNT):
            yield buffer.fill_(number)

    with device.on(device.current()):
        for _ in StreamLoader(source(), device, transform=double):
            pass
    with pytest.raises(AssertionError, match=r"(?m) in source$"):
        device.verify()


class Threads(list[tuple[Any, ...]]):
    """A log that notes what is logged by which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.by_thread: dict[int, set[str]] = {}

    def append(self, entry: tuple[Any, ...]) -> None:
        super().append(entry)
        self.by_thread.setdefault(threading.get_ident(), set()).add(entry[0])


def test_rule_7_the_loader_thread_does_nothing_on_the_device_but_record_what_a_source_made() -> (
    None
):
    def source() -> Iterator[Any]:
        for batch in floats():
            yield batch, made

    device = CheckedDevice(looks=2)
    made = device.put(torch.ones(4))
    log = device.log = Threads()
    with device.on(device.current()):
        for _ in StreamLoader(source(), device, transform=lambda batch: batch):
            pass
    device.verify()
    mine = log.by_thread.pop(threading.get_ident())
    assert {"arena", "copy", "slab", "stream", "uses", "wait"} <= mine
    assert set().union(*log.by_thread.values()) == {"record"}


def test_rule_8_without_look_ahead_there_are_no_streams_and_no_events() -> None:
    device = CheckedDevice()
    before = threading.active_count()
    with device.on(device.current()):
        for batch in StreamLoader(floats(), device, transform=double, prefetch_batches=0):
            assert threading.active_count() == before
            batch.add_(1)
    device.verify()
    assert {entry[0] for entry in device.log} == {"draws"}


# -- virtual time --------------------------------------------------------------------------------


def test_a_wait_takes_the_maximum_and_streams_overlap() -> None:
    device = CheckedDevice(cost=lambda stream, _: {"copy": 2.0, "side": 5.0}.get(stream, 1.0))
    copy, side = device.stream("copy"), device.stream("side")
    arena, event = sent(device, CONTENT, copy)
    with device.on(side):
        device.put(CONTENT)
    device.wait(device.current(), event)
    reads(device, arena)

    assert device.finished(copy) == 2
    assert device.finished(side) == 5
    assert device.finished(device.current()) == 3
    assert device.time == 0


def test_an_event_is_not_done_before_its_time_and_joining_it_takes_that_long() -> None:
    device = CheckedDevice(cost=lambda *_: 2.0)
    _, event = sent(device, CONTENT, device.stream("copy"))

    assert not device.done(event)
    assert device.time == 0
    assert device.join(event, lambda: False)
    assert device.time == 2


def test_a_device_starts_no_sooner_than_the_host_launches() -> None:
    device = CheckedDevice(cost=lambda *_: 1.0)
    device.advance(5)
    device.put(CONTENT)
    assert device.finished(device.current()) == 6


def test_peak_counts_memory_until_the_streams_that_were_recorded_on_it_have_read_it() -> None:
    def of(*, late: bool) -> int:
        device = CheckedDevice(cost=lambda stream, _: float(stream == "default"))
        for _ in range(3):
            arena, event = sent(device, CONTENT, device.stream("copy"))
            device.wait(device.current(), event)
            device.uses(arena, device.current())
            with device.on(device.current()):
                arena.zero_()
            del arena
            if not late:
                assert device.join(device.record(device.current()), lambda: False)
        device.verify()
        return device.peak

    assert of(late=True) == 12
    assert of(late=False) == 4


LEGS = ("source", "copy", "stage 0", "default")


def ends(costs: dict[str, float], depth: int) -> list[float]:
    """When each step of a loop ends, given what each leg of a batch takes."""
    device = CheckedDevice(cost=lambda stream, _: costs.get(stream, 0.0))

    def source() -> Iterator[Tensor]:
        for batch in floats(14):
            device.advance(costs["source"])
            yield batch

    total, found = device.put(torch.zeros(NBYTES // 4)), []
    with device.on(device.current()):
        for batch in StreamLoader(source(), device, transform=double, prefetch_batches=depth):
            step(total, batch)
            found.append(device.finished(device.current()))
            settle(device)
    device.verify()
    return found


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("seconds", list(itertools.permutations([1.0, 2.0, 3.0, 4.0])))
def test_a_steady_step_costs_the_longest_leg(seconds: tuple[float, ...], depth: int) -> None:
    times = ends(dict(zip(LEGS, seconds, strict=True)), depth)[4:]
    assert {after - before for before, after in itertools.pairwise(times)} == {4.0}


def test_with_one_batch_ahead_copy_and_transform_have_one_step_to_hide_behind() -> None:
    times = ends(dict(zip(LEGS, (1.0, 3.0, 3.0, 4.0), strict=True)), 1)[4:]
    assert (times[-1] - times[0]) / (len(times) - 1) > 4


def test_without_look_ahead_a_step_costs_the_sum() -> None:
    device = CheckedDevice(cost=lambda *_: 1.0)
    total = device.put(torch.zeros(NBYTES // 4))
    with device.on(device.current()):
        before = device.finished(device.current())
        for batch in StreamLoader([device.put(b) for b in floats(4)], device, prefetch_batches=0):
            step(total, double(batch))
    assert device.finished(device.current()) - before == 4 * 3
    device.verify()
