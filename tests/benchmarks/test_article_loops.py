"""Who waits for whom, with lanes that only keep account of it; and that all rungs do one work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import _article_cell, _article_graphs, _article_loops
from benchmarks._article_cell import Cell, Print, agree, differ, made, prints
from benchmarks._article_feed import loader, pool
from benchmarks._article_loops import Form, Loop, Taken, Work
from benchmarks._article_rungs import EXPERIMENTS, GRAPHS, absent, ladder, named, singles

CPU = torch.device("cpu")


class Account:
    """A lane, and what it knows to be done before what is queued now."""

    running: Account

    def __init__(self) -> None:
        self.queued: set[str] = set()
        self.known: set[str] = set()

    @contextmanager
    def on(self) -> Iterator[None]:
        before, Account.running = Account.running, self
        yield
        Account.running = before

    def wait(self, other: Account) -> None:
        self.known |= other.queued | other.known

    def reads(self, *tensors: Tensor) -> None:
        pass

    def mark(self) -> None:
        return None


def known_before(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> dict[str, set[str]]:
    """For each "stage n" and "step n", what is done before it for certain."""
    current, seen = Account(), {}
    Account.running = current
    counts = {"stage": itertools.count(), "step": itertools.count()}

    class Lanes:
        new = staticmethod(lambda _: Account())
        current = staticmethod(lambda _: current)

    def runs(what: str, value: Tensor) -> Tensor:
        name, lane = f"{what} {next(counts[what])}", Account.running
        seen[name] = lane.known | lane.queued
        lane.queued.add(name)
        return value

    monkeypatch.setattr(_article_loops, "Lane", Lanes)
    batches = pool("augment", 2, 4)
    work = Work(CPU, batches, batches, batches[0])
    form = Form(lambda images: runs("stage", images), lambda images, _: runs("step", images))
    for _ in itertools.islice(loop(work, form), 5):
        pass
    return seen


CORRECT: dict[str, Loop] = {
    "by hand": _article_loops.by_hand,
    "mended": _article_loops.article(with_stage=False, mended=True),
    "mended, inputs with the stage": _article_loops.article(with_stage=True, mended=True),
}


@pytest.mark.parametrize("loop", CORRECT.values(), ids=CORRECT.keys())
def test_a_step_waits_for_its_stage_and_runs_beside_the_next(
    monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    before = known_before(monkeypatch, loop)
    for number in range(3):
        assert f"stage {number}" in before[f"step {number}"]
        assert f"stage {number + 1}" not in before[f"step {number}"]
        assert f"step {number}" not in before[f"stage {number + 1}"]


@pytest.mark.parametrize("loop", CORRECT.values(), ids=CORRECT.keys())
def test_a_stage_does_not_run_further_ahead(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    before = known_before(monkeypatch, loop)
    assert all(f"step {number}" in before[f"stage {number + 2}"] for number in range(3))


def test_the_articles_stage_waits_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    before = known_before(monkeypatch, _article_loops.article(with_stage=False, mended=False))
    assert "stage 2" in before["step 2"]
    assert "step 0" not in before["stage 4"]


def test_a_graphs_result_is_cloned_for_who_looks_ahead() -> None:
    fixed = torch.zeros(2)
    form = Form(lambda _: fixed, lambda images, _: images)
    assert form.staged(fixed) is fixed
    assert form._replace(fixed=True).staged(fixed) is not fixed


def test_batches_of_a_pool_come_round_and_can_be_told_apart() -> None:
    for experiment in ("encoder", "augment"):
        torch.manual_seed(0)
        batches = pool(experiment, 4, 32)
        source = iter(loader(batches))
        taken = [next(source) for _ in range(len(batches) + 1)]
        assert taken[0][0] is taken[-1][0]
        means = [float(images.float().mean()) for images, _ in batches]
        assert means == sorted(means, reverse=True)


# -- the ladder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_rung_is_compared_with_one_stream_and_a_ceiling_that_there_are(
    experiment: str,
) -> None:
    rungs = ladder(experiment)
    names = [rung.name for rung in rungs]
    assert len(set(names)) == len(names)
    for rung in rungs:
        assert rung.ceiling in names
        assert rung.base is None or rung.base in singles(rungs)
        assert (rung.base is None) == rung.name.startswith("ceiling")
        base = named(rungs, rung.base or rung.ceiling)
        assert rung.name.startswith("1 two") or base.form == rung.form


def test_graphs_need_a_gpu() -> None:
    graphed = [rung for rung in ladder("encoder") if absent(rung, cuda=False) == GRAPHS]
    assert [rung.name for rung in graphed] == [
        "5 one stream, stage graphed",
        "5 StreamLoader, depth 2, stage graphed",
        "5 one graph",
        *(f"5 StreamLoader, depth {depth}, both graphed" for depth in (1, 2, 3, 4)),
        "ceiling, graphed",
    ]
    assert not any(absent(rung, cuda=True) for rung in ladder("encoder"))


@pytest.fixture(scope="module", params=EXPERIMENTS)
def cell(request: pytest.FixtureRequest) -> Cell:
    return made(request.param, 2, CPU, seed=0)


def test_all_rungs_take_the_same_steps(cell: Cell) -> None:
    said: list[str] = []
    agree(cell, ladder(cell.experiment), said.append)
    assert len(said) == 1
    assert said[0].endswith("rungs take the same 5 first steps")


def test_a_rung_that_does_other_work_is_an_error(cell: Cell) -> None:
    def second_first(work: Work, form: Form) -> Iterator[Taken]:
        swapped = replace(work, pinned=work.pinned[::-1])
        return _article_loops.by_hand(swapped, form)

    rungs = ladder(cell.experiment)
    wrong = replace(named(rungs, "3 by hand"), loop=second_first)
    with pytest.raises(RuntimeError, match="batch 2: rung '3 by hand' does other work than '2 one"):
        agree(cell, [named(rungs, "2 one stream"), wrong], print)


def test_a_step_that_trains_nothing_is_noticed(cell: Cell) -> None:
    net = cell.trained.net
    idle = Form(cell.forms["eager"].stage, lambda images, _: net(images).mean().detach())
    lazy = replace(cell, forms={"eager": idle})
    found = prints(lazy, named(ladder(cell.experiment), "2 one stream"), steps=2)
    assert found.moved == 0
    assert differ(found, found) == "they did not train"


KNOWN = Print((1.0, 2.0), (3.0, 4.0), (5.0, 6.0), 7.0)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (KNOWN, None),
        (replace(KNOWN, losses=(1.001, 2.0)), None),
        (replace(KNOWN, losses=(1.0, 2.1)), "losses of step 1 are 2.1, not 2"),
        (replace(KNOWN, staged=(3.1, 4.0)), "staged of step 0 are 3.1, not 3"),
        (replace(KNOWN, labels=(5.0, 6.001)), "labels of step 1 are 6.001, not 6"),
        (replace(KNOWN, moved=8.0), "they moved the weights by 8, not 7"),
    ],
)
def test_how_steps_differ_is_said(found: Print, said: str | None) -> None:
    assert differ(KNOWN, found) == said


def test_what_is_captured_on_a_gpu_is_what_rungs_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs that only call: every form is there, and makes the same steps."""

    def plain(function: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        return function

    def both(stage: Any, step: Any, *_: Any) -> Callable[..., Any]:
        def run(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            staged = stage(images)
            return step(staged, labels), staged

        return run

    monkeypatch.setattr(_article_graphs, "stage_graph", plain)
    monkeypatch.setattr(_article_graphs, "one_graph", both)
    cell = made("encoder", 2, CPU, seed=0)
    forms = dict(cell.forms) | {"graphed": cell.forms["eager"]}
    images, labels = cell.work.pinned[0]
    _article_cell._graph(forms, cell.trained, images, labels)
    graphed = replace(cell, forms=forms)
    one = prints(graphed, named(ladder("encoder"), "2 one stream"))
    for rung in ladder("encoder"):
        assert not rung.checked or differ(one, prints(graphed, rung)) is None
