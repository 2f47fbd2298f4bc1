"""Pinned once where it can be, refused without harm where not; free when its workers are dead."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from streamloader.device import RefusedError
from streamloader.device.streamless import Streamless
from streamloader.region import Region
from streamloader.sent import Sent
from streamloader.shared import Shape, Shared
from streamloader.testing import FakeDevice
from tests.transported import PAGE, crossed, memory, received

CPU = Streamless(torch.device("cpu"))


def full(region: Region, size: int = 5) -> Sent:
    found = received(crossed(region.shared, lambda: torch.ones(size, dtype=torch.uint8)))
    assert isinstance(found, Sent)
    return found


# -- how many are held ---------------------------------------------------------------------------


def test_it_is_short_once_more_batches_are_held_than_are_on_their_way() -> None:
    region, kept, short = Region(memory(each=4), 2), [], []
    for _ in range(3):
        kept.append(full(region))
        short.append(region.short)
    kept.pop()
    assert [*short, region.short] == [False, False, True, False]


# -- whose it is ---------------------------------------------------------------------------------


def test_it_is_unused_when_its_workers_are_dead_and_its_slabs_are_free_then() -> None:
    region, alive = Region(memory(each=2), 2), [True, True]
    workers: Any = [SimpleNamespace(is_alive=lambda n=n: alive[n]) for n in (0, 1)]
    region.used_by(workers)
    region.shared.send(0)
    region.shared.send(1)
    held = region.shared.received(1)
    for alive[:] in ([True, False], [False, True]):
        assert not region.unused()
        assert region.shared.take(0) is None
    alive[:] = [False, False]
    assert region.unused()
    assert region.shared.take(0) is not None
    assert held is not None


def test_before_it_has_workers_it_is_unused() -> None:
    assert Region(memory(), 2).unused()


def test_in_a_forked_child_it_is_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region(memory(), 2)
    monkeypatch.setattr(region.shared, "owner", os.getpid() + 1)
    region.used_by(["no process of this one's"])
    assert not region.unused()


# -- pinned --------------------------------------------------------------------------------------


def test_a_slab_is_pinned_when_a_batch_in_it_is_sent() -> None:
    region, device = Region(memory(each=1), 2), FakeDevice()
    for _ in range(3):
        region.ready(full(region), device)
    region.ready(full(region, 2 * PAGE), device)
    grown = 2 * PAGE + 2 * PAGE // 8
    assert device.log[:2] == [("pin", PAGE), ("unpin", PAGE)]
    assert device.log[2:] == [("pin", -(-grown // PAGE) * PAGE)]
    assert not region.refused


class NoPins(FakeDevice):
    def __init__(self, error: str | None = None) -> None:
        super().__init__()
        self.asked = 0
        self._error = error

    @override
    def pin(self, memory: Tensor) -> Callable[[], object] | None:
        self.asked += 1
        if self._error is not None:
            raise RefusedError(self._error)
        return None


def test_a_device_that_cannot_pin_is_asked_once() -> None:
    region, device = Region(memory(each=4), 2), NoPins()
    region.ready(full(region), device)
    region.ready(full(region), device)
    assert region.refused
    assert device.asked == 1


def test_a_driver_that_refuses_is_warned_of_once() -> None:
    region, device = Region(memory(each=4), 2), NoPins("too much")
    text = r"^shared memory of workers stays unpinned, .*: too much; shared_memory=False leaves"
    with pytest.warns(UserWarning, match=text):
        region.ready(full(region), device)
    region.ready(full(region), device)
    assert region.refused
    assert device.asked == 1


# -- too little ----------------------------------------------------------------------------------


def test_a_batch_that_did_not_fit_is_warned_of_once() -> None:
    region = Region(Shared(Shape(1, 3, PAGE)), 2)
    region.noticed(full(region))
    text = (
        rf"^{PAGE + 1:,} bytes of a batch came the ordinary way, with copies: its share of shared "
        rf"memory is {PAGE:,} bytes, 3 such shares for each of 1 workers\. "
        rf"Pass shared_memory=BYTES, more than {3 * PAGE:,}, "
    )
    with pytest.warns(UserWarning, match=text):
        region.noticed(full(region, PAGE + 1))
    region.noticed(full(region, PAGE + 1))  # a second warning would be an error here
