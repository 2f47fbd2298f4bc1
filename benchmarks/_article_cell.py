"""One size of one experiment: networks, batches, halves in all forms; rungs do the same work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import _article_equal, _article_feed, _article_graphs
from benchmarks._article_augment import PerImage, Vectorised
from benchmarks._article_costs import gpu_ms
from benchmarks._article_graphs import Stage
from benchmarks._article_lanes import Lane, synchronize
from benchmarks._article_loops import Form, Taken, Work, closed
from benchmarks._article_models import FULL, TINY, Encoder, Shape, Trained, classifier, decoder
from benchmarks._article_rungs import Rung, absent

__all__ = ["Cell", "Print", "agree", "differ", "made", "prints"]

CHECKED_STEPS = 5
MOST_BLOCKS = 160
"""That an encoder can be made longer by, of 0.6 MB of weights each at full size."""

TOLERANCE = 2e-3
"""Relative: of TF32 sums in another order, and far below what another batch would give."""

MOVED_TOLERANCE = 0.08
"""Likewise: many changes are as small as a weight's last bit. One of five steps would be 0.2."""


@dataclass(frozen=True)
class Cell:
    """What the rungs of one size share.

    Attributes:
        experiment: Of `EXPERIMENTS`.
        batch_size: Images.
        work: Batches and the device.
        forms: The halves, by the rungs' names for their forms.
        trained: What the steps train.
        balance: How the encoder was made as slow as the step; None where it was not.
    """

    experiment: str
    batch_size: int
    work: Work
    forms: Mapping[str, Form]
    trained: Trained
    balance: _article_equal.Balance | None = None


def made(experiment: str, batch_size: int, device: torch.device, seed: int) -> Cell:
    """A cell, warm, with its graphs captured where there can be any."""
    cuda = device.type == "cuda"
    shape = FULL if cuda else TINY
    torch.manual_seed(seed)
    pageable = _article_feed.pool(experiment, batch_size, shape.side)
    pinned = _article_feed.pinned(pageable, device)
    images, labels = (tensor.to(device) for tensor in pageable[0])
    stage, net = _halves(experiment, shape, device)
    trained = Trained(net.to(device))
    with torch.no_grad():
        staged = stage(images).clone()
    trained.step(staged, labels)
    work = Work(device, pageable, pinned, (staged, labels))
    forms = {"eager": Form(stage, trained.step)}
    if cuda:
        forms["graphed"] = Form(stage, _article_graphs.step_graph(trained.step, staged, labels))
    balance = None
    if isinstance(stage, Encoder) and experiment == "equal":
        step = forms["graphed" if cuda else "eager"].step
        balance = _balanced(stage, images, lambda: step(staged, labels), device)
        with torch.no_grad():
            staged.copy_(stage(images))
    if cuda:
        _graph(forms, trained, images, labels)
    if experiment == "augment":
        forms["article"] = Form(PerImage(shape.side), trained.step)
    return Cell(experiment, batch_size, work, forms, trained, balance)


def _halves(experiment: str, shape: Shape, device: torch.device) -> tuple[Stage, torch.nn.Module]:
    if experiment == "augment":
        return Vectorised(shape.side, device), classifier(shape)
    encoder = Encoder(shape, MOST_BLOCKS if experiment == "equal" else 0)
    return encoder.to(device).frozen(), decoder(shape)


def _graph(forms: dict[str, Form], trained: Trained, images: Tensor, labels: Tensor) -> None:
    """The forms that have graphs."""
    stage, step = forms["eager"].stage, forms["graphed"].step
    captured = _article_graphs.stage_graph(stage, images)
    both = _article_graphs.one_graph(stage, trained.step, images, labels)
    forms["stage"] = Form(captured, trained.step, fixed=True)
    forms["graphed"] = Form(captured, step, both, fixed=True)


def _balanced(
    encoder: Encoder, images: Tensor, step: Callable[[], object], device: torch.device
) -> _article_equal.Balance:
    """Makes the encoder as slow as the step, both by their GPU time, as graphs where there are."""

    def milliseconds(blocks: int) -> float:
        encoder.used = blocks
        stage: Stage = encoder
        if device.type == "cuda":
            stage = _article_graphs.stage_graph(encoder, images)
        with torch.no_grad():
            return gpu_ms(lambda: stage(images), device)

    found = _article_equal.balance(milliseconds, gpu_ms(step, device), MOST_BLOCKS)
    encoder.used = found.blocks
    return found


# -- the same work ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Print:
    """What a rung's first steps were.

    Attributes:
        losses: Of each.
        staged: The mean size of what the stage gave it.
        labels: The sum of its labels.
        moved: How far all of them moved the weights.
    """

    losses: tuple[float, ...]
    staged: tuple[float, ...]
    labels: tuple[float, ...]
    moved: float


def prints(cell: Cell, rung: Rung, steps: int = CHECKED_STEPS) -> Print:
    """Takes a rung's first steps from the first weights; the host looks when all are queued."""
    cell.trained.reset()
    torch.manual_seed(0)
    synchronize(cell.work.device)
    run = rung.loop(cell.work, cell.forms[rung.form])
    seen = [_seen(taken, cell.work.device) for taken in itertools.islice(run, steps)]
    moved = float(cell.trained.moved())
    closed(run, cell.work.device)
    losses, staged, labels = ([float(one[place]) for one in seen] for place in range(3))
    return Print(tuple(losses), tuple(staged), tuple(labels), moved)


def _seen(taken: Taken, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    current = Lane.current(device)
    if taken.lane is not None:
        current.wait(taken.lane)
        current.reads(taken.loss, taken.staged, taken.labels)
    return taken.loss.clone(), taken.staged.abs().mean(), taken.labels.sum()


def agree(cell: Cell, rungs: Sequence[Rung], say: Callable[[str], None]) -> None:
    """Checks that rungs on the same augmentation take the same steps.

    Raises:
        RuntimeError: One does not.
    """
    first: dict[bool, tuple[str, Print]] = {}
    known = [rung for rung in rungs if rung.checked and not absent(rung, cuda=_cuda(cell))]
    for rung in known:
        found = prints(cell, rung)
        name, expected = first.setdefault(rung.form == "article", (rung.name, found))
        wrong = differ(expected, found)
        if wrong:
            raise RuntimeError(
                f"{cell.experiment}, batch {cell.batch_size}: rung {rung.name!r} does other work "
                f"than {name!r}: {wrong}"
            )
    cell.trained.reset()
    say(f"{len(known)} rungs take the same {CHECKED_STEPS} first steps")


def _cuda(cell: Cell) -> bool:
    return cell.work.device.type == "cuda"


def differ(expected: Print, found: Print) -> str | None:
    """How two rungs' first steps differ, in words; None if they do not."""
    for what, tolerance in (("labels", 0.0), ("staged", TOLERANCE), ("losses", TOLERANCE)):
        pairs = zip(getattr(expected, what), getattr(found, what), strict=True)
        for number, (one, other) in enumerate(pairs):
            if not math.isclose(one, other, rel_tol=tolerance):
                return f"{what} of step {number} are {other:.6g}, not {one:.6g}"
    if not math.isclose(expected.moved, found.moved, rel_tol=MOVED_TOLERANCE):
        return f"they moved the weights by {found.moved:.6g}, not {expected.moved:.6g}"
    return None if found.moved > 0 else "they did not train"
