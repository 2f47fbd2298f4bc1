"""Devices without streams of their own: the CPU, and MPS, where copies block.

Work happens when it is called, so order is program order: an event has always completed, and
waiting and recording have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from streamloader.device.seam import Device, Event, Stream

__all__ = ["Streamless", "seeded"]


class Streamless(Device):
    """The CPU or MPS, as a `Device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = device.type == "cpu"

    @override
    def stream(self, name: str) -> Stream:
        return None

    @override
    def current(self) -> Stream:
        return None

    @override
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    @override
    def record(self, stream: Stream) -> Event:
        return None

    @override
    def wait(self, stream: Stream, event: Event) -> None:
        pass

    @override
    def done(self, event: Event) -> bool:
        return True

    @override
    def slab(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    @override
    def pin(self, memory: Tensor) -> Callable[[], object]:
        return lambda: None  # copies block, from whatever memory

    @override
    def arena(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @override
    def copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)

    @override
    def uses(self, tensor: Tensor, stream: Stream) -> None:
        pass

    @override
    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.device

    @override
    def draws(self, seed: int) -> AbstractContextManager[object]:
        if self.host:
            return seeded([torch.default_generator], seed)
        own = torch.mps._get_default_mps_generator()  # noqa: SLF001  # it has no public name
        return seeded([torch.default_generator, own], seed)

    @override
    def inherit(self) -> AbstractContextManager[object]:
        return nullcontext()


@contextmanager
def seeded(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """Seeds `generators` anew inside, and leaves them as they were."""
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
