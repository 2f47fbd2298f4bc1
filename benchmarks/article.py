"""What streams give: both experiments of the article, as a ladder of single changes.

    python -m benchmarks.article [--experiment encoder|augment|equal] [--batch-sizes 8,32]
        [--rounds N] [--quick] [--profile] [--json FILE] [--plot FILE]

from the root of the repository. "Pipelining AI/ML Training Workloads with CUDA Streams" (Towards
Data Science, 2025) runs a frozen encoder beside a decoder that is trained, and augmentation beside
a classifier. Same networks, sizes and kinds of data; the code is written anew from its description:

    0   the article's loops: one stream, and pipelined; pageable copies, the latter with its races
    1   + pinned copies, and the waits that it lacks
    2   + augmentation that is vectorised and never waits; one stream: the base of what follows
    3   + a stream of its own for copy and stage, by hand, one batch ahead
    4   StreamLoader, 1 to 4 batches ahead
    5   + the stage graphed by the user, then both halves, each beside one stream in the same form
    and the ceilings: the step alone, on a batch that stays on the GPU

`equal` is the first experiment with an encoder that is made as slow as the decoder's step.

Two decisions. The vectorised augmentation samples once, crop, resize and rotation together, and
blurs each image with a sigma of its own by two grouped convolutions; its draws are made on the
device. And batches come from a pool in host memory, since making them is not what is asked
(_article_feed.py). Augmentation on the CPU, the article's first figure, is left out: it measures
the workers.

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
    _article_rungs.py    the ladder            _article_options.py, _profile.py, _plot.py
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import _article_profile
from benchmarks._article_cell import Cell, agree, made
from benchmarks._article_costs import costs
from benchmarks._article_options import LEAST_ROUNDS, Options, parse, plan, seconds_for, where
from benchmarks._article_plot import draw
from benchmarks._article_profile import Profile, profiled
from benchmarks._article_report import LEGEND, claims, report, sentence
from benchmarks._article_rungs import Rung, absent, ladder
from benchmarks._article_summary import Result, as_data
from benchmarks._article_timing import Block, close_all, opened, run_rounds, worth
from benchmarks._report import columns
from benchmarks._require import require
from benchmarks._summary import estimate

__all__ = ["Run", "main"]

PROFILED = (
    "2 one stream",
    "4 StreamLoader, depth 2",
    "5 one graph",
    "5 StreamLoader, depth 2, both graphed",
)


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
            "claims": claims(self.results) if options.device.type == "cuda" else [],
            "profiles": {
                name: [dataclasses.asdict(one) for one in found]
                for name, found in self.profiles.items()
            },
        }


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
    if options.device.type == "cpu":
        torch.set_num_threads(1)  # those of a pool would fight the loaders' for the cores
    run = Run(options)
    todo = plan(options)
    print(f"{where(options.device)}, torch {torch.__version__}; {len(todo)} sizes, about "
          f"{seconds_for(options):.0f} s on a GPU, at most {options.budget:.0f} s or three rounds "
          "of each")  # fmt: skip
    try:
        _measure_all(run, todo)
        if options.profile:
            _profile_all(run)
    except RuntimeError as error:  # of profiling: what was timed is to be told all the same
        run.failed["profile"] = f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        run.interrupted = True
    _finish(run)


def _measure_all(run: Run, todo: Sequence[tuple[str, int]]) -> None:
    for place, (experiment, size) in enumerate(todo):
        left = run.options.budget - (time.perf_counter() - run.start)
        deadline = time.perf_counter() + left / (len(todo) - place)
        try:
            _free(run.options.device)
            result = measured(run, experiment, size, deadline)
        except (RuntimeError, ValueError) as error:  # out of memory, too: others go on
            run.failed[f"{experiment}, batch {size}"] = f"{type(error).__name__}: {error}"
            run.say(f"{experiment}, batch {size}: FAILED: {error}")
            result = None
        if result:
            run.results.append(result)
            print("", *report(result), "", sep="\n", flush=True)
        run.save()
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
        print(LEGEND.format(confidence=confidence), "", sep="\n")
        said = [sentence(run.results, name) for name in options.experiments]
        cuda = options.device.type == "cuda"
        print(*(claims(run.results) if cuda else ["Overlap needs an accelerator."]), sep="\n")
        print(*filter(None, said if cuda else []), sep="\n")
        if options.plot:
            draw(options.plot, f"{where(options.device)}, float32", run.results)
    if run.interrupted:
        print("Interrupted: what was complete is above.")
    run.save()
    run.say("done")
    if run.failed:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in run.failed.items()))


if __name__ == "__main__":
    main()
