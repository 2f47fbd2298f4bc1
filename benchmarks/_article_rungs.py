"""The ladder: which loop with which halves, in what order, and compared with what.

Each rung is one change to one before it. There are three forms of one stream (eager, the stage as a
graph, all as one graph), and what runs beside the step is compared with its own form, so that
neither a graph's gain nor vectorised augmentation's is taken for the streams'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import _article_loops as loops
from benchmarks._article_loops import Loop

__all__ = ["DEPTHS", "EXPERIMENTS", "GRAPHS", "Rung", "absent", "ladder", "named", "singles"]

EXPERIMENTS = {
    "encoder": "a frozen encoder before a decoder that is trained (256 px, 10 classes a pixel)",
    "augment": "crop, resize, rotation, blur and normalise on the GPU before a classifier",
    "equal": "the first, with an encoder made as slow as the decoder's step",
}

DEPTHS = (1, 2, 3, 4)
USUAL = 2
"""StreamLoader's own default."""

GRAPHS = "CUDA graphs need a CUDA device"


@dataclass(frozen=True)
class Rung:
    """One line of the table.

    Attributes:
        name: Starts with its number in the ladder.
        about: What is changed.
        loop: Runs it.
        form: Of the halves: "article", "eager", "stage" (that one graphed) or "graphed" (both).
        single: Whether all is in one stream's order.
        base: The rung of one stream in the same form; its own name where it is that; None for the
            ceilings.
        ceiling: What its rate is a share of.
        checked: Whether it must take the same steps as others on the same augmentation.
    """

    name: str
    about: str
    loop: Loop
    form: str = "eager"
    single: bool = False
    base: str | None = None
    ceiling: str = "ceiling"
    checked: bool = True

    @property
    def graphs(self) -> bool:
        """Whether it needs CUDA graphs."""
        return self.form in ("stage", "graphed")


ONE, ONE_STAGE, ONE_GRAPH = "2 one stream", "5 one stream, stage graphed", "5 one graph"
CEILING, CEILING_GRAPH = "ceiling", "ceiling, graphed"


def ladder(experiment: str) -> list[Rung]:
    """All rungs of an experiment, from the lowest."""
    if experiment == "equal":
        kept = {ONE, "3 by hand", "4 StreamLoader, depth 2", ONE_GRAPH, CEILING, CEILING_GRAPH}
        return [r for r in _upper(DEPTHS) if r.name in kept or r.name.endswith(", both graphed")]
    if experiment == "encoder":
        return [*_encoder(), *_upper(DEPTHS)]
    return [*_augment(), *_upper((USUAL,))]


def _encoder() -> list[Rung]:
    zero, two = "0 article, one stream", "0 article, two streams"
    return [
        Rung(zero, "pageable copies", loops.one_stream(pinned=False), single=True, base=zero),
        Rung(
            two,
            "its pipelined loop, races and all",
            loops.article(with_stage=False, mended=False),
            base=zero,
            checked=False,
        ),
        Rung(
            "1 two streams, mended",
            "that, pinned, with the waits it lacks",
            loops.article(with_stage=False, mended=True),
            base=ONE,
        ),
    ]


def _augment() -> list[Rung]:
    zero, one = "0 article, one stream", "1 one stream, pinned"
    form = "article"
    return [
        Rung(zero, "pageable copies", loops.one_stream(pinned=False), form, single=True, base=zero),
        Rung(
            "0 article, two streams",
            "its pipelined loop, races and all",
            loops.article(with_stage=True, mended=False),
            form,
            base=zero,
            checked=False,
        ),
        Rung(one, "pinned copies", loops.one_stream(pinned=True), form, single=True, base=one),
        Rung(
            "1 two streams, mended",
            "the pipelined loop, pinned, with the waits it lacks",
            loops.article(with_stage=True, mended=True),
            form,
            base=one,
        ),
    ]


def _upper(graphed_depths: Sequence[int]) -> list[Rung]:
    streams = [
        Rung(
            f"4 StreamLoader, depth {depth}",
            "its default settings",
            loops.streamed(depth),
            base=ONE,
        )
        for depth in DEPTHS
    ]
    both = [
        Rung(
            f"5 StreamLoader, depth {depth}, both graphed",
            "the stage's graph, cloned, and the step's",
            loops.streamed(depth),
            "graphed",
            base=ONE_GRAPH,
            ceiling=CEILING_GRAPH,
        )
        for depth in graphed_depths
    ]
    return [
        Rung(
            ONE,
            "pinned copies, stage and step in one stream; augmentation vectorised",
            loops.one_stream(pinned=True),
            single=True,
            base=ONE,
        ),
        Rung("3 by hand", "copy and stage on a stream of their own", loops.by_hand, base=ONE),
        *streams,
        Rung(
            ONE_STAGE,
            "the stage as a graph",
            loops.one_stream(pinned=True),
            "stage",
            single=True,
            base=ONE_STAGE,
        ),
        Rung(
            f"5 StreamLoader, depth {USUAL}, stage graphed",
            "the stage's graph, cloned",
            loops.streamed(USUAL),
            "stage",
            base=ONE_STAGE,
        ),
        Rung(
            ONE_GRAPH,
            "copies, then stage and step in one launch",
            loops.whole,
            "graphed",
            single=True,
            base=ONE_GRAPH,
            ceiling=CEILING_GRAPH,
        ),
        *both,
        Rung(CEILING, "the step alone, its batch resident", loops.resident, checked=False),
        Rung(
            CEILING_GRAPH,
            "the same as a graph",
            loops.resident,
            "graphed",
            ceiling=CEILING_GRAPH,
            checked=False,
        ),
    ]


def absent(rung: Rung, *, cuda: bool) -> str | None:
    """Why a rung cannot be run; None if it can."""
    return GRAPHS if rung.graphs and not cuda else None


def named(rungs: Sequence[Rung], name: str) -> Rung:
    """The rung of that name, which there is."""
    return next(rung for rung in rungs if rung.name == name)


def singles(rungs: Sequence[Rung]) -> list[str]:
    """The names of those that use one stream."""
    return [rung.name for rung in rungs if rung.single]
