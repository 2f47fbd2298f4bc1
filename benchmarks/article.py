"""What streams give: both experiments of the article, as a ladder of single changes.

    python -m benchmarks.article [--experiment encoder|augment|equal] [--batch-sizes 8,32]
        [--rounds N] [--quick] [--profile] [--json FILE] [--plot FILE]

from the root of the repository. "Pipelining AI/ML Training Workloads with CUDA Streams" (Towards
Data Science, 2025) runs a frozen encoder beside a decoder that is trained, and augmentation beside a
classifier. Same networks, sizes and kinds of data; the code is written anew from its description:

    0   the article's loops: one stream, and pipelined; pageable copies, the latter with its races
    1   + pinned copies, and the waits that it lacks
    2   + augmentation that is vectorised and never waits; one stream: the base of what follows
    3   + a stream of its own for copy and stage, by hand, one batch ahead
    4   StreamLoader, 1 to 4 batches ahead
    5   + the stage graphed by the user, then both halves, each beside one stream in the same form
    and the ceilings: the step alone, on a batch that stays on the GPU

`equal` is the first experiment with an encoder that is made as slow as the decoder's step.

Two decisions. The vectorised augmentation samples once, crop, resize and rotation together, and blurs
each image with a sigma of its own by two grouped convolutions; its draws are made on the device. And
batches come from a pool in host memory, since making them is not what is asked (_article_feed.py).
Augmentation on the CPU, the article's first figure, is left out: it measures the workers.

Before a size is timed, all rungs but the article's racy one show that they take the same steps.
Interrupted (Ctrl-C, or a `timeout`), it reports the rounds that are complete; JSON is written after
each size. On an H200 all of it takes about six minutes; `--budget` bounds it.

What it is to say in the README, once measured: "On one H200, StreamLoader runs the encoder
experiment at A times one stream at batch 8 and B at batch 512; from batch N on the step fills the
GPU, and moving work beside it gains nothing." `sentence` makes it from a run.

    _article_models.py   networks, the step    _article_cell.py    one size; the same work
    _article_augment.py  augmentation, twice   _article_costs.py   each half alone
    _article_feed.py     batches               _article_equal.py   equal halves
    _article_graphs.py   halves as graphs      _article_timing.py  rounds of blocks
    _article_lanes.py    streams, or none      _article_summary.py ratios and intervals
    _article_loops.py    the loops             _article_report.py  tables and sentences
    _article_rungs.py    the ladder            _article_profile.py, _article_plot.py
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import _article_profile
from benchmarks._article_cell import Cell, agree, made
from benchmarks._article_costs import costs
from benchmarks._article_plot import draw
from benchmarks._article_profile import Profile, profiled
from benchmarks._article_report import LEGEND, claims, report, sentence
from benchmarks._article_rungs import EXPERIMENTS, Rung, absent, ladder
from benchmarks._article_summary import Result, as_data
from benchmarks._article_timing import Block, Pace, close_all, opened, run_rounds, worth
from benchmarks._report import columns
from benchmarks._require import require
from benchmarks._summary import estimate

__all__ = ["Options", "Run", "main", "plan", "seconds_for"]

SIZES = {"encoder": (8, 32, 128, 512), "augment": (8, 32, 128, 512), "equal": (2, 8)}
QUICK_SIZES = {"encoder": (8,), "augment": (32,), "equal": (8,)}
TINY_SIZES = {"encoder": (2, 4), "augment": (2, 4), "equal": (2,)}
"""On the CPU, which only shows that all runs."""

ROUNDS, QUICK_ROUNDS, LEAST_ROUNDS = 5, 3, 3
PACE, QUICK_PACE = Pace(block_seconds=0.25), Pace(block_seconds=0.15)
TINY_PACE = Pace(warm=2, settle=1, block_seconds=0.01, least=2)

BUDGET = 420.0
MAKING = 12.0
"""Seconds, of a cell: its pool, graphs, checks and costs."""

PROFILED = (
    "2 one stream",
    "4 StreamLoader, depth 2",
    "5 one graph",
    "5 StreamLoader, depth 2, both graphed",
)


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        experiments: Which.
        sizes: Of each; empty is the usual ones.
        rounds: Of each size.
        device: Where.
        pace: Of blocks.
        budget: Seconds for all: then a size is content with three rounds.
        profile: Whether to profile sizes that are bound by launches.
        quick: Fewer sizes, too.
        seed: Of weights and data.
        json: Where to write what was found.
        plot: Where to draw it.
    """

    experiments: Sequence[str]
    sizes: Sequence[int]
    rounds: int
    device: torch.device
    pace: Pace
    budget: float
    profile: bool
    quick: bool
    seed: int
    json: Path | None
    plot: Path | None


@dataclass
class Run:
    """What was found so far.

    Attributes:
        options: Of the run.
        results: Of sizes that have a complete round.
        failed: Sizes that could not be measured, with the reason.
        profiles: By size.
        interrupted: Whether it was.
    """

    options: Options
    results: list[Result] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, list[Profile]] = field(default_factory=dict)
    interrupted: bool = False
    start: float = field(default_factory=time.perf_counter)

    def say(self, what: str) -> None:
        """A line of progress."""
        print(f"{time.perf_counter() - self.start:6.1f} s  {what}", flush=True)

    def save(self) -> None:
        """Writes all of it, if asked to."""
        if self.options.json:
            text = json.dumps(self.as_data(), indent=1)
            self.options.json.write_text(text + "\n", encoding="utf-8")

    def as_data(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        options = self.options
        return {
            "benchmark": "article",
            "machine": where(options.device),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "rounds": options.rounds,
            "pace": dataclasses.asdict(options.pace),
            "interrupted": self.interrupted,
            "seconds": time.perf_counter() - self.start,
            "results": [as_data(result) for result in self.results],
            "failed": self.failed,
            "claims": claims(self.results),
            "profiles": {
                name: [dataclasses.asdict(one) for one in found]
                for name, found in self.profiles.items()
            },
        }


def plan(options: Options) -> list[tuple[str, int]]:
    """Experiments and batch sizes, in order."""
    usual = QUICK_SIZES if options.quick else SIZES
    usual = usual if options.device.type == "cuda" else TINY_SIZES
    return [(name, size) for name in options.experiments for size in options.sizes or usual[name]]


def seconds_for(options: Options) -> float:
    """About how long all of it takes on a GPU."""
    each = options.pace.block_seconds * 1.25
    blocks = sum(len(ladder(name)) * options.rounds for name, _ in plan(options))
    return blocks * each + MAKING * len(plan(options))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints as it goes.

    Raises:
        SystemExit: An argument is wrong, or a size could not be measured.
    """
    options = parse(arguments)
    if options.plot:
        require("matplotlib")  # before the work, not after it
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    torch.backends.cudnn.benchmark = True
    run = Run(options)
    todo = plan(options)
    print(f"{where(options.device)}, torch {torch.__version__}; {len(todo)} sizes, about "
          f"{seconds_for(options):.0f} s on a GPU, at most {options.budget:.0f} s or three rounds "
          "of each")  # fmt: skip
    try:
        _measure_all(run, todo)
        if options.profile:
            _profile_all(run)
    except KeyboardInterrupt:
        run.interrupted = True
    _finish(run)


def _measure_all(run: Run, todo: Sequence[tuple[str, int]]) -> None:
    for place, (experiment, size) in enumerate(todo):
        left = run.options.budget - (time.perf_counter() - run.start)
        deadline = time.perf_counter() + left / (len(todo) - place)
        try:
            result = measured(run, experiment, size, deadline)
        except (RuntimeError, ValueError) as error:  # out of memory, too: others go on
            run.failed[f"{experiment}, batch {size}"] = f"{type(error).__name__}: {error}"
            run.say(f"{experiment}, batch {size}: FAILED: {error}")
            result = None
        if result:
            run.results.append(result)
            print("", *report(result), "", sep="\n", flush=True)
        run.save()
        _free(run.options.device)
        if run.interrupted:
            raise KeyboardInterrupt


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def measured(run: Run, experiment: str, size: int, deadline: float) -> Result | None:
    """One size; None if it was interrupted before a round was complete."""
    options, about = run.options, f"{experiment}, batch {size}"
    run.say(f"{about}: making it")
    cell = made(experiment, size, options.device, options.seed)
    rungs, missing = _present(ladder(experiment), options.device)
    agree(cell, rungs, lambda what: run.say(f"{about}: {what}"))
    found = costs(cell.work, cell.forms)
    cell.trained.reset()
    blocks = _blocks(run, cell, rungs, deadline)
    if not blocks:
        return None
    return Result(experiment, size, rungs, missing, found, blocks, cell.balance)


def _present(rungs: Sequence[Rung], device: torch.device) -> tuple[list[Rung], dict[str, str]]:
    """Those that can be run here, and the others with the reason."""
    reasons = {rung.name: absent(rung, cuda=device.type == "cuda") for rung in rungs}
    missing = {name: reason for name, reason in reasons.items() if reason}
    return [rung for rung in rungs if rung.name not in missing], missing


def _blocks(run: Run, cell: Cell, rungs: Sequence[Rung], deadline: float) -> list[Block]:
    """Of complete rounds; notes if it was interrupted."""
    options, about = run.options, f"{cell.experiment}, batch {cell.batch_size}"
    blocks: list[Block] = []
    try:
        ready = opened(cell, rungs, options.pace)
        begin = time.perf_counter()

        def more(done: int) -> bool:
            least = min(LEAST_ROUNDS, options.rounds)
            return worth(time.perf_counter(), begin, deadline, done, least)

        try:
            for found in run_rounds(cell, ready, options.pace, options.rounds, more):
                blocks += found
                run.say(f"{about}: round {found[0].round + 1} of {options.rounds}")
        finally:
            close_all(cell, ready)
    except KeyboardInterrupt:
        run.interrupted = True
    return blocks


def _profile_all(run: Run) -> None:
    """The smallest size of each experiment that is bound by launches, and of equal halves any."""
    options, seen = run.options, set()
    for result in sorted(run.results, key=lambda one: one.batch_size):
        name = f"{result.experiment}, batch {result.batch_size}"
        if result.experiment in seen or (result.gpu_bound and result.experiment != "equal"):
            continue
        seen.add(result.experiment)
        run.say(f"{name}: profiling it")
        cell = made(result.experiment, result.batch_size, options.device, options.seed)
        rungs, _ = _present(ladder(result.experiment), options.device)
        found = profiled(cell, [rung for rung in rungs if rung.name in PROFILED])
        run.profiles[name] = found
        print("", name, *columns(_article_profile.report(found)), "", sep="\n", flush=True)
        run.save()
        del cell
        _free(options.device)


def _finish(run: Run) -> None:
    """What follows from all of it.

    Raises:
        SystemExit: A size could not be measured.
    """
    options = run.options
    if run.results:
        confidence = min(estimate(range(r.rounds)).confidence for r in run.results)
        print(LEGEND.format(confidence=confidence), "", *claims(run.results), sep="\n")
        said = [sentence(run.results, name) for name in options.experiments]
        print(*filter(None, said), sep="\n")
        if options.plot:
            draw(options.plot, f"{where(options.device)}, float32", run.results)
    if run.interrupted:
        print("Interrupted: what was complete is above.")
    run.save()
    run.say("done")
    if run.failed:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in run.failed.items()))


def where(device: torch.device) -> str:
    """The machine."""
    cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if cuda else "the CPU, which overlaps nothing"


def parse(arguments: Sequence[str] | None) -> Options:
    """The command line."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        device = _device(given.device)
        sizes = [_positive("--batch-sizes", text) for text in given.batch_sizes]
        rounds = None if given.rounds is None else _positive("--rounds", given.rounds)
    except ValueError as error:
        parser.error(str(error))
    pace = QUICK_PACE if given.quick else PACE
    return Options(
        experiments=[given.experiment] if given.experiment else list(EXPERIMENTS),
        sizes=sizes,
        rounds=rounds or (QUICK_ROUNDS if given.quick else ROUNDS),
        device=device,
        pace=pace if device.type == "cuda" else TINY_PACE,
        budget=given.budget,
        profile=given.profile,
        quick=given.quick,
        seed=given.seed,
        json=given.json,
        plot=given.plot,
    )


def _device(name: str) -> torch.device:
    """The device called `name`.

    Raises:
        ValueError: It is CUDA, and torch finds none; or something else than that or the CPU.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(device.index or 0)
        return torch.device("cuda", device.index or 0)
    raise ValueError(
        f"--device must be cuda, and torch finds none for {name!r}: run this on a machine with a "
        "GPU, or give --device cpu, where networks are tiny, to see that all runs"
    )


def _positive(name: str, text: str) -> int:
    """A whole number above zero.

    Raises:
        ValueError: It is none.
    """
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{name} takes whole numbers above zero, got {text!r}")
    return int(text)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The article's experiments, one change at a time.")
    add = parser.add_argument
    add("--experiment", choices=list(EXPERIMENTS), help="one of them; all by default")
    add("--batch-sizes", type=_listed, default=[], metavar="N,...", help="instead of the usual")
    add("--rounds", metavar="N", help=f"of blocks; {ROUNDS} by default")
    add("--device", default="cuda", help="cuda, or cpu to see that all runs")
    add("--quick", action="store_true", help=f"{QUICK_ROUNDS} shorter rounds, a size each")
    add("--budget", type=float, default=BUDGET, metavar="S", help="seconds for all of it")
    add("--profile", action="store_true", help="where a step's time goes, if launches bound it")
    add("--seed", type=int, default=0, help="of weights and data")
    add("--json", type=Path, metavar="FILE", help="write every block's values")
    add("--plot", type=Path, metavar="FILE", help="draw ratios against batch sizes")
    return parser


if __name__ == "__main__":
    main()
