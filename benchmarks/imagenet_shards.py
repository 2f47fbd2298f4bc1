"""How near to the ceiling do loaders feed a training step?

    scripts/bench                                   all loaders; --help lists the options
    python -m benchmarks.imagenet_shards            the same, from the root of the repository
    scripts/bench --source shards --shards DIR      on tar shards of JPEGs, and peers beside
    scripts/bench ... --augment gpu                 workers only decode, the device does the rest
    scripts/bench ... --workers 2,4,8,14            a run for each number, and a table of them all

Interrupted (Ctrl-C, or a `timeout`), it reports the rounds that are complete.

The ceiling is the same step on one transformed batch that stays on the device. Loaders are measured
in interleaved blocks: NOTE [A block] in _timing.py says how, NOTE [Intervals] in _summary.py what
the intervals mean.

    _options.py            the command line         _timing.py    blocks: their order, one of them
    _sources.py            batches from memory      _freeze.py    workers rest between blocks
    _shards.py             batches from shards      _summary.py   medians and intervals
    _recipes.py            who augments, and how    _report.py    what one run says
    _models.py             models and the step
    _feeds.py, _loaders.py, _peers.py: the loaders  _sweep.py     what several say
                                                    _plot.py      pictures of both
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import _freeze, _models, _recipes, _report, _summary, _sweep, _timing
from benchmarks._feeds import Feed, Pair, Setup
from benchmarks._loaders import RECIPES
from benchmarks._options import CEILING, Options, describe, machine, parse
from benchmarks._peers import absent, unfit
from benchmarks._plot import draw
from benchmarks._report import Run
from benchmarks._require import require
from benchmarks._shards import SOURCES
from benchmarks._sources import Request
from benchmarks._timing import Block, Memory, Span


@dataclass(frozen=True)
class Pace:
    """How long things take where the device is an accelerator, or the CPU.

    Attributes:
        warm: Steps before anything is timed: compiling, autotuning, growing the allocator.
        settle: Before each block; the time is of use where the source is slow.
        block_seconds: What a block lasts, or at least, if `--block-seconds` is not given.
    """

    warm: int
    settle: Span
    block_seconds: float


FAST = Pace(warm=20, settle=Span(10, 0.5), block_seconds=5.0)
SLOW = Pace(warm=3, settle=Span(2), block_seconds=0.5)


@dataclass(frozen=True)
class Bench:
    """What stays the same through the run.

    Attributes:
        options: Complete.
        device: Where the step runs.
        pace: For it.
        step: The training step.
        step_seconds: How long it takes.
        transform: Of the images.
        resident: The ceiling's batch.
        synchronize: Waits for the device.
    """

    options: Options
    device: torch.device
    pace: Pace
    step: _models.Step
    step_seconds: float
    transform: Callable[[Any], Tensor]
    resident: Pair
    synchronize: Callable[[], None]


@dataclass(frozen=True)
class Opened:
    """A loader that is open, and its workers.

    Attributes:
        feed: The loader.
        workers: Its processes, stopped but in its own blocks; None if they are left alone.
    """

    feed: Feed
    workers: _freeze.Workers | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints the report."""
    wanted = parse(arguments)
    first = wanted[0]
    for name in ("tqdm", *(["matplotlib"] if first.plot else [])):
        require(name)  # before the work, not after it
    for options in wanted if first.source == "shards" else ():
        SOURCES[options.source](_request(options))  # what is wrong with them, likewise
    bench = prepare(first)
    about = describe(bench.device)
    runs = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    for options in wanted:
        runs.append(measured(bench, options))
        print(_report.report(runs[-1], about), flush=True)
        if runs[-1].options.blocks < options.blocks:
            break  # interrupted
    if len(runs) > 1:
        print("", *_sweep.report(runs), sep="\n")
    if first.json:
        data = [_report.as_data(one, about) for one in runs]
        text = json.dumps(data[0] if len(data) == 1 else _sweep.as_data(data), indent=1)
        first.json.write_text(text + "\n", encoding="utf-8")
    if first.plot:
        title = f"{first.model}, {first.step} step, batch {first.batch_size}, from {first.source}"
        draw(first.plot, f"{title}, {about['device']}", runs)


def prepare(options: Options) -> Bench:
    """The warm step, and how long it takes."""
    device = _device(options)
    dtype = torch.bfloat16 if options.overlaps else torch.float32
    transform = _recipes.transform(options.augment, options.image_size, device, dtype)
    resident = _resident(options, device, transform)
    synchronize = torch.accelerator.synchronize if options.overlaps else _nothing
    pace = FAST if options.overlaps else SLOW
    step = _step(options, device, dtype, resident, pace)
    seconds = _seconds_a_step(step, resident, pace.warm, synchronize)
    return Bench(options, device, pace, step, seconds, transform, resident, synchronize)


def measured(bench: Bench, options: Options) -> Run:
    """One run with these options, which differ from the bench's in workers and blocks."""
    _leave_cpus(options)
    reasons = {
        name: unfit(name, options.augment) or absent(name, bench.device) for name in options.loaders
    }
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    loaders = tuple(name for name in options.loaders if name not in missing)
    options = _completed(bench, dataclasses.replace(options, loaders=loaders))
    alone, blocks = run(dataclasses.replace(bench, options=options))
    rounds = sum(block.loader == CEILING for block in blocks) - 2  # fewer if it was interrupted
    options = dataclasses.replace(options, blocks=rounds)
    return Run(options, _summary.rows(blocks, CEILING, alone), blocks, missing)


def _device(options: Options) -> torch.device:
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    torch.backends.cudnn.benchmark = True
    if options.overlaps:
        torch.accelerator.set_device_index(device.index or 0)
    _leave_cpus(options)
    return device


def _leave_cpus(options: Options) -> None:
    """Workers need CPUs too: where the step runs on the CPU, it leaves one for each."""
    if not options.overlaps:
        torch.set_num_threads(max(machine().cpus - options.workers, 1))


def _nothing() -> None:
    """The CPU has nothing under way."""


def _resident(options: Options, device: torch.device, transform: Callable[[Any], Tensor]) -> Pair:
    size = (options.batch_size, 3, options.image_size, options.image_size)
    images = torch.randint(0, 256, size, dtype=torch.uint8)
    labels = torch.randint(0, 1000, (options.batch_size,))
    return transform(images.to(device)), labels.to(device)


def _step(
    options: Options, device: torch.device, dtype: torch.dtype, resident: Pair, pace: Pace
) -> _models.Step:
    net = _models.model(options.model, options.image_size)
    step = _models.eager(net, device, dtype)
    if options.step == "item":
        return _models.with_item(step)
    if options.step == "graph":
        for _ in range(pace.warm):
            step(*resident)
        return _models.graphed(step, *resident)
    return step


def _seconds_a_step(
    step: _models.Step, resident: Pair, steps: int, synchronize: Callable[[], None]
) -> float:
    """Of `steps` steps, after as many that are not counted."""
    start = time.perf_counter()
    for _ in range(2):
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step(*resident)
    synchronize()
    return (time.perf_counter() - start) / steps


def _completed(bench: Bench, options: Options) -> Options:
    """The options that depend on the step's time, where they were not given."""
    seconds = options.block_seconds or bench.pace.block_seconds
    steps, late_ms = options.steps, options.late_ms
    if steps is None and options.source != "shards":
        steps = _timing.steps_in_block(
            bench.step_seconds, options.in_workers, seconds, options.late
        )
    if options.late and late_ms is None:
        late_ms = 2e3 * bench.step_seconds
    return dataclasses.replace(
        options,
        block_seconds=seconds if steps is None else None,
        steps=steps,
        late_ms=late_ms if options.late else None,
    )


def run(bench: Bench) -> tuple[dict[str, int | None], list[Block]]:
    """All blocks, in order, and what each loader added to the device's memory when opened.

    Raises:
        KeyboardInterrupt: It was interrupted before a round was complete.
    """
    options, memory = bench.options, Memory(bench.device)
    turns = _timing.schedule(options.loaders, CEILING, options.blocks, options.seed)
    progress = require("tqdm").tqdm(turns, unit="block", dynamic_ncols=True)
    with contextlib.ExitStack() as stack, progress:
        opened, alone = _open_all(bench, stack, memory)
        blocks: list[Block] = []
        try:
            for turn in progress:
                progress.set_postfix_str(f"{turn.loader}, {options.workers} workers")
                blocks.append(_block(bench, turn, opened[turn.loader], memory))
        except KeyboardInterrupt:
            rounds, blocks = _timing.whole_rounds(blocks, options.loaders, CEILING)
            if not rounds:
                raise
    return alone, blocks


def _open_all(
    bench: Bench, stack: contextlib.ExitStack, memory: Memory
) -> tuple[dict[str, Opened], dict[str, int | None]]:
    """Every loader, open and stepped; each is closed with `stack`."""
    setup = _setup(bench)
    opened: dict[str, Opened] = {}
    alone: dict[str, int | None] = {}
    for name in bench.options.loaders:
        bench.synchronize()
        before = memory.reset()
        opened[name] = _open(bench, name, setup, stack)
        bench.synchronize()
        peak = memory.peak()
        alone[name] = None if peak is None else peak - before
    return opened, alone


def _open(bench: Bench, name: str, setup: Setup, stack: contextlib.ExitStack) -> Opened:
    freezes = bench.options.source == "shards"
    with _freeze.born_in() as pids:
        feed = RECIPES[name](setup)
        stack.callback(feed.close)
        if freezes:
            _timing.drain(feed, bench.step_seconds, bench.options.workers)
        _timing.settle(feed, bench.step, _settling(bench))
    if not freezes:
        return Opened(feed, None)
    workers = _freeze.Workers(pids)
    stack.callback(workers.go_on)  # before it is closed: the last callback is called first
    workers.stop()
    return Opened(feed, workers)


def _request(options: Options) -> Request:
    return Request(
        batch_size=options.batch_size,
        image_size=options.image_size,
        workers=options.workers,
        prefetch_factor=options.prefetch_factor,
        late=options.late,
        late_seconds=(options.late_ms or 0.0) / 1e3,
        seed=options.seed,
        shards=options.shards,
        augment=options.augment,
    )


def _setup(bench: Bench) -> Setup:
    options = bench.options
    return Setup(
        source=SOURCES[options.source](_request(options)),
        device=bench.device,
        dtype=bench.resident[0].dtype,
        transform=bench.transform,
        prefetch_batches=options.prefetch_batches,
        in_workers=options.in_workers,
        resident=bench.resident,
    )


def _settling(bench: Bench) -> Span:
    return dataclasses.replace(bench.pace.settle, every=_round(bench.options))


def _span(options: Options) -> Span:
    """A block's: of shards in whole rounds of the workers, and some of them if it ends by time."""
    every = _round(options)
    least = _timing.ROUNDS_IN_BLOCK * every if options.steps is None else 0
    return Span(options.steps, options.block_seconds, every, least)


def _round(options: Options) -> int:
    return options.workers if options.source == "shards" else 1


def _block(bench: Bench, turn: _timing.Turn, opened: Opened, memory: Memory) -> Block:
    feed, workers = opened.feed, opened.workers
    if workers:
        workers.go_on()
    else:
        _timing.drain(feed)
    _timing.settle(feed, bench.step, _settling(bench))
    span = _span(bench.options)
    block = _timing.measure(turn, feed, bench.step, span, bench.synchronize, memory)
    if workers:
        workers.stop()
    return block


if __name__ == "__main__":
    main()
