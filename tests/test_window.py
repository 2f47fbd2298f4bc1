"""What the ask window admits (rule 3)."""

import pytest

from streamloader.testing import FakeDevice, FakeStream
from streamloader.window import Window


def step(device: FakeDevice, stream: FakeStream) -> None:
    """Work that the caller's step submits."""
    device.log.append(("step", stream.name))
    stream.submit(lambda: None)


def admitted(window: Window, upto: int = 20) -> list[int]:
    return [number for number in range(upto) if window.admits(number)]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_before_the_first_ask_can_complete_need_none(depth: int) -> None:
    device = FakeDevice()
    device.current().held = True
    window = Window(device, depth)

    window.ask()

    assert admitted(window) == list(range(depth))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_an_ask_that_is_complete_admits_depth_batches_more(depth: int) -> None:
    window = Window(FakeDevice(), depth)

    for number in range(4):
        window.ask()
        assert admitted(window) == list(range(number + depth + 1))


def test_while_the_device_is_behind_nothing_more_is_admitted() -> None:
    device = FakeDevice()
    window = Window(device, 2)
    window.ask()
    assert admitted(window) == [0, 1, 2]

    device.current().held = True
    for _ in range(4):
        step(device, device.current())
        window.ask()
    assert admitted(window) == [0, 1, 2]

    device.current().held = False
    assert admitted(window) == [0, 1, 2, 3, 4, 5, 6]


def test_an_ask_completes_when_the_host_has_looked_often_enough() -> None:
    window = Window(FakeDevice(looks=2), 1)
    window.ask()

    assert [window.admits(1) for _ in range(4)] == [False, False, True, True]


def test_an_ask_covers_the_stream_that_took_the_batch_before() -> None:
    device = FakeDevice()
    side = device.stream("side")
    window = Window(device, 1)
    with device.on(side):
        window.ask()
    assert window.admits(1)

    side.held = True
    step(device, side)
    window.ask()  # on the default stream: the step on batch 0 is in the other

    assert not window.admits(2)
    side.held = False
    assert window.admits(2)


def test_an_ask_covers_the_current_stream_too() -> None:
    device = FakeDevice()
    side = device.stream("side")
    window = Window(device, 1)
    with device.on(side):
        window.ask()
    device.current().held = True

    window.ask()

    assert window.admits(1)
    assert not window.admits(2)


def test_the_stream_before_last_is_not_asked_again() -> None:
    device = FakeDevice()
    side = device.stream("side")
    window = Window(device, 1)
    with device.on(side):
        window.ask()
    window.ask()
    window.ask()

    assert [stream for _, stream in device.verbs("record")] == [
        "side",
        "default",
        "side",
        "default",
    ]


def test_one_stream_is_recorded_once_an_ask() -> None:
    device = FakeDevice()
    window = Window(device, 1)

    window.ask()
    window.ask()

    assert device.verbs("record") == [("record", "default")] * 2


def test_asking_waits_for_nothing() -> None:
    device = FakeDevice()
    done: list[int] = []
    device.current().submit(lambda: done.append(1))

    Window(device, 2).ask()

    assert done == []
