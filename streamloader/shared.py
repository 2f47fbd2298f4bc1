"""Memory that workers write and this process reads: slabs in one shared file without a name.

    header    | busy, a byte a slab |
    worker 0  | slab | slab | ...
    worker 1  | slab | slab | ...

NOTE [Shared slabs]
~~~~~~~~~~~~~~~~~~~
Who writes what when; there is no lock, and nobody waits.

1. A worker writes only to slabs of its own that are not busy, and sets a slab's busy byte when it
   has written all of a batch. If it has none that is free, the batch goes the ordinary way.
2. Only the process that owns the memory clears that byte: when nothing in it refers to the slab's
   memory any more, a copy that is under way included (`Slabs.lend`, memory rule 1). A batch that
   was thrown away gives its slab back by that alone.
3. A worker that has kept a tensor in a slab (a collate function that remembers its last batch)
   does not write to that slab again until it has let go.
4. A pass takes over the slabs of another only when that one's workers are dead; those that are
   busy and that nothing here refers to were lost with them, and are free again.
5. A batch that stays on the host lies in its slab only while that is not pinned (`Sent.pinned`):
   else it is copied. From pinned memory the caller's own copies to a device run late, and nobody
   knows when one is complete.

Pages cost nothing until they are touched, and are freed when the last process that has mapped them
lets go, however it ends. A fork shares them, as it must: the device may be reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from streamloader.carve import ALIGNMENT

__all__ = ["Shape", "Shared", "Slab", "empty", "filling", "part"]

Unpin = Callable[[], object]

_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, from 5.14 on."""

_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[tuple[int, int], Shared] = weakref.WeakValueDictionary()
_thread = threading.local()


class Shape(NamedTuple):
    """How the memory is divided.

    Attributes:
        workers: How many.
        each: Slabs of each worker.
        room: Bytes of a slab, whole pages.
    """

    workers: int
    each: int
    room: int

    @property
    def header(self) -> int:
        """Bytes before the first slab."""
        return -(-self.workers * self.each // mmap.PAGESIZE) * mmap.PAGESIZE


class Shared:
    """The memory, as one process has mapped it. Pickled to start a process, it is the same there.

    Args:
        shape: How it is divided.

    Attributes:
        shape: Likewise.
        owner: The process that made it.
        key: By which that process finds it.

    Raises:
        OSError: There is no such memory.
    """

    def __init__(self, shape: Shape) -> None:
        file = os.memfd_create("streamloader", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, shape.header + shape.workers * shape.each * shape.room)
            self._map(file, shape, os.getpid(), next(_numbers))
        except OSError:
            os.close(file)
            raise
        _alive[self.owner, self.key] = self

    def _map(self, file: int, shape: Shape, owner: int, key: int) -> None:
        self.shape, self.owner, self.key = shape, owner, key
        self._file = file
        self._bytes = mmap.mmap(file, 0)
        self._kept: dict[int, weakref.ref[memoryview]] = {}
        self._held: set[int] = set()
        self._sending: set[int] = set()
        self._populated: dict[int, int] = {}
        self._pins: dict[int, tuple[int, Unpin]] = {}
        # Nothing runs at exit: the process gives all back, and copies may be under way then.
        weakref.finalize(self, os.close, file).atexit = False
        weakref.finalize(self, _unpin, owner, self._pins, self._bytes).atexit = False

    @override
    def __reduce__(self) -> tuple[Callable[..., Shared], tuple[Any, ...]]:
        return _attached, (DupFd(self._file), self.shape, self.owner, self.key)

    @staticmethod
    def find(owner: int, key: int) -> Shared | None:
        """What this process made under that key, if it still has it."""
        return _alive.get((owner, key))

    def _memory(self, number: int) -> memoryview:
        start = self.shape.header + number * self.shape.room
        return memoryview(self._bytes)[start : start + self.shape.room]

    # -- in a worker ------------------------------------------------------------------------------

    def take(self, worker: int) -> Slab | None:
        """A slab to write to, one of `worker`'s; None if none is free."""
        first = worker * self.shape.each
        for number in range(first, first + self.shape.each):
            kept = self._kept.get(number)
            if not self._bytes[number] and (kept is None or kept() is None):
                memory = self._memory(number)
                self._kept[number] = weakref.ref(memory)
                return Slab(number, torch.frombuffer(memory, dtype=torch.uint8))
        return None

    def send(self, number: int) -> None:
        """Slab `number` is full: it belongs to the owner now."""
        self._bytes[number] = 1

    # -- in the process that owns it --------------------------------------------------------------

    @property
    def held(self) -> int:
        """How many slabs something here refers to."""
        return len(self._held)

    def received(self, number: int) -> Tensor:
        """Slab `number`, a uint8 tensor: when its memory dies, the worker has the slab again."""
        memory = self._memory(number)
        self._held.add(number)
        weakref.finalize(memory, self._give_back, number).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _give_back(self, number: int) -> None:
        if os.getpid() == self.owner:  # and not in a child that was forked with the reference
            self._held.discard(number)
            self._sending.discard(number)
            self._bytes[number] = 0

    def recover(self) -> None:
        """All workers are dead: what they had filled and nobody has received is free again."""
        for number in set(range(self.shape.workers * self.shape.each)) - self._held:
            self._bytes[number] = 0

    def populate(self, number: int, nbytes: int) -> None:
        """Maps the pages of slab `number` here, so that pinning it need not, which takes longer.

        Args:
            number: A slab that was received.
            nbytes: How much of it.
        """
        if nbytes > self._populated.get(number, 0):
            self._populated[number] = nbytes
            memory = torch.frombuffer(self._memory(number), dtype=torch.uint8)
            pages = min(_pages(nbytes), self.shape.room)
            # Where it fails, on an older kernel say, pinning does it. It releases Python's lock.
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(pages), _POPULATE_WRITE)

    def pin(self, number: int, nbytes: int, pin: Callable[[Tensor], Unpin | None]) -> bool:
        """Pins slab `number`, which holds `nbytes`, where it lies, unless it is pinned.

        Args:
            number: A slab that was received, and is about to be copied.
            nbytes: How much of it.
            pin: `Device.pin`.

        Returns:
            False if `pin` cannot do that.
        """
        self._sending.add(number)
        size, unpin = self._pins.get(number, (0, None))
        if nbytes <= size:
            return True
        if unpin is not None:
            del self._pins[number]
            unpin()
        size = min(_pages(nbytes + nbytes // 8 if unpin else nbytes), self.shape.room)
        unpin = pin(torch.frombuffer(self._memory(number)[:size], dtype=torch.uint8))
        if unpin is not None:
            self._pins[number] = size, unpin
        return unpin is not None

    def pinned(self, number: int) -> bool:
        """Whether some of slab `number` is."""
        return number in self._pins

    def unpin(self) -> None:
        """Unpins all slabs, but for those of which a copy may be under way."""
        for number in set(self._pins) - self._sending:
            self._pins.pop(number)[1]()


class Slab:
    """A slab that is being filled, from front to back.

    Args:
        number: Its number.
        memory: A uint8 tensor, all of it.

    Attributes:
        number: Likewise.
    """

    def __init__(self, number: int, memory: Tensor) -> None:
        self.number = number
        self._memory = memory
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes from its start that are taken."""
        return self._used

    def take(self, nbytes: int) -> int | None:
        """So many bytes of it: where they begin, in bytes; None if they do not fit."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > len(self._memory):
            return None
        self._used = start + nbytes
        return start

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """So many bytes that begin `start` bytes from its front: a storage of their own.

        Whoever copies or pickles a tensor's storage shall not copy the whole slab.
        """
        return part(self._memory, start, nbytes)

    def write(self, start: int, tensor: Tensor) -> None:
        """A dense tensor's bytes, `start` bytes from its front; some dtypes have no `copy_`."""
        ctypes.memmove(self._memory.data_ptr() + start, tensor.data_ptr(), tensor.nbytes)

    def offset(self, tensor: Tensor) -> int | None:
        """Where a dense tensor lies in it, in bytes from its start; None if elsewhere."""
        offset = tensor.data_ptr() - self._memory.data_ptr()
        return offset if offset >= 0 and offset + tensor.nbytes <= self._used else None


@contextlib.contextmanager
def filling(slab: Slab) -> Iterator[None]:
    """While it lasts, `empty` in this thread gives memory in `slab`."""
    _thread.slab = slab
    try:
        yield
    finally:
        _thread.slab = None


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Memory for a part of the batch that this worker is collating, where it need not be copied.

    Returns:
        A contiguous tensor, uninitialised; None where no slab is being filled, or it does not fit.
    """
    slab: Slab | None = getattr(_thread, "slab", None)
    nbytes = math.prod(shape) * dtype.itemsize
    start = slab.take(nbytes) if slab is not None else None
    if slab is None or start is None:
        return None
    return slab.tensor(start, nbytes).view(dtype).view(tuple(shape))


def part(memory: Tensor, start: int, nbytes: int) -> Tensor:
    """Some bytes of a slab, with a storage that is no larger and keeps the slab alive."""
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
    return tensor.set_(memory.untyped_storage()[start : start + nbytes], 0, (nbytes,), (1,))


def _attached(file: Any, shape: Shape, owner: int, key: int) -> Shared:
    shared = Shared.__new__(Shared)
    shared._map(file.detach(), shape, owner, key)  # noqa: SLF001  # its second constructor
    return shared


def _unpin(owner: int, pins: dict[int, tuple[int, Unpin]], mapped: mmap.mmap) -> None:  # noqa: ARG001  # mapped until we return
    while pins and os.getpid() == owner:
        pins.popitem()[1][1]()


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
