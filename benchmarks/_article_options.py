"""The command line of article.py: what is measured, how long, and where."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks._article_rungs import EXPERIMENTS, ladder
from benchmarks._article_timing import Pace

__all__ = ["LEAST_ROUNDS", "Options", "parse", "plan", "seconds_for", "where"]

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
