"""Never a wrong batch: loops that a reader too late or memory reused too early shows in.

The trials are those of the board (benchmarks/races.py); what only StreamLoader does follows them.
"""

import functools
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from benchmarks._setting import Count, Setting, Tally, forms
from benchmarks._trials import TRIALS
from benchmarks.races import settle
from streamloader import StreamLoader, on
from streamloader.transforms import Transform
from tests.gpu.sources import ROWS, SOURCES, busy

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
COUNT = 40
NUMBERS = list(range(COUNT))

# The cases of public failures that a trial is.
CASES = {
    "late": "a01",
    "refilled": "a02",
    "ref.pin": "a02",
    "kept": "a03",
    "side": "a05",
    "early": "a06",
}


@pytest.fixture(autouse=True)
def _from_a_fresh_start() -> None:
    settle(CUDA)


def stream(depth: int) -> Callable[..., Iterable[Any]]:
    def wrap(source: Iterable[Any], transform: Transform | None) -> Iterable[Any]:
        staged = None if transform is None else on(0, transform)
        return StreamLoader(source, CUDA, transform=staged, prefetch_batches=depth)

    return wrap


# -- the trials --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "pinned"), [(0, True), (1, False), (2, False), (2, True), (4, True)]
)
@pytest.mark.parametrize(
    "trial", TRIALS, ids=["_".join(filter(None, (CASES.get(name), name))) for name in TRIALS]
)
def test_no_batch_is_wrong(trial: str, pinned: bool, depth: int) -> None:  # noqa: FBT001
    found = TRIALS[trial].run(Setting(stream(depth), CUDA, pinned, milliseconds=3))
    assert (found.wrong, found.saw) == (0, "")


def careless(source: Iterable[Any], _transform: Transform | None) -> Iterator[Any]:
    """The known race: memory from a side stream that the step waits for, and that never waits back.

    A batch that is dropped is free for the next copy, though the step has yet to read it.
    """
    side, ahead = torch.cuda.Stream(CUDA), deque[list[Tensor]]()
    for batch in source:
        with torch.cuda.stream(side):
            ahead.append([tensor.to(CUDA, non_blocking=True) for tensor in batch])
        if len(ahead) > 2:
            torch.cuda.current_stream(CUDA).wait_stream(side)
            yield ahead.popleft()
    torch.cuda.current_stream(CUDA).wait_stream(side)
    while ahead:
        yield ahead.popleft()


@pytest.mark.parametrize("trial", ["late", "backward", "accumul.", "side", "switched"])
def test_a_loader_that_has_the_race_is_caught(trial: str) -> None:
    found = TRIALS[trial].run(Setting(careless, CUDA, milliseconds=3))
    assert found.wrong > found.of // 4


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("depth", [1, 3])
def test_a01_every_batch_is_right_whatever_the_source(
    source: Callable[[int], Any], depth: int
) -> None:
    sums, labels = [], []
    for images, label in StreamLoader(source(COUNT), CUDA, prefetch_batches=depth):
        busy(4)
        sums.append(images.sum())
        labels.append(label)
        del images
        torch.full((ROWS,), 255, dtype=torch.uint8, device=CUDA)  # reuses what can be reused
    assert [int(total) for total in sums] == [number * ROWS for number in NUMBERS]
    assert [label.tolist() for label in labels] == [[number] * 4 for number in NUMBERS]


# -- what only StreamLoader does ---------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a06_no_foreign_value_appears_in_what_two_transforms_make(depth: int) -> None:
    def wrap(source: Iterable[Any], transform: Transform | None) -> Iterable[Any]:
        assert transform is not None
        staged = [on(0, transform), on(0, torch.Tensor.half)]
        return StreamLoader(source, CUDA, transform=staged, prefetch_batches=depth)

    found = TRIALS["early"].run(Setting(wrap, CUDA, milliseconds=3))
    assert (found.wrong, found.saw) == (0, "")


class Pair(NamedTuple):
    images: Tensor
    labels: Tensor


@dataclass
class Sample:
    pair: Pair
    extra: dict[str, list[Tensor]]


def read_late(setting: Setting, batches: Iterable[Any], parts: Callable[[Any], list[Any]]) -> Count:
    """The loop of the trial `late`, for batches of any form."""
    tally = Tally(CUDA)
    for batch in batches:
        setting.busy()
        tally.look(*parts(batch))
        released = forms(*parts(batch))
        del batch
        setting.poison(released)
    return tally.count(COUNT)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_nested_batches_are_as_safe(depth: int) -> None:
    setting = Setting(stream(depth), CUDA, milliseconds=3)

    def sample(number: int) -> Sample:
        return Sample(Pair(*setting.pair(number)), {"more": setting.pair(number, rows=2)})

    def parts(batch: Sample) -> Sequence[Tensor]:
        return [*batch.pair, *batch.extra["more"]]

    loader = setting.wrap([sample(number) for number in NUMBERS], None)
    found = read_late(setting, loader, lambda batch: list(parts(batch)))
    assert (found.wrong, found.saw) == (0, "")


class Thing:
    """What keeps a tensor as an attribute, and gives it when called."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __call__(self) -> Tensor:
        return self.held


class Slotted:
    """The same without a `__dict__`."""

    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __call__(self) -> Tensor:
        return self.held


def suspended(tensor: Tensor) -> Callable[[], Tensor]:
    """A generator that has begun: its frame keeps the tensor."""

    def frames() -> Iterator[Tensor]:
        held = tensor * 1
        while True:
            yield held

    begun = frames()
    next(begun)
    return functools.partial(next, begun)


def default(tensor: Tensor) -> Callable[[], Tensor]:
    def ask(held: Tensor = tensor) -> Tensor:
        return held

    return ask


HIDDEN: dict[str, Callable[[Tensor], Callable[[], Tensor]]] = {
    "an attribute": Thing,
    "a slot": Slotted,
    "a closure": lambda tensor: lambda: tensor * 1,
    "a default": default,
    "a partial": lambda tensor: functools.partial(torch.Tensor.detach, tensor),
    "a bound method": lambda tensor: Thing(tensor).__call__,
    "a method written in C": lambda tensor: tensor.detach,
    "a generator": suspended,
}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN.keys())
def test_what_a_transform_hides_in_an_object_is_as_safe_as_a_tensor(
    hide: Callable[[Tensor], Callable[[], Tensor]],
) -> None:
    setting = Setting(stream(2), CUDA, milliseconds=3)
    source = [images for images, _ in setting.pairs()]
    loader = StreamLoader(source, CUDA, transform=lambda images: hide(images.float()))
    found = read_late(setting, loader, lambda hidden: [hidden()])
    assert (found.wrong, found.saw) == (0, "")


def test_packed_sequences_that_a_transform_makes_are_as_safe() -> None:
    def packed(images: Tensor) -> PackedSequence:
        return pack_sequence(list(images.float().flatten(1)))

    setting = Setting(stream(2), CUDA, milliseconds=3)
    source = [images for images, _ in setting.pairs()]
    loader = StreamLoader(source, CUDA, transform=packed)
    found = read_late(setting, loader, lambda sequence: [sequence.data])
    assert (found.wrong, found.saw) == (0, "")


# -- CUDA's sanitizer --------------------------------------------------------------------------

# It sees what torch's own kernels read and write on the thread that enabled it, which is the one
# that launches. It forgets a block when it is dropped: reuse is what the trials above are for. Some
# versions of torch take record_stream for a kernel that writes; it is passed by.
SANITIZED = """
import torch
from torch.cuda import _sanitizer

inspect = _sanitizer.CUDASanitizerDispatchMode.__torch_dispatch__

def dispatch(mode, function, types, args=(), kwargs=None):
    if function is torch.ops.aten.record_stream.default:
        return function(*args, **(kwargs or {}))
    return inspect(mode, function, types, args, kwargs)

_sanitizer.CUDASanitizerDispatchMode.__torch_dispatch__ = dispatch
_sanitizer.enable_cuda_sanitizer()

from streamloader import StreamLoader, on
from streamloader.device.accelerator import Accelerator

def double(images):
    return images * 2

def passes():
    source = [(torch.full((1 << 20,), n, dtype=torch.uint8), torch.tensor([n])) for n in range(8)]
    loader = StreamLoader(source, "cuda", transform=[on(0, torch.Tensor.float), on(0, double)])
    for _ in range(3):
        for images, labels in loader:
            (images.sum() + labels.sum()).mul_(2)

def seeded():
    shared = torch.zeros(1000, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        shared.add_(1)

def careless():
    Accelerator.wait = lambda self, stream, event: None
    passes()

for call in (passes, seeded, careless):
    try:
        call()
        print(call.__name__, "clean")
    except _sanitizer.CUDASanitizerErrors:
        print(call.__name__, "reported")
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def verdicts() -> str:
    """What the sanitizer says of each, in a process that enables it at its start."""
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("call", "verdict"),
    [("seeded", "reported"), ("careless", "reported"), ("passes", "clean")],
)
def test_the_sanitizer_reports_a_race_that_is_there_and_none_in_passes(
    call: str, verdict: str, verdicts: str
) -> None:
    assert f"{call} {verdict}" in verdicts.splitlines()
