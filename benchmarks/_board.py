"""The board of races.py as data: who runs what, a table of what was found. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from benchmarks._contestants import Contestant
from benchmarks._memory import Peak
from benchmarks._setting import Count
from benchmarks._trials import TRIALS, Trial

__all__ = ["Blank", "Cell", "Row", "as_json", "blank", "chosen", "table", "verdict"]


@dataclass(frozen=True)
class Blank:
    """A trial without a result.

    Attributes:
        short: What the table shows: "n/a", "absent", or "raised".
        reason: Why.
    """

    short: str
    reason: str


Cell: TypeAlias = Count | Peak | Blank


@dataclass(frozen=True)
class Row:
    """A contestant's results.

    Attributes:
        name: Its name.
        about: How it was used.
        version: Of its package; empty if it has none.
        depth: How many batches ahead it was.
        cells: Its results, by trial.
        beyond: Trials that its documentation excludes, and how.
    """

    name: str
    about: str
    version: str
    depth: int
    cells: Mapping[str, Cell]
    beyond: Mapping[str, str] = field(default_factory=dict)


def blank(contestant: Contestant, trial: Trial, absent: str | None) -> Blank | None:
    """Why `contestant` does not run `trial`; None if it does.

    Args:
        contestant: Who.
        trial: What.
        absent: Why it runs none, if so.
    """
    if absent is not None:
        return Blank("absent", absent)
    lacking = contestant.lacks.get(trial.needs) if trial.needs else None
    return None if lacking is None else Blank("n/a", lacking)


def chosen(
    only: Sequence[str], contestants: Sequence[str], trials: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The contestants and the trials that `only` names; all of a kind of which it names none.

    Raises:
        ValueError: A name is neither.
    """
    unknown = [name for name in only if name not in (*contestants, *trials)]
    if unknown:
        raise ValueError(
            f"only must name contestants or trials, got {', '.join(unknown)}: contestants are "
            f"{', '.join(contestants)}; trials are {', '.join(trials)}"
        )
    some = [name for name in contestants if name in only]
    of = [name for name in trials if name in only]
    return some or list(contestants), of or list(trials)


def verdict(row: Row) -> str:
    """What a row comes to, in a few words.

    Left out is what only StreamLoader promises, and what the contestant's documentation excludes.
    """
    beyond = _BEYOND | row.beyond.keys()
    cells = {name: cell for name, cell in row.cells.items() if name not in beyond}
    absent = [cell for cell in row.cells.values() if isinstance(cell, Blank)]
    if absent and absent[0].short == "absent":
        return absent[0].reason
    counts = [cell for cell in cells.values() if isinstance(cell, Count)]
    blanks = [cell for cell in cells.values() if isinstance(cell, Blank)]
    raised = sum(cell.short == "raised" for cell in blanks)
    wrong, of = sum(count.wrong for count in counts), sum(count.of for count in counts)
    said = ["no batch wrong" if not wrong else f"{wrong} of {of} batches wrong"] if counts else []
    return ", ".join([*said, *([f"{raised} raised"] if raised else [])])


_BEYOND = frozenset(name for name, trial in TRIALS.items() if trial.beyond)


def table(rows: Sequence[Row], trials: Mapping[str, Trial]) -> list[str]:
    """The board: a line for each contestant, then what the columns are, and what needs words."""
    names = list(trials)
    head = ["", "ahead", *names, "verdict"]
    body = [
        [row.name, str(row.depth), *(_shown(row, name) for name in names), verdict(row)]
        for row in rows
    ]
    lines = _columns([head, *body])
    lines += ["", _LEGEND]
    lines += [
        f"  {name:<10}{trial.about}{' *' if trial.beyond else ''}" for name, trial in trials.items()
    ]
    lines += ["", "As each was used:"]
    lines += [f"  {row.name:<16}{_used(row)}" for row in rows]
    return lines + _excluded(rows, names) + _notes(rows)


_LEGEND = (
    "Wrong batches, of how many; memory in batches as they are on the host; * is beyond what peers "
    "promise:"
)


def _used(row: Row) -> str:
    return f"{row.about} ({row.version})" if row.version else row.about


def _excluded(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    lines = [
        f"  {row.name}: {name}: {reason}"
        for row in rows
        for name, reason in row.beyond.items()
        if name in names
    ]
    said = "Beyond what its own documentation promises (*), and not in its verdict:"
    return ["", said, *lines] if lines else []


def _notes(rows: Sequence[Row]) -> list[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, cell in row.cells.items():
            if isinstance(cell, Blank) and cell.short != "absent":
                found.setdefault(f"{row.name}: {cell.short}: {cell.reason}", []).append(name)
    lines = [f"  {text} ({', '.join(names)})" for text, names in found.items()]
    return ["", "Without a result:", *lines] if lines else []


def _shown(row: Row, name: str) -> str:
    """A cell's text; a star if the row's verdict leaves it out, though others' count it."""
    cell = row.cells[name]
    starred = name in row.beyond and isinstance(cell, Count)
    return _short(cell) + ("*" if starred else "")


def _short(cell: Cell) -> str:
    if isinstance(cell, Count):
        return f"{cell.wrong}/{cell.of}"
    if isinstance(cell, Peak):
        return f"{cell.batches:.1f}"
    return cell.short


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The cells in columns as wide as their widest; the first and the last are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if number in (0, last) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain data, each cell with its kind."""
    return [
        {
            "name": row.name,
            "about": row.about,
            "version": row.version,
            "depth": row.depth,
            "verdict": verdict(row),
            "beyond": dict(row.beyond),
            "trials": {
                name: {"kind": type(cell).__name__.lower(), **asdict(cell)}
                for name, cell in row.cells.items()
            },
        }
        for row in rows
    ]
