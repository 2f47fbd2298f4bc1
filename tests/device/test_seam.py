"""The verbs that are the same on every device."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.profiler import profile
from typing_extensions import override

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


def test_draws_seed_every_generator_and_restore_it() -> None:
    generators = [torch.Generator().manual_seed(n) for n in range(3)]
    states = [generator.get_state() for generator in generators]

    class Three(FakeDevice):
        @override
        def generators(self) -> Sequence[torch.Generator]:
            return generators

    with Three().draws(9):
        assert [generator.initial_seed() for generator in generators] == [9, 9, 9]

    assert all(map(torch.equal, [g.get_state() for g in generators], states))


def test_named_work_is_seen_by_a_profiler_under_its_name() -> None:
    device, x = FakeDevice(), torch.ones(2)
    with device.named("unseen"):
        x.neg()
    with profile() as seen, device.named("a {name} of its own"):
        x.neg()

    names = {event.key for event in seen.key_averages()}
    assert "a {name} of its own" in names
    assert "unseen" not in names
