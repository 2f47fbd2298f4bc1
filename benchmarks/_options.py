"""The command line of imagenet_shards.py, and what it means on this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._loaders import RECIPES
from benchmarks._models import IMAGE_SIZES, STEPS
from benchmarks._sources import SOURCES

__all__ = ["CEILING", "Machine", "Options", "machine", "parse", "resolved"]

CEILING = "ceiling"


@dataclass(frozen=True)
class Machine:
    """What the defaults depend on.

    Attributes:
        accelerator: The type of the accelerator, None without one.
        cpus: How many this process may use.
    """

    accelerator: str | None
    cpus: int


@dataclass(frozen=True)
class Options:
    """One run's settings, none of them open.

    Attributes:
        source: A key of `_sources.SOURCES`.
        loaders: Keys of `_loaders.RECIPES`, the ceiling always among them.
        model: A key of `_models.IMAGE_SIZES`.
        step: One of `_models.STEPS`.
        device: As torch names it.
        batch_size: Images in a batch.
        image_size: Their width and height in pixels.
        workers: Processes of each loader's DataLoader.
        prefetch_factor: Batches that each of them has in hand.
        prefetch_batches: StreamLoader's.
        blocks: Timed blocks of each loader.
        steps: Steps in a block; None until `_timing.steps_in_block` knows the step's time.
        late: Every how manyth batch comes late; 0 is none.
        late_ms: By how much; None until the step's time is known, which it is twice of.
        seed: Of images, weights, and the order of the blocks.
        json: Where to write every block's values.
        plot: Where to write the picture.
    """

    source: str
    loaders: tuple[str, ...]
    model: str
    step: str
    device: str
    batch_size: int
    image_size: int
    workers: int
    prefetch_factor: int
    prefetch_batches: int
    blocks: int
    steps: int | None
    late: int
    late_ms: float | None
    seed: int
    json: Path | None
    plot: Path | None

    @property
    def in_workers(self) -> int:
        """How many batches the workers can have in hand."""
        return self.workers * self.prefetch_factor

    @property
    def overlaps(self) -> bool:
        """Whether the device works beside the CPU."""
        return not self.device.startswith("cpu")


def machine() -> Machine:
    """This one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    usable = getattr(os, "sched_getaffinity", None)
    cpus = len(usable(0)) if usable else os.cpu_count() or 1
    return Machine(found.type if found else None, cpus)


def parse(arguments: Sequence[str] | None) -> Options:
    """The settings that the command line and this machine give; it exits on a bad one."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    try:
        return resolved(given, machine())
    except ValueError as error:
        parser.error(str(error))


def resolved(given: dict[str, Any], here: Machine) -> Options:
    """The settings, with a default in place of every None that the machine or the model decides.

    Raises:
        ValueError: Two of them do not go together, or a number is too small.
    """
    device = given["device"] or here.accelerator or "cpu"
    overlaps = not device.startswith("cpu")
    model = given["model"] or ("resnet50" if overlaps else "resnet18")
    defaults = {
        "device": device,
        "model": model,
        "batch_size": 256 if overlaps else 16,
        "image_size": IMAGE_SIZES[model] if overlaps else min(IMAGE_SIZES[model], 64),
        "workers": max(min(14, here.cpus - 2), 1),
    }
    values = given | {name: value for name, value in defaults.items() if given[name] is None}
    values["loaders"] = _loaders(given["loaders"])
    _check(values)
    return Options(**values)


def _loaders(text: str) -> tuple[str, ...]:
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise ValueError(f"--loaders must be among {', '.join(RECIPES)}, got {unknown[0]!r}")
    return (*(name for name in names if name != CEILING), CEILING)


def _check(values: dict[str, Any]) -> None:
    if values["step"] == "graph" and not values["device"].startswith("cuda"):
        raise ValueError(f"--step graph needs a CUDA device, got {values['device']}")
    smallest = {"batch_size": 2, "late": 0, "seed": 0, "prefetch_batches": 0}
    for name, value in values.items():
        least = smallest.get(name, 1)
        if isinstance(value, int) and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="How near to the ceiling do loaders feed a training step? The ceiling is the "
        "same step on one batch that stays on the device."
    )
    add = parser.add_argument
    add("--source", choices=SOURCES, default="memory", help="where batches come from")
    add("--loaders", default=",".join(RECIPES), metavar="A,B", help="default: %(default)s")
    add("--model", choices=IMAGE_SIZES, help="default: resnet50, on the CPU resnet18")
    add("--step", choices=STEPS, default="eager", help="default: %(default)s")
    add("--device", help="default: the accelerator, else the CPU")
    add("--batch-size", type=int, metavar="N", help="default: 256, on the CPU 16")
    add("--image-size", type=int, metavar="PX", help="default: the model's, on the CPU at most 64")
    add("--workers", type=int, metavar="N", help="default: all CPUs but two, at most 14")
    add("--prefetch-factor", type=int, default=4, metavar="N", help="the DataLoader's; default: 4")
    add("--prefetch-batches", type=int, default=2, metavar="N", help="StreamLoader's; default: 2")
    add("--blocks", type=int, default=7, metavar="N", help="timed blocks of each loader; default 7")
    add("--steps", type=int, metavar="N", help="default: 3 times what workers have in hand or more")
    add("--late", type=int, default=0, metavar="N", help="every Nth batch comes late; default: no")
    add("--late-ms", type=float, metavar="MS", help="by how much; default: twice the step's time")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    add("--json", type=Path, metavar="FILE", help="write every block's values")
    add("--plot", type=Path, metavar="FILE", help="draw shares of the ceiling and all blocks")
    return parser
