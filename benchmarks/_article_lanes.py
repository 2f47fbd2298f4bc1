"""Streams for loops that also run where there are none: on the CPU all of it does nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["Lane", "synchronize"]


class Lane:
    """A CUDA stream, or the CPU's program order.

    Args:
        stream: None is the latter.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @classmethod
    def new(cls, device: torch.device) -> Lane:
        """A stream of its own."""
        return cls(torch.cuda.Stream(device) if device.type == "cuda" else None)

    @classmethod
    def current(cls, device: torch.device) -> Lane:
        """The one that is current now."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def on(self) -> AbstractContextManager[object]:
        """What is queued in the block is queued here. Never to be left by a `yield`."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self, other: Lane) -> None:
        """What is queued here from now on waits for what is queued there so far."""
        if self._stream is not None and other._stream is not None:  # its own kind
            self._stream.wait_stream(other._stream)

    def reads(self, *tensors: Tensor) -> None:
        """Tensors of other lanes are read here: their memory is not given away before that."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """What tells whether all that is queued here so far is done."""
        return None if self._stream is None else self._stream.record_event()


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
