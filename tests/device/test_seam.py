"""`Device.join`, the one verb that is the same on every device."""

import threading
from collections.abc import Callable

import pytest

from streamloader.device import POLL_SECONDS, Device
from streamloader.testing import FakeDevice


@pytest.fixture(autouse=True)
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long `join` slept, had it slept."""
    slept: list[float] = []
    monkeypatch.setattr("streamloader.device.seam.time.sleep", slept.append)
    return slept


def never() -> bool:
    return False


def after(looks: int) -> Callable[[], bool]:
    answers = iter([False] * looks)
    return lambda: next(answers, True)


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_join_looks_until_the_event_is_complete(looks: int, naps: list[float]) -> None:
    device = FakeDevice(looks)
    event = device.record(device.current())

    assert device.join(event, never) is True
    assert naps == [POLL_SECONDS] * looks


def test_a_join_ends_without_the_event_when_told_to(naps: list[float]) -> None:
    device = FakeDevice()
    device.current().held = True

    assert device.join(device.record(device.current()), after(2)) is False
    assert naps == [POLL_SECONDS] * 2


def test_a_complete_event_counts_whatever_was_told() -> None:
    device = FakeDevice()

    assert device.join(device.record(device.current()), lambda: True) is True


def test_the_host_takes_a_look_often_and_yet_rests() -> None:
    assert 1e-5 <= POLL_SECONDS <= 1e-3


def test_a_device_must_have_every_verb() -> None:
    verbs = sorted(Device.__abstractmethods__)

    assert len(verbs) == 14
    with pytest.raises(TypeError, match=r"^Can't instantiate abstract class Device "):
        Device()  # type: ignore[abstract]


def test_threads_hand_work_to_one_another_by_a_condition() -> None:
    assert isinstance(FakeDevice().condition(), threading.Condition)
