"""Ways of using the loader that put one of its rules to the test, each for a checked device.

A scenario makes its device by `make`, which adds what the test wants to leave out, and returns it;
what the device reports, and what the scenario asserts, is the test's to judge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from streamloader import Planned, Stage, StreamLoader
from streamloader.checker import CheckedDevice
from streamloader.context import Context

__all__ = [
    "COUNT",
    "LATE",
    "NBYTES",
    "SCENARIOS",
    "Make",
    "Skip",
    "double",
    "floats",
    "run",
    "settle",
    "step",
]

Skip = Callable[[str, FrameType], bool]
Make = Callable[..., CheckedDevice]
Scenario = Callable[[Make], CheckedDevice]

COUNT = 8
NBYTES = 64
LATE = 20
"""Looks at an event: so late does the host learn of it, or an ask would tell it of all before."""
AT_ONCE = (2 + 1) * NBYTES
"""Batches of this size alive on the device at one time, if two are prefetched: rule 3, exactly."""


def floats(count: int = COUNT) -> list[Tensor]:
    """Batches of NBYTES bytes each, full of their numbers."""
    return [torch.full((NBYTES // 4,), float(number)) for number in range(count)]


def double(batch: Tensor) -> Tensor:
    return batch * 2


def settle(device: CheckedDevice) -> None:
    """Waits until nothing in the loader thread goes on, so that virtual time depends on nothing."""
    deadline = time.monotonic() + 10
    while not device.settled and time.monotonic() < deadline:
        time.sleep(1e-4)
    assert device.settled


def step(total: Tensor, batch: Tensor) -> None:
    """One kernel on the current stream that reads the batch."""
    total.add_(batch)


def run(device: CheckedDevice, loader: Any) -> None:
    """A loop that keeps nothing."""
    total = device.put(torch.zeros(NBYTES // 4))
    with device.on(device.current()):
        for batch in loader:
            step(total, batch)


def prepared(make: Make) -> CheckedDevice:
    """A transform reads what the caller wrote right before the pass."""
    device = make(looks=LATE)
    weight = device.put(torch.ones(NBYTES // 4))
    run(device, StreamLoader(floats(), device, transform=lambda batch: batch * weight))
    return device


# -- the scenarios -------------------------------------------------------------------------------


def dropped(make: Make) -> CheckedDevice:
    """Each batch is dropped while the step that reads it may still run."""
    device = make(looks=LATE)
    run(device, StreamLoader(floats(), device))
    return device


def transformed(make: Make) -> CheckedDevice:
    """Two transforms; what they make is dropped as soon as the next has been told to read it."""
    device = make(looks=LATE)
    run(device, StreamLoader(floats(), device, transform=[double, double]))
    return device


class Late(Planned):
    """Adds a table that is planned when its input is known, and drops it."""

    def plan(self, batch: Tensor, _: Context) -> Tensor:
        return torch.ones(batch.shape)

    def run(self, batch: Tensor, table: Tensor) -> Tensor:
        return batch + table


def planned(make: Make) -> CheckedDevice:
    """The second transform plans, so its table is sent on its own."""
    device = make(looks=LATE)
    run(device, StreamLoader(floats(), device, transform=[double, Late()]))
    return device


def split(batch: Tensor) -> dict[str, list[Tensor]]:
    """Another structure, of a view and of what is longer."""
    return {"parts": [batch[1:], torch.cat([batch, batch])]}


def joined(batch: dict[str, list[Tensor]]) -> Tensor:
    """The first shape again."""
    return batch["parts"][1][: NBYTES // 4] + batch["parts"][0].sum()


def restructured(make: Make) -> CheckedDevice:
    """Four transforms; what lies between them has other shapes and another structure."""
    device = make(looks=LATE)
    run(device, StreamLoader(floats(), device, transform=[double, split, joined, double]))
    return device


def taught(make: Make) -> CheckedDevice:
    """A transform reads what each step writes, and another one reads what it has made."""
    device = make(looks=LATE)
    teacher = device.put(torch.ones(NBYTES // 4))
    teach = Stage(lambda batch: batch * teacher, after_step=True)
    with device.on(device.current()):
        for batch in StreamLoader(floats(), device, transform=[double, teach, Late()]):
            teacher.add_(batch)
    return device


def trained(make: Make) -> CheckedDevice:
    """The same of an object that moves itself, and each step runs on another stream.

    It waits for the step before, where the batch before was taken.
    """
    device = make(looks=LATE)
    streams = [device.stream("left"), device.stream("right")]
    teacher = device.put(torch.ones(NBYTES // 4))
    for stream in streams:
        device.wait(stream, device.record(device.current()))
        device.uses(teacher, stream)
    passes = iter(
        StreamLoader(
            map(Itself, floats()),
            device,
            transform=Stage(lambda batch: Itself(batch.tensor * teacher), after_step=True),
        )
    )
    for number in range(COUNT):
        with device.on(streams[number % 2]):
            teacher.add_(next(passes).tensor)
    del passes
    device.wait(device.current(), device.record(streams[0]))
    device.wait(device.current(), device.record(streams[1]))
    return device


class Itself:
    """An object that moves itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> Itself:
        return Itself(self.tensor.to(device, copy=True))


def failing(make: Make) -> CheckedDevice:
    """A transform that reads what the step writes fails; the caller goes on writing it."""
    device = make(looks=LATE)
    teacher = device.put(torch.ones(NBYTES // 4))

    def teach(batch: Tensor) -> Tensor:
        made = batch * teacher
        if len(made.shape) == 2:
            raise KeyError("two")
        return made

    batches = [*floats(2), torch.ones(2, NBYTES // 4)]
    with device.on(device.current()):
        try:
            for batch in StreamLoader(batches, device, transform=Stage(teach, after_step=True)):
                teacher.add_(batch)
        except KeyError:
            teacher.add_(1)
    return device


def present(make: Make) -> CheckedDevice:
    """The source makes its batches on the device, on the caller's stream, in the loader thread."""
    device = make(looks=LATE)

    def source() -> Iterator[Tensor]:
        for batch in floats():
            yield device.put(batch)

    run(device, StreamLoader(source(), device, transform=double))
    return device


def refilled(make: Make) -> CheckedDevice:
    """The host learns late what the device has done, so every slab is wanted before it is free."""
    device = make(looks=LATE)
    run(device, StreamLoader(floats(), device))
    return device


def closed(make: Make) -> CheckedDevice:
    """The loader is closed while copies are under way."""
    device = make(looks=LATE)
    with device.on(device.current()):
        loader = StreamLoader(floats(), device)
        passes = iter(loader)
        next(passes)
        loader.close()
    return device


def forgotten(make: Make) -> CheckedDevice:
    """The loader is dropped while copies are under way, and never closed."""
    device = make(looks=LATE)
    with device.on(device.current()):
        loader = StreamLoader(floats(), device)
        passes = iter(loader)
        next(passes)
        del passes, loader
    return device


def ahead(make: Make) -> CheckedDevice:
    """The caller only launches, and each of its steps takes a second."""
    device = make(cost=lambda stream, _: float(stream == "default"))
    total = device.put(torch.zeros(NBYTES // 4))
    before = device.peak
    with device.on(device.current()):
        for batch in StreamLoader(floats(16), device, prefetch_batches=2):
            step(total, batch)
            settle(device)
    assert device.peak - before == AT_ONCE
    return device


def wandering(make: Make) -> CheckedDevice:
    """The same, with each batch taken, and its step run, on another stream than the one before."""
    return _on_two_streams(make, takes=0)


def crossing(make: Make) -> CheckedDevice:
    """Each step runs on the stream that asks for the next batch, not where its own was taken."""
    return _on_two_streams(make, takes=1)


def _on_two_streams(make: Make, takes: int) -> CheckedDevice:
    device = make(cost=lambda stream, _: float(stream in ("left", "right")))
    streams = [device.stream("left"), device.stream("right")]
    with device.on(streams[1]):
        total = device.put(torch.zeros(NBYTES // 4))
    for stream in streams:
        device.uses(total, stream)
    before = device.peak
    passes = iter(StreamLoader(floats(16), device, prefetch_batches=2))
    for number in range(16):
        taker, other = streams[(number + takes) % 2], streams[(number + takes + 1) % 2]
        with device.on(taker):
            batch = next(passes)
        mine, last = (other, taker) if takes else (taker, other)
        with device.on(mine):
            device.wait(mine, device.record(last))
            device.uses(batch, mine)
            step(total, batch)
        settle(device)
    del passes
    assert device.peak - before == AT_ONCE
    return device


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        dropped,
        prepared,
        transformed,
        planned,
        restructured,
        taught,
        trained,
        failing,
        present,
        refilled,
        closed,
        forgotten,
        ahead,
        wandering,
        crossing,
    )
}
