"""Which device is used: `check` at construction, `resolve` at the first batch."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from streamloader import device as seam
from streamloader.device import check, resolve
from streamloader.device.accelerator import Accelerator
from streamloader.device.streamless import Streamless
from streamloader.testing import FakeDevice

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes torch believe in a machine with such accelerators."""

    def has(kind: str | None, count: int = 0, current: int = 0) -> None:
        def current_accelerator(**_: Any) -> torch.device | None:
            return None if kind is None else torch.device(kind)

        monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)

    return has


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that nobody has launched and that has not been warned yet."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    seam._warn_of_rank.cache_clear()
    yield
    seam._warn_of_rank.cache_clear()


# -- check -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["cpu", "cpu:0", "cpu:3", torch.device("cpu")])
def test_the_cpu_is_one_device(machine: Machine, given: Any) -> None:
    machine(None)

    assert check(given) == torch.device("cpu")


def test_none_and_a_device_of_ones_own_are_left_for_later() -> None:
    fake = FakeDevice()

    assert check(None) is None
    assert check(fake) is fake


@pytest.mark.parametrize("given", ["cuda", "cuda:1", torch.device("cuda", 1)])
def test_a_device_that_the_machine_has_is_taken_as_it_was_given(
    machine: Machine, given: Any
) -> None:
    machine("cuda", 2)

    assert check(given) == torch.device(given)


def test_an_index_is_one_of_the_accelerators() -> None:
    found = torch.accelerator.current_accelerator()
    if found is None:
        with pytest.raises(ValueError, match=r"^device must .*, got 1: there is only 'cpu'$"):
            check(1)
    else:
        assert torch.device(1) == torch.device(found.type, 1)


@pytest.mark.parametrize("given", ["nonsense", "cuda:x", "cuda:-1", -1, 2.5, [], "", True])
def test_what_is_no_device_is_an_error(machine: Machine, given: Any) -> None:
    machine(None)
    if given is True and torch.accelerator.device_count():
        pytest.xfail("torch takes True for an index where there is an accelerator")

    shown = re.escape(repr(given))
    with pytest.raises(
        ValueError,
        match=rf"^device must be a torch.device, its name or its index, got {shown}: ",
    ):
        check(given)


def test_an_index_of_any_size_is_an_error_that_says_so() -> None:
    with pytest.raises((ValueError, OverflowError), match=r"^device must be "):
        check(10**20)


@pytest.mark.parametrize(
    ("kind", "there_is"), [(None, "only 'cpu'"), ("xpu", "only 'xpu' beside 'cpu'")]
)
@pytest.mark.parametrize("given", ["cuda", "cuda:0", "mps", "meta"])
def test_a_device_of_another_kind_is_an_error(
    machine: Machine, kind: str | None, there_is: str, given: str
) -> None:
    machine(kind, 1)

    with pytest.raises(
        ValueError,
        match=f"^device must be one that this machine has, got '{given}': there is {there_is}$",
    ):
        check(given)


def test_an_index_beyond_the_last_device_is_an_error(machine: Machine) -> None:
    machine("cuda", 2)

    with pytest.raises(
        ValueError,
        match=r"^device must have an index below 2, the number of devices visible here, "
        r"got 'cuda:2'$",
    ):
        check("cuda:2")


# -- resolve -----------------------------------------------------------------------------------


def test_a_device_of_ones_own_is_used_as_it_is() -> None:
    fake = FakeDevice()

    assert resolve(fake) is fake


@pytest.mark.parametrize("given", [None, torch.device("cpu")])
def test_without_an_accelerator_it_is_the_cpu(machine: Machine, given: torch.device | None) -> None:
    machine(None)

    device = resolve(given)

    assert isinstance(device, Streamless)
    assert device.device == torch.device("cpu")


def test_the_cpu_is_used_where_it_was_asked_for(machine: Machine) -> None:
    machine("cuda", 2)

    assert isinstance(resolve(torch.device("cpu")), Streamless)


@pytest.mark.parametrize(
    ("given", "index"),
    [
        (None, 1),
        (torch.device("cuda"), 1),
        (torch.device("cuda:0"), 0),
        (torch.device("cuda:1"), 1),
    ],
)
def test_without_an_index_it_is_the_threads_current_device(
    machine: Machine, given: torch.device | None, index: int
) -> None:
    machine("cuda", 2, current=1)

    device = resolve(given)

    assert isinstance(device, Accelerator)
    assert device.device == torch.device("cuda", index)


def test_mps_has_no_streams(machine: Machine) -> None:
    machine("mps", 1)

    device = resolve(None)

    assert isinstance(device, Streamless)
    assert device.device == torch.device("mps", 0)
    assert not device.host


# -- LOCAL_RANK --------------------------------------------------------------------------------


def test_a_rank_on_another_device_is_warned_of_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("cuda", 4)
    monkeypatch.setenv("LOCAL_RANK", "3")

    with pytest.warns(
        UserWarning,
        match=r"^StreamLoader moves batches to device 0 although LOCAL_RANK is 3, so every rank "
        r"may be using device 0: call torch.accelerator.set_device_index\(3\) before the first "
        r"batch, or pass device=$",
    ):
        resolve(None)

    resolve(None)  # a second warning would be an error
    resolve(torch.device("cuda:0"))


@pytest.mark.parametrize("rank", ["0", "", "x", "4", "-1"])
def test_a_rank_that_agrees_or_is_no_device_is_fine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    machine("cuda", 4)
    monkeypatch.setenv("LOCAL_RANK", rank)

    assert resolve(None).device == torch.device("cuda:0")  # a warning would be an error


def test_on_the_cpu_a_rank_says_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(None)
    monkeypatch.setenv("LOCAL_RANK", "3")

    assert resolve(None).host
