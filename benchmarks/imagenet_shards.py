"""How near to the ceiling do loaders feed a training step?

    scripts/bench                                   all loaders; --help lists the options
    python -m benchmarks.imagenet_shards            the same, from the root of the repository

The ceiling is the same step on one transformed batch that stays on the device. Loaders are measured
in interleaved blocks: NOTE [A block] in _timing.py says how, NOTE [Intervals] in _summary.py what
the intervals mean.

    _options.py   the command line                _loaders.py   the loaders: a table of recipes
    _sources.py   where batches come from         _timing.py    blocks, their order, measuring one
    _models.py    the models and the step         _summary.py   medians and intervals
                                                  _report.py, _plot.py   what is shown
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import _models, _report, _summary, _timing
from benchmarks._loaders import RECIPES, Feed, Pair, Setup
from benchmarks._options import CEILING, Options, machine, parse
from benchmarks._plot import draw
from benchmarks._require import require
from benchmarks._sources import SOURCES, Request
from benchmarks._timing import Block, Memory


@dataclass(frozen=True)
class Pace:
    """How long things take where the device is an accelerator, or the CPU.

    Attributes:
        warm: Steps before anything is timed: compiling, autotuning, growing the allocator.
        settle: Steps before each block.
        block_seconds: What a block lasts at least, if `--steps` is not given.
    """

    warm: int
    settle: int
    block_seconds: float


FAST = Pace(warm=20, settle=10, block_seconds=5.0)
SLOW = Pace(warm=3, settle=2, block_seconds=0.5)


@dataclass(frozen=True)
class Bench:
    """What stays the same through the run.

    Attributes:
        options: Complete.
        device: Where the step runs.
        pace: For it.
        step: The training step.
        transform: Of the images.
        resident: The ceiling's batch.
        synchronize: Waits for the device.
    """

    options: Options
    device: torch.device
    pace: Pace
    step: _models.Step
    transform: _models.Normalize
    resident: Pair
    synchronize: Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints the report."""
    options = parse(arguments)
    for name in ("tqdm", *(["matplotlib"] if options.plot else [])):
        require(name)  # before the work, not after it
    bench = prepare(options)
    alone, blocks = run(bench)
    about = describe(bench.device)
    rows = _summary.rows(blocks, CEILING, alone)
    print(_report.report(bench.options, about, rows, blocks))
    if options.json:
        data = _report.as_data(bench.options, about, rows, blocks)
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        title = f"{options.model}, {options.step} step, batch {options.batch_size}"
        draw(options.plot, f"{title}, {about['device']}", rows, blocks)


def prepare(options: Options) -> Bench:
    """The warm step, and the options that depend on how long it takes."""
    device = _device(options)
    dtype = torch.bfloat16 if options.overlaps else torch.float32
    transform = _models.Normalize(device, dtype)
    resident = _resident(options, device, transform)
    synchronize = torch.accelerator.synchronize if options.overlaps else _nothing
    pace = FAST if options.overlaps else SLOW
    step = _step(options, device, dtype, resident, pace)
    seconds = _seconds_a_step(step, resident, pace.warm, synchronize)
    options = _completed(options, seconds, pace)
    return Bench(options, device, pace, step, transform, resident, synchronize)


def _device(options: Options) -> torch.device:
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    torch.backends.cudnn.benchmark = True
    if options.overlaps:
        torch.accelerator.set_device_index(device.index or 0)
    else:  # workers need CPUs too
        torch.set_num_threads(max(machine().cpus - options.workers, 1))
    return device


def _nothing() -> None:
    """The CPU has nothing under way."""


def _resident(options: Options, device: torch.device, transform: _models.Normalize) -> Pair:
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


def _completed(options: Options, step_seconds: float, pace: Pace) -> Options:
    """The options that depend on the step's time, where they were not given."""
    late_ms = 2e3 * step_seconds if options.late_ms is None else options.late_ms
    steps = options.steps or _timing.steps_in_block(
        step_seconds, options.in_workers, pace.block_seconds, options.late
    )
    return dataclasses.replace(options, steps=steps, late_ms=late_ms if options.late else None)


def run(bench: Bench) -> tuple[dict[str, int | None], list[Block]]:
    """All blocks, in order, and what each loader added to the device's memory when opened."""
    options, memory = bench.options, Memory(bench.device)
    turns = _timing.schedule(options.loaders, CEILING, options.blocks, options.seed)
    progress = require("tqdm").tqdm(turns, unit="block", dynamic_ncols=True)
    with contextlib.ExitStack() as opened, progress:
        feeds, alone = _open_all(bench, opened, memory)
        blocks = []
        for turn in progress:
            progress.set_postfix_str(turn.loader)
            blocks.append(_block(bench, turn, feeds[turn.loader], memory))
    return alone, blocks


def _open_all(
    bench: Bench, opened: contextlib.ExitStack, memory: Memory
) -> tuple[dict[str, Feed], dict[str, int | None]]:
    """Every loader, open and stepped once; each is closed with `opened`."""
    setup = _setup(bench)
    feeds: dict[str, Feed] = {}
    alone: dict[str, int | None] = {}
    for name in bench.options.loaders:
        bench.synchronize()
        before = memory.reset()
        feeds[name] = RECIPES[name](setup)
        opened.callback(feeds[name].close)
        _timing.settle(feeds[name], bench.step, bench.pace.settle)
        bench.synchronize()
        peak = memory.peak()
        alone[name] = None if peak is None else peak - before
    return feeds, alone


def _setup(bench: Bench) -> Setup:
    options = bench.options
    request = Request(
        batch_size=options.batch_size,
        image_size=options.image_size,
        workers=options.workers,
        prefetch_factor=options.prefetch_factor,
        late=options.late,
        late_seconds=(options.late_ms or 0.0) / 1e3,
        seed=options.seed,
    )
    return Setup(
        source=SOURCES[options.source](request),
        device=bench.device,
        transform=bench.transform,
        prefetch_batches=options.prefetch_batches,
        in_workers=options.in_workers,
        resident=bench.resident,
    )


def _block(bench: Bench, turn: _timing.Turn, feed: Feed, memory: Memory) -> Block:
    _timing.settle(feed, bench.step, bench.pace.settle)
    steps = bench.options.steps or 1
    return _timing.measure(turn, feed, bench.step, steps, bench.synchronize, memory)


def describe(device: torch.device) -> dict[str, Any]:
    """What it ran on."""
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else device.type.upper(),
        "cpus": machine().cpus,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_cuda else None,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
