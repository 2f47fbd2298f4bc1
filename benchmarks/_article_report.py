"""The ladder in words: a table for each size, the article's figures, and what follows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks._article_rungs import EXPERIMENTS, USUAL
from benchmarks._article_summary import Result, Row, best_single, rows
from benchmarks._report import columns
from benchmarks._summary import Estimate

__all__ = ["LEGEND", "THEIRS", "claims", "interval", "report", "sentence"]

THEIRS = {
    ("encoder", 8): "one stream 83 steps/s, two streams 91 (+9.6 %)",
    (
        "augment",
        32,
    ): "augmented by 8 workers 20.41 steps/s, on the GPU 35.22 (+72.6 %), on a stream "
    "of its own 38.82 (+10.2 % more)",
}
"""The article's, by experiment and batch size: of another machine."""

THEIR_MACHINE = "The article, on an NVIDIA A10G (g5.2xlarge, 8 vCPU)"

HEAD = (
    "rung",
    "steps/s",
    "img/s",
    "over one stream",
    "over the best",
    "of the ceiling",
    "bound by",
)

LEGEND = """\
  over one stream: its rate over the rung of one stream in the same form, round by round; in
    brackets the interval that holds the true median in {confidence:.1%} of runs
  over the best: over the fastest rung of one stream, whatever its form
  of the ceiling: of the step alone on a resident batch, in the same form
  bound by: launches, where the host needs longer to launch both halves than the GPU to run them"""

PAYS = 1.02
"""From this ratio on, its whole interval, looking ahead is said to pay."""

LOSES = 0.98


def report(result: Result) -> list[str]:
    """The table of one size."""
    cells = [HEAD, *(_cells(row, result.batch_size) for row in rows(result))]
    lines = [f"{result.experiment}, batch {result.batch_size}: {EXPERIMENTS[result.experiment]}"]
    lines += [*_costs(result), "", *columns(cells)]
    lines += [f"{name}: {reason}" for name, reason in result.absent.items()]
    best = best_single(result.blocks, result.rungs)
    lines += [f"{result.rounds} rounds. The best of one stream: {best}."]
    theirs = THEIRS.get((result.experiment, result.batch_size))
    return [*lines, f"{THEIR_MACHINE}: {theirs}."] if theirs else lines


def _cells(row: Row, batch_size: int) -> tuple[str, ...]:
    rate = row.rate.median
    return (
        row.rung.name,
        f"{rate:,.1f}",
        f"{rate * batch_size:,.0f}",
        interval(row.over),
        interval(row.best),
        "-" if row.share is None else f"{row.share.median:.3f}",
        row.bound,
    )


def interval(value: Estimate | None) -> str:
    """A ratio and its interval."""
    return "-" if value is None else f"{value.median:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _costs(result: Result) -> list[str]:
    costs = result.costs
    lines = [f"  alone: the copy {costs.copy_ms:.3f} ms"]
    for form in costs.stage:
        stage, step = costs.stage[form], costs.step[form]
        lines.append(
            f"  {form}: GPU stage {stage.gpu_ms:.3f} + step {step.gpu_ms:.3f} ms; to launch them "
            f"{stage.host_ms:.3f} + {step.host_ms:.3f} ms"
        )
        if form in costs.beside:
            beside = costs.beside[form]
            room = (stage.gpu_ms + step.gpu_ms) / beside
            lines.append(
                f"    at once, on two streams, nothing copied: {beside:.3f} ms, {room:.2f} times "
                "the serial rate"
            )
    if result.balance:
        one = result.balance
        unequal = "" if one.equal else ": NOT EQUAL within 10 %"
        lines.append(
            f"  {one.blocks} blocks make the encoder {one.ratio:.2f} of the step, "
            f"{one.target:.3f} ms{unequal}; one stream takes "
            "the sum, side by side the longer at best"
        )
    return lines


# -- what follows -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """Something that is to hold.

    Attributes:
        what: In words.
        holds: Whether it does; None if what it needs was not measured.
        found: The figures.
    """

    what: str
    holds: bool | None
    found: str


def claims(results: Sequence[Result]) -> list[str]:
    """What is claimed of looking ahead, and whether this run bears it out."""
    found = [
        _encoder(results),
        _augmented(results),
        _vectorised(results),
        _equal(results),
        *_harmless(results),
    ]
    words = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}
    return [f"{words[one.holds]}: {one.what} {one.found}".rstrip() for one in found]


USUAL_RUNG = f"4 StreamLoader, depth {USUAL}"


def _encoder(results: Sequence[Result]) -> Claim:
    found = {
        form: value
        for form in ("eager", "graphed")
        for result in results
        if (result.experiment, result.batch_size) == ("encoder", 8)
        if (value := _best_over(result, form)) is not None
    }
    words = ", ".join(f"{form} {interval(value)}" for form, value in found.items())
    holds = max(value.median for value in found.values()) >= 1.096 if found else None
    return Claim("encoder, batch 8: 1.096 of one stream, eager or graphed:", holds, words)


def _best_over(result: Result, form: str) -> Estimate | None:
    """Of StreamLoader at its best depth, over one stream in the same form."""
    known = [r.over for r in rows(result) if _ours(r, form) and r.over is not None]
    return max(known, key=lambda value: value.median, default=None)


def _ours(row: Row, form: str) -> bool:
    return "StreamLoader" in row.rung.name and row.rung.form == form


def _augmented(results: Sequence[Result]) -> Claim:
    found = {
        result.batch_size: value
        for result in results
        if result.experiment == "augment"
        if (value := _best_over(result, "eager")) is not None
    }
    words = ", ".join(f"{size}: {interval(value)}" for size, value in found.items())
    holds = max(value.median for value in found.values()) >= 1.10 if found else None
    return Claim("augment: 1.10 of one stream vectorised at some size;", holds, words)


def _vectorised(results: Sequence[Result]) -> Claim:
    for result in results:
        if (result.experiment, result.batch_size) == ("augment", 32):
            ours, zero = result.row(USUAL_RUNG), result.row("0 article, one stream")
            if ours and zero:
                ratio = ours.rate.median / zero.rate.median
                return Claim(
                    "augment, batch 32: twice the article's loop:", ratio >= 2, f"{ratio:.2f}"
                )
    return Claim("augment, batch 32: twice the article's loop:", None, "")


def _equal(results: Sequence[Result]) -> Claim:
    found = {
        result.batch_size: value
        for result in results
        if result.experiment == "equal"
        if (value := _best_over(result, "graphed") or _best_over(result, "eager")) is not None
    }
    words = ", ".join(f"{size}: {interval(value)}" for size, value in found.items())
    holds = max(value.median for value in found.values()) >= 1.6 if found else None
    return Claim("equal halves: 1.6 of the serial rate at some size;", holds, words)


def _harmless(results: Sequence[Result]) -> list[Claim]:
    """Of the whole interval, where the GPU is the bound: in each form, and of the best forms."""
    forms: dict[str, Estimate] = {}
    best: dict[str, Estimate] = {}
    for result in results:
        name = f"{result.experiment} {result.batch_size}"
        ours = [r for r in rows(result) if "StreamLoader" in r.rung.name and r.bound == "GPU"]
        usual = [r for r in ours if f"depth {USUAL}" in r.rung.name and r.over is not None]
        forms |= {f"{name} {row.rung.form}": row.over for row in usual if row.over}
        known = [row.best for row in ours if row.best is not None]
        if known:
            best[name] = max(known, key=lambda value: value.median)
    return [
        _never_below(f"at depth {USUAL} of one stream in the same form", forms),
        _never_below("at its best of the best of one stream", best),
    ]


def _never_below(of_what: str, found: Mapping[str, Estimate]) -> Claim:
    words = ", ".join(f"{name}: {interval(value)}" for name, value in found.items())
    holds = all(value.low >= LOSES for value in found.values()) if found else None
    what = f"where the GPU is the bound, not below {LOSES} {of_what};"
    return Claim(what, holds, words)


def sentence(results: Sequence[Result], experiment: str) -> str | None:
    """Where looking ahead begins not to pay, for the README; None if nothing was measured."""
    known = sorted(
        (r for r in results if r.experiment == experiment), key=lambda result: result.batch_size
    )
    pairs = [(r, row.over) for r in known if (row := r.row(USUAL_RUNG)) and row.over]
    if not pairs:
        return None
    words = ", ".join(f"{value.median:.2f} at {r.batch_size}" for r, value in pairs)
    pays = [r.batch_size for r, value in pairs if value.low >= PAYS]
    last = f"up to batch {max(pays)} it pays" if pays else "it pays at no size"
    return f"{experiment}: StreamLoader over one stream, eager: {words}; {last}."
