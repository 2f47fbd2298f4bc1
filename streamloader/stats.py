"""What was waited for: the source, or the device; and how long launching took."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

__all__ = ["Counts", "Meter", "Stats"]


@dataclass(frozen=True)
class Counts:
    """What was counted over an epoch, or over all of them.

    Attributes:
        batches: Batches handed over.
        nbytes: Bytes of the tensors that came from the host.
        source_seconds: Seconds the caller waited in `next()` because no batch was there yet.
        device_seconds: Seconds the caller waited in `next()` because it was `prefetch_batches`
            steps ahead of the device. This costs the device nothing.
        launch_seconds: Seconds the caller spent in `next()` submitting copies and transforms: their
            Python, and whatever in them made it wait for the device, as `.item()` does. Such a wait
            changes no batch, and costs overlap.
        shared: Batches that came through the shared memory of workers (`shared_memory`). Others
            came in new memory: none was free, or it was too little, or the loader has no workers.
    """

    batches: int = 0
    nbytes: int = 0
    source_seconds: float = 0.0
    device_seconds: float = 0.0
    launch_seconds: float = 0.0
    shared: int = 0

    @override
    def __str__(self) -> str:
        through = f" ({self.shared} through shared memory)" if self.shared else ""
        return (
            f"{self.batches} batches{through}, {self.nbytes / 1e6:.1f} MB; waited for the source "
            f"{self.source_seconds:.2f} s, for the device {self.device_seconds:.2f} s; launched in "
            f"{self.launch_seconds:.2f} s"
        )


@dataclass(frozen=True)
class Stats:
    """A loader's counts.

    Attributes:
        epoch: Of the pass that was started last.
        total: Of all passes.
    """

    epoch: Counts = Counts()
    total: Counts = Counts()

    @override
    def __str__(self) -> str:
        return f"epoch: {self.epoch}\ntotal: {self.total}"


@dataclass
class Meter:
    """Counts being made; the attributes are those of `Counts`.

    Args:
        total: Counts the same, of several.
    """

    total: Meter | None = None
    batches: int = 0
    nbytes: int = 0
    source_seconds: float = 0.0
    device_seconds: float = 0.0
    launch_seconds: float = 0.0
    shared: int = 0

    def counts(self) -> Counts:
        """What has been counted so far."""
        seconds = self.source_seconds, self.device_seconds, self.launch_seconds
        return Counts(self.batches, self.nbytes, *seconds, self.shared)

    def handed_over(self, nbytes: int, *, shared: bool = False) -> None:
        """One more batch."""
        self.batches += 1
        self.nbytes += nbytes
        self.shared += shared
        if self.total is not None:
            self.total.handed_over(nbytes, shared=shared)

    def waited(self, *, source: float = 0.0, device: float = 0.0) -> None:
        """So many more seconds."""
        self.source_seconds += source
        self.device_seconds += device
        if self.total is not None:
            self.total.waited(source=source, device=device)

    def launched(self, seconds: float) -> None:
        """So many more seconds of submitting work."""
        self.launch_seconds += seconds
        if self.total is not None:
            self.total.launched(seconds)
