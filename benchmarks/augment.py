"""Augmentation of a batch on the GPU: this package beside others, and beside a copy.

    python -m benchmarks.augment [--quick] [--only NAME,...] [--tiles 16x32,...] [--json FILE]

from the root of the repository. Three recipes, each of 256 uint8 images of 375x500, (N, C, H, W),
to 224x224 bfloat16, channels_last:

    crop        RandomResizedCrop, RandomHorizontalFlip, Normalize
    jitter      the same with ColorJitter(0.4, 0.4, 0.4, 0.1) before Normalize
    evaluation  Resize(256), CenterCrop, Normalize

Bytes: the images are 256 * 3 * 375 * 500 = 144 MB, of which the crops are 0.54 or so (of evaluation
all), and the output is 256 * 3 * 224 * 224 * 2 = 77 MB. `copy`, the limit, reads and writes
as many bytes together as crops and output have; `copy-whole`, as whole images and output.
GB/s are of the bytes of `copy`, whatever a contestant moves in fact. What contestants get is noise:
what it shows does not matter for time. On an H200 all takes a minute or so, most of it compilation.

    _augmentations.py     who, and what each does
    _augment_compiled.py  the recipes in plain torch, for torch.compile
    _augment_timing.py    GPU time, Python time, kernels

All contestants take turns, a block each a round, the order turned around every other round. This
package's plans are made beforehand, as a loader does; their own time is a line of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks._augment_timing import Cost, block, cost, kernel_facts
from benchmarks._augmentations import (
    CONTESTANTS,
    RECIPES,
    Images,
    Run,
    boxes,
    planned,
    tiled,
)
from benchmarks._report import columns
from benchmarks._summary import Estimate, estimate

__all__ = ["Bench", "Result", "main", "table"]

COUNT, SIZE, EDGE = 256, (375, 500), 224
SMALL = (4, (24, 32), 14)
"""Count, size and edge on the CPU, which only shows that all runs."""

ROUNDS, QUICK = 9, 3
SUBJECT, LIMIT = "streamloader", "copy"
PLANS = 50


@dataclass
class Result:
    """A contestant's figures for a recipe.

    Attributes:
        name: The contestant.
        absent: Why there are none.
        cost: What was measured once.
        blocks: GPU milliseconds a batch, of each round.
        against: Likewise, over the limit's of the same round.
        facts: Registers and spills, of a sweep.
    """

    name: str
    absent: str | None = None
    cost: Cost | None = None
    blocks: list[float] = field(default_factory=list)
    against: list[float] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)


class Bench:
    """One run, and what it has found so far.

    Args:
        images: What is augmented.
        rounds: How many.
        json: Written each time something was found, if given.
    """

    def __init__(self, images: Images, rounds: int, json: Path | None = None) -> None:
        self.images = images
        self.rounds = rounds
        self.found: dict[str, list[Result]] = {}
        self.plan_ms: dict[str, float] = {}
        self._json = json
        self._start = time.perf_counter()

    def compare(self, recipe: str, names: Sequence[str]) -> list[Result]:
        """All contestants on a recipe."""
        self.plan_ms[recipe] = _plan_ms(recipe, self.images)
        print(f"\n{recipe}: planned in {self.plan_ms[recipe]:.3f} ms a batch", flush=True)
        results = self.found[recipe] = [Result(name, CONTESTANTS[name].lacks) for name in names]
        runs: dict[str, Run] = {}
        for result in results:
            if result.absent is None:
                run = self._prepared(recipe, result)
                if run is not None:
                    runs[result.name] = run
            self._save()
        self._take_turns(results, runs)
        return results

    def sweep(self, recipe: str, tiles: Sequence[tuple[int, int]], warps: Sequence[int]) -> None:
        """This package with other tiles, beside the limit."""
        key = f"{recipe}, tiles"
        results = self.found[key] = [Result(LIMIT)]
        runs = {LIMIT: self._prepared(recipe, results[0])}
        print(f"\n{key}", flush=True)
        for rows, wide in tiles:
            for many in warps:
                result = Result(f"{rows}x{wide}, {many} warps")
                results.append(result)
                known = len(kernel_facts())
                with tiled(rows, wide, many):
                    runs[result.name] = _within(
                        self._prepared(recipe, result, SUBJECT), rows, wide, many
                    )
                result.facts = kernel_facts()[known:]
                self._save()
        self._take_turns(results, {name: run for name, run in runs.items() if run is not None})

    def _prepared(self, recipe: str, result: Result, contestant: str = "") -> Run | None:
        """What is timed, warm; None if it fails, and then the result says why."""
        try:
            run = CONTESTANTS[contestant or result.name].make(recipe, self.images)
            result.cost = cost(run, self.images.device)
        except Exception as error:  # noqa: BLE001  # the others are to run all the same
            result.absent = f"raised {type(error).__name__}: {str(error).splitlines()[0][:150]}"
            run = None
        how = result.absent or f"warm after {result.cost.first_s if result.cost else 0:.1f} s"
        print(f"  {time.perf_counter() - self._start:5.1f} s  {result.name}: {how}", flush=True)
        return run

    def _take_turns(self, results: Sequence[Result], runs: dict[str, Run]) -> None:
        known = [result for result in results if result.name in runs]
        for number in range(self.rounds):
            for result in known if number % 2 == 0 else known[::-1]:
                assert result.cost is not None
                result.blocks.append(block(runs[result.name], result.cost, self.images.device))
            limit = next((result.blocks[-1] for result in known if result.name == LIMIT), None)
            for result in known if limit else ():
                result.against.append(result.blocks[-1] / limit)  # type: ignore[operator]
            self._save()

    def _save(self) -> None:
        if self._json:
            text = json.dumps(self.as_data(), indent=1)
            self._json.write_text(text + "\n", encoding="utf-8")

    def as_data(self) -> dict[str, Any]:
        """All that was found so far."""
        return {
            "benchmark": "augment",
            "device": _where(self.images.device),
            "torch": torch.__version__,
            "images": list(self.images.of(0).shape),
            "edge": self.images.edge,
            "rounds": self.rounds,
            "plan_ms": self.plan_ms,
            "megabytes": {recipe: self.megabytes(recipe) for recipe in RECIPES},
            "about": {name: one.about for name, one in CONTESTANTS.items()},
            "results": {key: [asdict(one) for one in all_] for key, all_ in self.found.items()},
            "seconds": time.perf_counter() - self._start,
        }

    def megabytes(self, recipe: str) -> float:
        """Of the crops and the output of a batch."""
        recipe = recipe.partition(",")[0]
        out = len(self.images.of(0)) * self.images.edge**2 * torch.bfloat16.itemsize
        return 3 * (boxes(recipe, self.images) + out) / 1e6


def _within(run: Run | None, rows: int, wide: int, warps: int) -> Run | None:
    def other(number: int) -> Any:
        assert run is not None
        with tiled(rows, wide, warps):
            return run(number)

    return None if run is None else other


def _plan_ms(recipe: str, images: Images) -> float:
    """Python's time for a plan, the median."""
    spent = []
    for number in range(PLANS):
        start = time.perf_counter()
        planned(recipe, images, number)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent) * 1e3


# -- the tables ---------------------------------------------------------------------------------

HEAD = ("", "GPU ms", "x copy", "GB/s", "kernels", "kernels ms", "Python ms", "waits", "registers")
LEGEND = """\
GPU ms: of a batch, the median of {rounds} blocks, and its interval; x copy: over the limit's block
of the same round; kernels: with copies and fills, and their own time added up; Python ms: of a
call, while the GPU is busy; waits: whether the call waits for the GPU, its time then too. L2 is not
flushed: batches that are larger than it take turns."""


def table(results: Sequence[Result], megabytes: float) -> list[str]:
    """A line each."""
    lines = columns([HEAD, *(_cells(one, megabytes) for one in results if one.blocks)])
    return lines + [f"{one.name}: {one.absent}" for one in results if one.absent]


def _cells(result: Result, megabytes: float) -> tuple[str, ...]:
    spent, cost = estimate(result.blocks), result.cost
    assert cost is not None
    spills = [f"{one['registers']}/{one['spills']}" for one in result.facts]
    return (
        result.name,
        _interval(spent),
        _interval(estimate(result.against)) if result.against else "-",
        f"{megabytes / spent.median:,.0f}",
        "-" if cost.launches is None else f"{cost.launches:,}",
        "-" if cost.device_ms is None else f"{cost.device_ms:.3f}",
        f"{cost.python_ms:.3f}",
        "-" if cost.waits is None else "yes" if cost.waits else "no",
        " ".join(spills) or "-",
    )


def _interval(value: Estimate) -> str:
    return f"{value.median:.3f} [{value.low:.3f}, {value.high:.3f}]"


# -- the command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints as it goes.

    Raises:
        SystemExit: There is no CUDA device, or an argument is wrong.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        recipes, names = _chosen(given.only)
        device = _device(given.device)
        tiles = [_tile(text) for text in given.tiles]
        warps = [int(text) for text in given.warps]
    except ValueError as error:
        parser.error(str(error))
    count, size, edge = (COUNT, SIZE, EDGE) if device.type == "cuda" else SMALL
    images = Images.made(device, count, size, edge)
    bench = Bench(images, QUICK if given.quick else ROUNDS, given.json)
    print(f"{_where(device)}, torch {torch.__version__}: {tuple(images.of(0).shape)} to {edge}")
    for recipe in recipes:
        if not tiles:
            _show(bench, bench.compare(recipe, names), recipe)
            continue
        bench.sweep(recipe, tiles, warps)
        _show(bench, bench.found[f"{recipe}, tiles"], recipe)
    print("", LEGEND.format(rounds=bench.rounds), sep="\n")


def _show(bench: Bench, results: Sequence[Result], recipe: str) -> None:
    print("", *table(results, bench.megabytes(recipe)), sep="\n", flush=True)


def _where(device: torch.device) -> str:
    cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if cuda else "the CPU, wall time"


def _chosen(only: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipes and contestants, all where none is named.

    Raises:
        ValueError: There is none of such a name.
    """
    unknown = set(only) - {*RECIPES, *CONTESTANTS}
    if unknown:
        known = ", ".join([*RECIPES, *CONTESTANTS])
        raise ValueError(f"--only takes {known}; got {', '.join(sorted(unknown))}")
    recipes = [name for name in RECIPES if name in only] or list(RECIPES)
    return recipes, [name for name in CONTESTANTS if name in only] or list(CONTESTANTS)


def _device(name: str) -> torch.device:
    """The device called `name`.

    Raises:
        ValueError: It is CUDA, and torch finds none; or something else than that or the CPU.
    """
    device = torch.device(name)
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        return device
    raise ValueError(
        f"--device must be cuda, and torch finds none for {name!r}: run this on a machine with a "
        "GPU, or give --device cpu, where images are tiny, to see that all runs"
    )


def _tile(text: str) -> tuple[int, int]:
    """Rows and columns.

    Raises:
        ValueError: They are not two powers of two.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--tiles takes ROWSxCOLUMNS, got {text!r}")
    rows, wide = map(int, parts)
    if rows & (rows - 1) or wide & (wide - 1) or not rows * wide:
        raise ValueError(f"--tiles takes powers of two, got {text!r}")
    return rows, wide


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Augmentation on the GPU, beside others' and a copy."
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see that all runs")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds, not {ROUNDS}")
    parser.add_argument(
        "--only", type=_listed, default=[], metavar="NAME,...", help="recipes, contestants"
    )
    parser.add_argument(
        "--tiles", type=_listed, default=[], metavar="RxC,...", help="this package with other tiles"
    )
    parser.add_argument(
        "--warps", type=_listed, default=["4"], metavar="N,...", help="with --tiles"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    return parser


if __name__ == "__main__":
    main()
