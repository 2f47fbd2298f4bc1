"""Devices without streams of their own: the CPU, and MPS, where copies block.

Work happens when it is called, so order is program order: an event has always completed, and
waiting and recording have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from streamloader.device.seam import Device, Event, Stream

__all__ = ["Streamless"]


class Streamless(Device):
    """The CPU or MPS, as a `Device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = device.type == "cpu"

    @override
    def stream(self, name: str, priority: int = 0) -> Stream:
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
    def generators(self) -> Sequence[torch.Generator]:
        if self.host:
            return [torch.default_generator]
        own = torch.mps._get_default_mps_generator()  # noqa: SLF001  # it has no public name
        return [torch.default_generator, own]

    @override
    def inherit(self) -> AbstractContextManager[object]:
        return nullcontext()
