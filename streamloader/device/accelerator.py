"""Accelerators with streams: CUDA (and ROCm), XPU. The only file that knows device types.

Under CUDA it makes `torch.cuda.Stream` and `torch.cuda.Event`: a generic `torch.Event` for cuda:1
can make a context on cuda:0, some 500 MB that nobody asked for.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from streamloader.device.seam import Device, Event, RefusedError, Stream

__all__ = ["Accelerator"]

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


class Accelerator(Device):
    """A device with streams, as a `Device`.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"

    @override
    def stream(self, name: str, priority: int = 0) -> Stream:
        # What is lower than the device knows is its lowest.
        if self._cuda:
            return torch.cuda.Stream(self.device, priority=priority)
        return torch.Stream(self.device, priority=priority)

    @override
    def current(self) -> Stream:
        if self._cuda:
            # The first time that torch is asked, it makes a context on the device that is current
            # then, and cuda:0 is unless somebody chose.
            with torch.cuda.device(self.device):
                return torch.cuda.current_stream(self.device)
        return torch.accelerator.current_stream(self.device)

    @override
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return _on_cuda(self.device, stream) if self._cuda else stream

    @override
    def record(self, stream: Stream) -> Event:
        made = torch.cuda.Event if self._cuda else functools.partial(torch.Event, self.device)
        event: Any = made()
        event.record(stream)
        return event

    @override
    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    @override
    def done(self, event: Event) -> bool:
        return bool(event.query())

    @override
    def slab(self, nbytes: int) -> Tensor:
        if not self._cuda:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        with torch.cuda.device(self.device):
            return _registered(nbytes)

    @override
    def pin(self, memory: Tensor) -> Callable[[], object] | None:
        if not self._cuda:
            return None
        with torch.cuda.device(self.device):
            return _pinned(memory.data_ptr(), memory.nbytes)

    @override
    def arena(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @override
    def copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    @override
    def uses(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    @override
    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.device

    @override
    def generators(self) -> Sequence[torch.Generator]:
        module = torch.get_device_module(self.device)
        module.init()  # an accelerator's generators exist from then on
        return [torch.default_generator, module.default_generators[self.device.index]]

    @override
    def named(self, text: str) -> AbstractContextManager[object]:
        shown = super().named(text)
        return _range(text, shown) if self._cuda else shown

    @override
    def inherit(self) -> AbstractContextManager[object]:
        index = torch.accelerator.current_device_index()
        if index == self.device.index:
            return self.on(self.current())
        # A new thread starts on device 0, and setting it would make a context there.
        return torch.accelerator.device_index(index) if index else contextlib.nullcontext()


@contextmanager
def _on_cuda(device: torch.device, stream: Stream) -> Iterator[None]:
    """Makes `device` and `stream` current.

    `torch.cuda.stream` alone would go back to the caller's device by cudaSetDevice, which makes a
    context there; `torch.cuda.device` goes back to it lazily.
    """
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


@contextmanager
def _range(text: str, shown: AbstractContextManager[object]) -> Iterator[None]:
    """An NVTX range too (a ROCTX one on ROCm), which costs next to nothing if nobody looks."""
    torch.cuda.nvtx.range_push(text)
    try:
        with shown:
            yield
    finally:
        torch.cuda.nvtx.range_pop()


def _registered(nbytes: int) -> Tensor:
    """Exactly `nbytes`, pinned in place: torch's pinned allocator rounds up to a power of two.

    Shared anonymous pages, so that a worker forked later never makes the kernel copy a page that
    the device reads. The finaliser holds the pages: unregistered first, unmapped then (rule 1).

    Raises:
        RefusedError: The driver refuses; the message says what to try.
    """
    pages = mmap.mmap(-1, nbytes)
    slab = torch.frombuffer(pages, dtype=torch.uint8)
    unpin = _pinned(slab.data_ptr(), nbytes)
    finaliser = weakref.finalize(slab, _unregister, pages, unpin)
    finaliser.atexit = False  # copies may be under way then, and the process gives all back
    return slab


def _unregister(pages: mmap.mmap, unpin: Callable[[], object]) -> None:  # noqa: ARG001  # mapped until we return
    unpin()


def _pinned(address: int, nbytes: int) -> Callable[[], object]:
    """Pins memory in place; returns what undoes it.

    Raises:
        RefusedError: The driver refuses; the message says what to try.
    """
    error = int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
    if error:
        with contextlib.suppress(RuntimeError):
            # The runtime remembers it, and the next kernel to be launched would raise it: this one.
            torch.zeros(1, device="cuda").add_(1)
        raise RefusedError(
            f"pinning {nbytes} bytes of host memory failed with CUDA error {error}: free host "
            f"memory, raise the limit that `ulimit -l` shows, or lower prefetch_batches"
        )
    return functools.partial(_runtime().cudaHostUnregister, address)


def _runtime() -> Any:
    return torch.cuda.cudart()
