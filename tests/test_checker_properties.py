"""Whatever the batches are and whatever the caller does, nothing may race.

Every example is a program: what the source yields, what the transforms do, how the caller loops.
It runs on a checked device, which must have nothing to report, and every batch must be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from streamloader import Planned, Stage, StreamLoader, tree
from streamloader.checker import CheckedDevice
from streamloader.context import Context
from tests.scenarios import Skip
from tests.sites import SITES, Site

SIZES = (0, 1, 7, 64, 5000, 20000)  # elements; the last have a copy each


class FailureError(Exception):
    """What a transform raises."""


@dataclass(frozen=True)
class Program:
    """One example.

    Attributes:
        shapes: Builds each batch from a list of tensors of such sizes, nested somehow.
        varies: How much larger each batch is than the one before, in elements.
        count: How many batches.
        on_device: Whether the source makes every other tensor on the device.
        transforms: Names of TRANSFORMS.
        after: The place among them of one that reads what the steps write, if there are so many.
        fails: The batch on which the last transform fails, if there is one.
        depth: `prefetch_batches`.
        looks: How late the host learns of events.
        takes: The stream that each batch is taken on, in turn.
        keeps: How many batches the caller keeps.
        breaks: The batch after which it leaves.
        passes: How many passes.
        closes: Whether it closes the loader in the end.
        costs: Virtual seconds of each piece of work: on the copy stream, on any other.
        naps: Real microseconds that the source takes for a batch, and the caller.
    """

    sizes: list[int]
    build: str
    varies: int
    count: int
    on_device: bool
    transforms: list[str]
    after: int
    fails: int
    depth: int
    looks: int
    takes: list[int]
    keeps: int
    breaks: int
    passes: int
    closes: bool
    costs: tuple[float, float]
    naps: tuple[int, int]


class Hidden:
    """An object of the user's that moves itself, and shows nobody what it is made of."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> Hidden:
        return Hidden(self.tensor.to(device, copy=True))


def nested(build: str, tensors: list[Any]) -> Any:
    """The same tensors in a structure."""
    if build == "dict":
        return {str(number): tensor for number, tensor in enumerate(tensors)}
    if build == "opaque":
        return [Hidden(tensors[0]), *tensors[1:]]
    if build == "deep":
        return [{"first": tensors[:1], "rest": (tuple(tensors[1:]), "label", 7)}]
    return tuple(tensors)


def everywhere(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    def visit(leaf: Any) -> Any:
        return Hidden(function(leaf.tensor)) if isinstance(leaf, Hidden) else function(leaf)

    return lambda batch: tree.replace(visit, batch)


def parts(batch: Any) -> list[Tensor]:
    """Its tensors."""
    return [leaf.tensor if isinstance(leaf, Hidden) else leaf for leaf in tree.leaves(batch)]


def nap(microseconds: int) -> None:
    if microseconds:
        time.sleep(microseconds * 1e-6)


def _renamed(batch: Any) -> Any:
    """Another structure, and a tensor more, of all that was there."""
    found = parts(batch)
    return {"all": found, "sum": torch.stack([tensor.sum() for tensor in found]).mul(0)[:0]}


def _first(batch: Any) -> Any:
    """Drops all but one tensor, early."""
    return tree.leaves(batch)[:1]


class Adds(Planned):
    """Adds a table of nothing, which is planned on the host."""

    @override
    def plan(self, batch: Any, context: Context) -> Tensor:
        return torch.zeros(3)

    @override
    def run(self, batch: Any, table: Tensor) -> Any:
        return everywhere(lambda tensor: tensor + table[1].to(tensor.dtype))(batch)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda batch: batch,
    "new": everywhere(lambda tensor: tensor + 0),
    "in place": everywhere(lambda tensor: tensor.add_(0)),
    "view": everywhere(lambda tensor: tensor[: tensor.shape[0] // 2]),
    "twice": everywhere(lambda tensor: (tensor * 3 - tensor.mul(2)).clone()),
    "longer": everywhere(lambda tensor: torch.cat([tensor, tensor])),
    "structure": _renamed,
    "drops": _first,
    "planned": Adds(),
    "draws": everywhere(lambda tensor: tensor + torch.rand(tensor.shape).mul(0)),
}

PROGRAMS = st.builds(
    Program,
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=5),
    build=st.sampled_from(["tuple", "dict", "deep", "opaque"]),
    varies=st.sampled_from([0, 0, 1, 100]),
    count=st.integers(1, 9),
    on_device=st.booleans(),
    transforms=st.lists(st.sampled_from(sorted(TRANSFORMS)), max_size=4),
    after=st.integers(0, 6),
    fails=st.integers(0, 20),
    depth=st.integers(0, 4),
    looks=st.sampled_from([0, 1, 4, 30]),
    takes=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    keeps=st.integers(0, 4),
    breaks=st.integers(0, 20),
    passes=st.integers(1, 3),
    closes=st.booleans(),
    costs=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    naps=st.tuples(st.sampled_from([0, 0, 300]), st.sampled_from([0, 0, 300])),
)


def source(program: Program, device: CheckedDevice) -> Iterator[Any]:
    for number in range(program.count):
        nap(program.naps[0])
        tensors = []
        for place, size in enumerate(program.sizes):
            made = torch.full((size + number * program.varies,), float(number))
            tensors.append(device.put(made) if program.on_device and place % 2 else made)
        yield nested(program.build, tensors)


class Source:
    def __init__(self, program: Program, device: CheckedDevice) -> None:
        self.program, self.device = program, device

    def __iter__(self) -> Iterator[Any]:
        return source(self.program, self.device)


def step(batch: Any, weight: Tensor) -> None:
    """Reads all of a batch, writes to all of it, and updates a weight."""
    for tensor in parts(batch):
        weight.add_(tensor.sum())
        tensor.add_(1)


def check(batch: Any, number: int) -> None:
    """Its content, looked at by nobody: it orders nothing."""
    for tensor in parts(batch):
        assert set(tensor.tolist()) <= {float(number)}


def one_pass(
    program: Program,
    device: CheckedDevice,
    passes: Iterator[Any],
    streams: list[Any],
    taught: list[Tensor],
) -> None:
    kept: list[tuple[Any, int]] = []
    weights = [device.put(torch.zeros(())) for _ in streams]
    for weight, stream in zip(weights, streams, strict=True):
        device.wait(stream, device.record(device.current()))
        device.uses(weight, stream)
    for number in range(program.breaks + 1):
        lane = program.takes[number % len(program.takes)]
        with device.on(streams[lane]):
            taught[:] = [weights[lane]]
            batch = next(passes, None)
            if batch is None:
                return
            check(batch, number)
            nap(program.naps[1])
            step(batch, weights[lane])
        if number < program.keeps:
            kept.append((batch, lane))
        del batch
    for batch, lane in kept:
        with device.on(streams[lane]):
            step(batch, weights[lane])


def stages(program: Program, weight: Tensor, taught: list[Tensor]) -> list[Any]:
    """Its transforms; if there are any, the last one reads `weight`, and may fail."""
    calls = [0]

    def failing(batch: Any) -> Any:
        calls[0] += 1
        weight.sum()
        if calls[0] == program.fails:
            raise FailureError
        return batch

    def teach(batch: Any) -> Any:
        """Reads what the steps on the caller's stream have written."""
        return everywhere(lambda tensor: tensor + (taught[0] * 0).to(tensor.dtype))(batch)

    made: list[Any] = [TRANSFORMS[name] for name in program.transforms]
    if made:
        made.append(failing)
    if program.after < len(made):
        made.insert(program.after, Stage(teach, after_step=True))
    return made


def through(program: Program, device: CheckedDevice) -> Tensor:
    """Runs it.

    Returns:
        What its transforms read, written by the caller before the first pass; to be kept.
    """
    streams = [device.current(), device.stream("left"), device.stream("right")]
    weight = device.put(torch.ones(4))
    with device.on(streams[0]):
        weight.add_(1)
    taught: list[Tensor] = []
    transforms = stages(program, weight, taught)
    loader = StreamLoader(
        Source(program, device), device, transform=transforms, prefetch_batches=program.depth
    )
    for _ in range(program.passes):
        passes = iter(loader)
        try:
            one_pass(program, device, passes, streams, taught)
        except FailureError:
            pass
        finally:
            del passes
            taught.clear()
    if program.closes:
        loader.close()
    return weight


def device_of(program: Program, skip: Skip | None = None) -> CheckedDevice:
    copy, other = program.costs
    return CheckedDevice(
        program.looks, cost=lambda stream, _: copy if stream == "copy" else other, skip=skip
    )


def proves(program: Program) -> None:
    device = device_of(program)
    kept = through(program, device)
    device.verify()
    del kept


# The source is a generator, so that transforms that draw cannot be seeded.
DRAWS = pytest.mark.filterwarnings("ignore:transform <lambda> draws from torch's:UserWarning")


@DRAWS
@given(PROGRAMS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_races_whatever_the_program(program: Program) -> None:
    proves(program)


@DRAWS
@pytest.mark.slow
@given(PROGRAMS)
@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_races_in_many_programs(program: Program) -> None:
    proves(program)


RACES = {name: site for name, site in SITES.items() if site.module != "window"}
"""Without an ask nothing races: there is too much memory (test_mutations.py)."""


def found(site: Site, start: int) -> list[str]:
    """What is reported of some programs without the call; those of one start are much alike."""
    noticed: list[str] = []

    @seed(start)
    @given(PROGRAMS)
    @settings(max_examples=20, database=None, phases=[Phase.generate])
    def search(program: Program) -> None:
        if not noticed:
            device = device_of(program, site.skip)
            kept = through(program, device)
            noticed.extend(text for text in device.reports if "never recorded" not in text)
            del kept

    search()
    return noticed


@DRAWS
@pytest.mark.slow
@pytest.mark.parametrize("site", RACES.values(), ids=RACES)
def test_some_program_races_without_the_call(site: Site) -> None:
    assert any(found(site, start) for start in range(30))
