"""Stages on a real accelerator: graphed, compiled, behind the step, under autocast, by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamloader import Stage, StreamLoader
from streamloader.results import OverwrittenError
from tests.gpu.sources import busy, nothing_waits

pytestmark = pytest.mark.gpu

COUNT, SHAPE = 30, (64, 1024)
COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
"""torch's own warnings, of what torch.compile itself is made of."""


def numbered(count: int = COUNT) -> list[Tensor]:
    return [torch.full(SHAPE, float(number)) for number in range(count)]


def scaled(x: Tensor) -> Tensor:
    return x * 2 + 1


def graphed() -> Any:
    """`scaled` as a CUDA graph: each call writes to the same memory, and returns that."""
    made: Any = torch.cuda.make_graphed_callables
    return made(scaled, (torch.zeros(SHAPE, device="cuda"),))


def rows_wrong(transform: Any, depth: int) -> list[int]:
    """How many elements of each batch are not -(2 n + 1), when the step is late and drops it."""
    loader = StreamLoader(numbered(), "cuda", transform=transform, prefetch_batches=depth)
    wrong = []
    for number, batch in enumerate(loader):
        busy(2)
        wrong.append((batch != -(2 * number + 1)).sum())
        del batch
        torch.full(SHAPE, torch.nan, device="cuda")  # where it was, perhaps
    return torch.stack(wrong).tolist()


# -- graphed and compiled --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_graphed_callable_is_a_stage_if_its_results_are_copied(depth: int) -> None:
    replay = graphed()
    stage = Stage(lambda x: replay(x).clone(), name="graphed", priority=-1)
    assert rows_wrong([stage, torch.neg], depth) == [0] * COUNT


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_graphed_callable_whose_results_are_not_copied_is_an_error(depth: int) -> None:
    stage = Stage(graphed(), name="graphed")
    loader = StreamLoader(numbered(), "cuda", transform=stage, prefetch_batches=depth)
    seen: list[float] = []
    with pytest.raises(OverwrittenError, match=r"^transform graphed on batch 1 returned memory "):
        seen.extend(float(batch[0, 0]) for batch in loader)
    assert seen in ([], [1.0])


def test_a_graphed_module_makes_what_it_makes_by_itself() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(1024, 512), nn.Tanh()).cuda().eval()
    encoder.requires_grad_(requires_grad=False)
    sources = [torch.rand(SHAPE) for _ in range(COUNT)]
    expected = [encoder(source.cuda()) for source in sources]
    replay: Any = torch.cuda.make_graphed_callables(encoder, (torch.zeros(SHAPE, device="cuda"),))
    loader = StreamLoader(sources, "cuda", transform=lambda x: replay(x).clone())
    for number, batch in enumerate(loader):
        busy(2)
        torch.testing.assert_close(batch, expected[number])


@COMPILES
@pytest.mark.parametrize("depth", [0, 2])
def test_a_compiled_callable_is_a_stage(depth: int) -> None:
    assert rows_wrong([torch.compile(scaled), torch.neg], depth) == [0] * COUNT


# -- behind the step -------------------------------------------------------------------------------


def trained(depth: int, *, after_step: bool = True) -> list[float]:
    """Sums of batches to each of which was added what the steps before it had written, late."""
    teacher = torch.zeros(SHAPE, device="cuda")
    stage = Stage(lambda x: x + teacher, name="teacher", after_step=after_step)
    sums = []
    loader = StreamLoader(numbered(), "cuda", transform=[torch.neg, stage], prefetch_batches=depth)
    for batch in loader:
        busy(2)
        teacher.mul_(0.5).add_(batch, alpha=0.25)
        sums.append(batch.sum())
    return torch.stack(sums).tolist()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stage_after_the_step_reads_what_it_reads_in_a_plain_loop(depth: int) -> None:
    assert trained(depth) == trained(0)


def test_and_without_saying_so_it_does_not() -> None:
    assert trained(3, after_step=False) != trained(0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_it_makes_nothing_on_the_training_thread_wait_for_the_device() -> None:
    teacher = torch.zeros(SHAPE, device="cuda")
    stage = Stage(lambda x: x + teacher, after_step=True)
    passes = iter(StreamLoader(numbered(), "cuda", transform=[torch.neg, stage]))
    next(passes)
    with nothing_waits():
        for batch in passes:
            busy(2)
            teacher.add_(batch)


# -- how it runs -----------------------------------------------------------------------------------


def test_a_module_runs_under_its_autocast_and_autograd_takes_its_outputs() -> None:
    encoder, decoder = nn.Linear(1024, 512).cuda(), nn.Linear(512, 8).cuda()
    stage = Stage(encoder, autocast=torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.float16):
        for batch in StreamLoader(numbered(4), "cuda", transform=stage):
            assert batch.dtype == torch.bfloat16
            assert not batch.requires_grad
            assert not batch.is_inference()
            decoder(batch).sum().backward()
        encoder(torch.ones(SHAPE, device="cuda")).sum().backward()  # no cast of the stage's is left
    assert decoder.weight.grad is not None
    assert encoder.weight.grad is not None


def test_a_stages_stream_has_its_priority() -> None:
    seen: list[int] = []

    def look(x: Tensor) -> Tensor:
        seen.append(torch.cuda.current_stream().priority)
        return x

    stages: list[Any] = [look, Stage(look, priority=-1), Stage(look, priority=-100)]
    for _ in StreamLoader(numbered(1), "cuda", transform=stages):
        pass
    assert seen[:2] == [0, -1]
    assert seen[2] <= -1  # the lowest that there is


def test_each_stage_is_an_nvtx_range_with_the_batchs_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed: list[str] = []
    popped: list[None] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: popped.append(None))

    stages: list[Any] = [Stage(scaled, name="a {b}"), torch.neg]
    for _ in StreamLoader(numbered(2), "cuda", transform=stages):
        pass

    assert pushed == [
        f"transform {name} on batch {number}" for number in range(2) for name in ("a {b}", "neg")
    ]
    assert len(popped) == 4


def test_what_has_come_back_to_the_cpu_is_an_error() -> None:
    loader = StreamLoader(numbered(2), "cuda", transform=Stage(Tensor.cpu, name="back"))
    with pytest.raises(ValueError, match=r"^transform back on batch 0 returned a batch on the CPU"):
        next(iter(loader))

    beside = StreamLoader(numbered(2), "cuda", transform=lambda x: (x, torch.tensor([len(x)])))
    assert [(x.device.type, n.device.type) for x, n in beside] == [("cuda", "cpu")] * 2


def test_a_stage_that_waits_for_the_device_costs_time_that_is_counted() -> None:
    def waits(x: Tensor) -> Tensor:
        busy(10)
        return x * x.mean().item()

    loader = StreamLoader(numbered(10), "cuda", transform=waits)
    got = [float(batch[0, 0]) for batch in loader]
    assert got == [float(number * number) for number in range(10)]
    assert loader.stats.epoch.launch_seconds > 0.05


@pytest.mark.filterwarnings("ignore:transform noise draws from torch's generators:UserWarning")
def test_draws_on_the_device_are_noticed_where_they_cannot_be_seeded() -> None:
    stage = Stage(torch.rand_like, name="noise")
    with pytest.warns(UserWarning, match=r"^transform noise draws from torch's generators "):
        list(StreamLoader(iter(numbered(3)), "cuda", transform=stage))
