"""Every verb that keeps an order is needed: without any one call of it, some scenario fails.

The calls are found in the package's syntax tree. Each is taken out inside the fake, one at a time,
and the scenario that is named for it must then report something, or fail an assertion of its own.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import pytest

from streamloader.checker import CheckedDevice
from tests.scenarios import SCENARIOS, Skip
from tests.sites import SITES, Site, sites

NOTICED_BY = {
    "pack.__call__.record": "present",
    "slabs._drain.join<__call__": "forgotten",
    "slabs._drain.join<close": "closed",
    "slabs.serve.done": "refilled",
    "stages._copy.wait": "present",
    "stages._enter.uses<_run": "restructured",
    "stages._enter.uses<hand_over": "dropped",
    "stages._enter.wait<_run": "transformed",
    "stages._enter.wait<hand_over": "dropped",
    "stages._later.record": "planned",
    "stages._later.wait": "planned",
    "stages._run.record<hand_over": "failing",
    "stages._run.record<transform": "transformed",
    "stages.begin.record": "prepared",
    "stages.begin.wait": "prepared",
    "stages.hand_over.wait": "taught",
    "stages.send.record": "dropped",
    "window.admits.done": "ahead",
    "window.ask.record": "ahead",
}
"""Which scenario fails without which call."""


def faults(scenario: str, skip: Skip | None) -> list[str]:
    """What goes wrong in a scenario, but for what is told of events that were not recorded.

    That an event is missing is no proof that it was needed.
    """
    devices: list[CheckedDevice] = []

    def make(**options: Any) -> CheckedDevice:
        devices.append(CheckedDevice(**options, skip=skip))
        return devices[-1]

    failed = []
    try:
        SCENARIOS[scenario](make)
    except AssertionError as error:
        failed = [f"{scenario} failed: {error}"]
    return failed + [text for text in devices[0].reports if "never recorded" not in text]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_reported_of_the_package_as_it_is(scenario: str) -> None:
    assert faults(scenario, None) == []


@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
def test_without_the_call_a_scenario_fails(site: Site) -> None:
    assert site.name in NOTICED_BY, f"dead code, or a scenario is missing: {site}"
    assert faults(NOTICED_BY[site.name], site.skip)


def test_every_scenario_is_named_and_every_name_is_a_site() -> None:
    assert set(NOTICED_BY) == set(SITES)
    rest = set(SCENARIOS) - set(NOTICED_BY.values())
    assert rest == {"crossing", "trained", "wandering"}


@pytest.mark.parametrize("scenario", ["taught", "trained"])
def test_what_reads_after_a_step_waits_for_it_on_a_stream_of_its_own_and_on_the_callers(
    scenario: str,
) -> None:
    assert faults(scenario, SITES["stages.hand_over.wait"].skip)


@pytest.mark.parametrize(("taker", "scenario"), [(True, "wandering"), (False, "crossing")])
def test_both_streams_of_an_ask_are_needed(*, taker: bool, scenario: str) -> None:
    def skip(verb: str, frame: FrameType) -> bool:
        if not SITES["window.ask.record"].skip(verb, frame):
            return False
        window = frame.f_locals["self"]
        return bool(taker == (frame.f_locals["stream"] is not window._device.current()))

    assert faults(scenario, skip)


# -- the sites are found -------------------------------------------------------------------------


def test_calls_and_what_is_passed_on_are_found() -> None:
    source = """
class Leg:
    def go(self, device):
        self._device.wait(
            stream, event)
        self.changed.wait()
        return all(map(device.done, events))
"""
    assert sites(source, "leg") == [
        Site("leg", "go", "wait", (4, 4)),
        Site("leg", "go", "done", (7, 7)),
    ]


def test_a_function_with_several_callers_is_a_site_for_each() -> None:
    source = """
def _enter(device): device.wait(stream, event)
def a(): _enter(device)
def b(): leg._enter(device)
def c(): weakref.finalize(leg, _enter, device)
"""
    assert [site.name for site in sites(source, "leg")] == [
        "leg._enter.wait<a",
        "leg._enter.wait<b",
        "leg._enter.wait<__call__",
    ]
