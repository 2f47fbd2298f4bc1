"""A half of the article's work as a CUDA graph, as a user captures it, or both halves as one.

Each has a memory pool and a capture stream of its own: graphs that share either may write to the
same scratch memory, and these are replayed at the same time. All are captured before a loader is
open, as its threads may call what a capture forbids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Both", "Stage", "TrainStep", "one_graph", "stage_graph", "step_graph"]

Stage: TypeAlias = Callable[[Tensor], Tensor]
TrainStep: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Both: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From a host batch to the loss, and what the step was given."""

WARM = 3


def stage_graph(stage: Stage, images: Tensor) -> Stage:
    """`stage`, graphed. The next replay overwrites what it returns: a loader's stage clones it.

    Args:
        stage: Draws from the device's default generator, if it draws.
        images: What it is given, on the device.
    """

    def function(batch: Tensor) -> Tensor:  # a module's own forward would be replaced, for all
        return stage(batch)

    with torch.no_grad():
        graphed: Stage = torch.cuda.make_graphed_callables(function, (images.clone(),))  # type: ignore[assignment]
    return graphed


def step_graph(step: TrainStep, batch: Tensor, labels: Tensor) -> TrainStep:
    """All of `step`, forward to optimizer.

    Args:
        step: What is captured.
        batch: The graph reads this very tensor: others are copied into it.
        labels: And this one.
    """
    graph, loss = _captured(lambda: step(batch, labels))

    def replay(new_batch: Tensor, new_labels: Tensor) -> Tensor:
        if new_batch is not batch:
            batch.copy_(new_batch)
            labels.copy_(new_labels)
        graph.replay()
        result: Tensor = loss
        return result

    return replay


def one_graph(stage: Stage, step: TrainStep, images: Tensor, labels: Tensor) -> Both:
    """Both halves, in one stream's order: nothing is copied in between, and one launch does it."""
    fixed = images.clone(), labels.clone()

    def both() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            staged = stage(fixed[0])
        return step(staged, fixed[1]), staged

    graph, results = _captured(both)

    def replay(new_images: Tensor, new_labels: Tensor) -> tuple[Tensor, Tensor]:
        fixed[0].copy_(new_images, non_blocking=True)  # pinned, and nobody writes to a pool
        fixed[1].copy_(new_labels, non_blocking=True)
        graph.replay()
        loss, staged = results
        return loss, staged

    return replay


def _captured(work: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        results = work()
    return graph, results
