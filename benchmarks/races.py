"""The board: who hands out wrong batches, of how many, and who needs how much memory.

    python -m benchmarks.races [--quick] [--only NAME,...] [--json FILE]    from the repository

Each contestant runs each trial, a loop that only queues work, from a fresh start: nothing under
way, nothing cached. A trial is a few seconds at most, the board some two minutes on an H200.

    _contestants.py  StreamLoader, loops that people write, timm, torchtnt, SPDL: the rows
    _setting.py      what a trial runs on; how wrong batches are counted
    _trials.py       the trials that count them
    _memory.py       those that measure memory
    _board.py        who runs what, and the table

What the columns mean stands under the table. Two are no fault of a peer's, since it promises
nothing there: a source that fills the same memory again. The verdict leaves them out, and with them
what a peer's own documentation excludes, which is marked in its row and said under the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks._board import Blank, Cell, Row, as_json, blank, chosen, table, verdict
from benchmarks._contestants import CONTESTANTS, Contestant, Transform, missing
from benchmarks._memory import MEMORY
from benchmarks._setting import Setting
from benchmarks._trials import TRIALS, Trial

__all__ = ["board", "main", "run", "settle"]

ALL = TRIALS | MEMORY
COUNT, QUICK = 40, 12


def run(contestant: Contestant, trial: Trial, setting: Setting) -> Cell:
    """One cell of the board: the trial's result, or what it raised."""
    settle(setting.device)
    cuda = setting.device.type == "cuda"
    apart = torch.cuda.Stream(setting.device) if cuda and contestant.apart else None
    try:
        with torch.cuda.stream(apart):  # of None, it does nothing
            found: Cell = trial.run(setting)
    except Exception as error:  # noqa: BLE001  # the others are to run all the same
        found = Blank("raised", f"{type(error).__name__}: {str(error).partition('. ')[0]}")
    settle(setting.device)
    return found


def settle(device: torch.device) -> None:
    """Leaves the next trial nothing of this one's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _row(
    name: str, trials: Sequence[str], device: torch.device, depth: int, count: int
) -> tuple[Row, float]:
    """A contestant's row, and the seconds that it took."""
    contestant, start = CONTESTANTS[name], time.perf_counter()
    ahead = depth if contestant.depth is None else contestant.depth
    absent = missing(contestant, device)

    def wrap(source: Iterable[Any], transform: Transform | None) -> Iterable[Any]:
        return contestant.wrap(source, device, ahead, transform)

    setting = Setting(wrap, device, contestant.pinned, count)
    if device.type != "cuda":
        setting = dataclasses.replace(setting, side=8)  # nothing can race: less will do
    cells: dict[str, Cell] = {}
    for key in trials:
        cells[key] = blank(contestant, ALL[key], absent) or run(contestant, ALL[key], setting)
    row = Row(name, contestant.about, _version(contestant), ahead, cells, contestant.beyond)
    return row, time.perf_counter() - start


def _version(contestant: Contestant) -> str:
    installed = {name for names in metadata.packages_distributions().values() for name in names}
    wanted = set(contestant.packages.values())
    found = sorted(n for n in installed if n.replace("-", "_").partition("_")[0] in wanted)
    return ", ".join(f"{name} {metadata.version(name)}" for name in found)


def board(
    names: Sequence[str], trials: Sequence[str], device: torch.device, depth: int, count: int
) -> Iterator[Row]:
    """All rows, each as soon as it is complete.

    Args:
        names: Contestants.
        trials: Theirs.
        device: Where they run; on the CPU nothing can race.
        depth: How many batches ahead, for those that let one choose.
        count: Batches of a trial, a multiple of four.
    """
    for name in names:
        row, seconds = _row(name, trials, device, depth, count)
        print(f"{name}: {verdict(row)} ({seconds:.1f} s)", flush=True)
        yield row


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the board, and prints it.

    Raises:
        SystemExit: There is no CUDA device, or an argument is wrong.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        names, trials = chosen(given.only, list(CONTESTANTS), list(ALL))
        device = _device(given.device)
    except ValueError as error:
        parser.error(str(error))
    _make_current(device)
    start = time.perf_counter()
    count = QUICK if given.quick else COUNT
    rows: list[Row] = []
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU: no races"
    for row in board(names, trials, device, given.depth, count):
        rows.append(row)
        if given.json:  # each time, so that one that ends the process leaves what was before it
            data = {"benchmark": "races", "device": where, "torch": torch.__version__}
            text = json.dumps(data | {"count": count, "rows": as_json(rows)}, indent=1)
            given.json.write_text(text + "\n", encoding="utf-8")
    print(f"\ntorch {torch.__version__} on {where}, {time.perf_counter() - start:.0f} s in all\n")
    print(*table(rows, {key: ALL[key] for key in trials}), sep="\n")


def _device(name: str) -> torch.device:
    """The device called `name`, with its index.

    Raises:
        ValueError: It is CUDA, and torch finds none; or it is something else than that or the CPU.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        found = "no CUDA device" if device.type == "cuda" else f"{device.type}"
        raise ValueError(
            f"device must be CUDA, got {found}: run this on a machine with one, or give "
            "--device cpu, where nothing can race, to see that all runs"
        )
    return torch.empty(0, device=device).device


def _make_current(device: torch.device) -> None:
    """Makes `device` the one that is meant where none is named.

    The kernel that keeps a stream busy goes to the current device, and there torchtnt and SPDL make
    their streams: with another one current, steps would take no time and nothing could race. SPDL
    takes the device that it copies to from LOCAL_RANK, and its thread has a current device of its
    own.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Who hands out wrong batches, of how many.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see that all runs")
    parser.add_argument("--depth", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} batches, not {COUNT}")
    parser.add_argument(
        "--only", type=_names, default=[], metavar="NAME,...", help="contestants, trials"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the board as JSON")
    return parser


if __name__ == "__main__":
    main()
