"""`StreamLoader`: what the user holds. Arguments, attributes, length, passes, close."""

from __future__ import annotations

import functools
import itertools
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import Self, override

from streamloader import arguments, pack
from streamloader.context import Context, rank
from streamloader.device import Device, DeviceLike, check, resolve
from streamloader.epoch import Epoch, inline
from streamloader.region import Region
from streamloader.sent import wanted
from streamloader.slabs import Slabs
from streamloader.source import Source
from streamloader.stages import Pipeline
from streamloader.stats import Meter, Stats
from streamloader.transforms import Stage, Transform, listed, note, seeds
from streamloader.transport import Transport, budget
from streamloader.window import Window

__all__ = ["StreamLoader"]

Batch_co = TypeVar("Batch_co", covariant=True)


class StreamLoader(Generic[Batch_co]):
    """A loader's batches on the device, several ahead of the step.

    The same batches as `loader`'s, in the same order and number, moved to `device` and transformed
    there while earlier steps run. They are ready for the stream that is current where `next()` is
    called, and they are the caller's: keep them, change them, use them on any stream you order.

        loader = StreamLoader(DataLoader(dataset, batch_size=256, num_workers=12))
        for images, labels in loader:
            ...

    Args:
        loader: Any iterable of batches: a `DataLoader`, a `webdataset.WebLoader`, a list, a
            generator (for one pass). A batch is any nesting of containers (tree.py); what is not a
            tensor and has no `.to` of its own stays as it is.
        device: Where to. None is the accelerator if there is one, else the CPU; None or a name
            without an index is settled at the first `next()`, by the thread that calls it. A
            `Device` of your own, such as `streamloader.testing.FakeDevice`, is taken as it is.
        transform: A callable `batch -> batch`, or several to be called in order, each on a stream
            of its own, without gradients and without the caller's autocast. `on(key, function)`
            transforms one part, `Stage(function, ...)` says more. What they read nobody may write
            meanwhile (but see `Stage`); what they return is the caller's. Torch's generators are
            seeded for each batch and restored, unless the loader's thread may draw from them too
            (`num_workers=0`, a generator): then transforms draw as they come, with a warning.
        prefetch_batches: How many batches ahead of the step. 0 does everything in the caller's
            thread when the batch is asked for. Memory is that of at most `prefetch_batches` + 2
            batches, on the device and, but for `shared_memory`, pinned on the host.
        shared_memory: Whether a `DataLoader`'s workers write batches into permanent shared memory,
            pinned where it lies, instead of new memory for each tensor (on Linux). A number is how
            many bytes of it there may be; True is an eighth of the host's memory.
        seed: What the transforms' randomness depends on, beside epoch, batch and rank. None is
            `torch.initial_seed()` at the start of the pass. Warned of where it cannot reach them.

    Raises:
        TypeError: `loader` cannot be iterated over, or `transform` cannot be called.
        ValueError: `device` does not exist, or `prefetch_batches` or `shared_memory` is negative.
    """

    __slots__ = (
        "__weakref__",
        "_asked",
        "_depth",
        "_device",
        "_epoch",
        "_live",
        "_loader",
        "_meter",
        "_pipeline",
        "_pools",
        "_seed",
        "_shared",
        "_sources",
        "_total",
        "_transforms",
        "_transport",
    )

    _loader: Iterable[Batch_co]

    def __init__(
        self,
        loader: Iterable[Batch_co],
        device: DeviceLike | None = None,
        *,
        transform: Transform | Stage | Sequence[Transform | Stage] | None = None,
        prefetch_batches: int = 2,
        shared_memory: bool | int = True,
        seed: int | None = None,
    ) -> None:
        self._loader = arguments.iterable(loader)
        self._asked = check(device)
        self._transforms = listed(transform)
        self._depth = arguments.whole("prefetch_batches", prefetch_batches)
        self._shared = arguments.size("shared_memory", shared_memory, budget)
        self._seed = None if seed is None else arguments.whole("seed", seed)
        self._epoch = 0
        self._rest()
        arguments.advise(loader)
        if self._seed is not None and seeds(self._transforms) and self._depth:
            arguments.warn_of_seed(loader)

    def _rest(self) -> None:
        """Everything that a pass makes, before the first."""
        self._device: Device | None = None
        self._pipeline: Pipeline | None = None
        self._transport = Transport(self._shared, 2 * self._depth + 3)
        self._pools: list[tuple[Slabs, Window]] = []
        self._live: weakref.WeakSet[Epoch] = weakref.WeakSet()
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()  # their threads outlive passes
        self._meter = Meter()
        self._total = Meter()

    # -- passes -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch_co]:
        """A pass; it starts, workers and all, at its first `next()`."""
        return self._pass()

    def _pass(self) -> Iterator[Batch_co]:
        try:
            yield from self._batches()
        except RuntimeError as error:
            if advice := arguments.advice(error):
                note(error, advice)
            raise

    def _batches(self) -> Iterator[Batch_co]:
        depth = 0 if os.environ.get("STREAMLOADER_DISABLE") == "1" else self._depth
        device, pipeline = self._settled()
        context, meter = self._begin()
        if depth == 0:
            iterator = iter(self._loader)
            keep = functools.partial(pack.owned, device=device, fresh=self._fresh(device, iterator))
            yield from inline(iterator, pipeline, keep, context, meter)
            return
        context = context._replace(apart=arguments.draws_apart(self._loader))
        iterator, region, first = self._open(meter)
        if not first:
            return
        fresh = self._fresh(device, iterator)
        slabs, window = self._pools.pop() if self._pools else _resources(device, depth)
        pinned = fresh and getattr(self._loader, "pin_memory", False)
        plan = pipeline.planner(context)
        epoch = Epoch(
            iterator,
            first,
            pack=pack.Packer(
                device, slabs.take, fresh=fresh, pinned=pinned, plan=plan, region=region
            ),
            pipeline=pipeline,
            device=device,
            slabs=slabs,
            window=window,
            depth=depth,
            context=context,
            meter=meter,
            region=region,
        )
        del iterator
        self._live.add(epoch)
        self._sources.add(epoch.source)
        try:
            yield from epoch.batches()
        except KeyboardInterrupt:
            self._live.discard(epoch)  # no pass takes over what it may have left half done
            raise
        finally:
            self._finish(epoch)

    def _settled(self) -> tuple[Device, Pipeline]:
        """The device and its streams, made at the first `next()` and kept (rule 4)."""
        if self._device is None or self._pipeline is None:
            self._device = resolve(self._asked)
            self._pipeline = Pipeline(self._device, self._transforms)
        return self._device, self._pipeline

    def _fresh(self, device: Device, iterator: Iterator[Batch_co]) -> bool:
        """See `pack.fresh`. But on the CPU a transform gets the batch itself, to write to."""
        return pack.fresh(self._loader, iterator) and not (device.host and self._transforms)

    def _begin(self) -> tuple[Context, Meter]:
        seed = torch.initial_seed() if self._seed is None else self._seed
        context = Context(seed, self._epoch, 0, rank())
        self._epoch += 1
        self._meter = Meter(self._total)
        return context, self._meter

    def _open(self, meter: Meter) -> tuple[Iterator[Batch_co], Region | None, list[Batch_co]]:
        """The source's pass, its shared memory and its first batch, got on the caller's thread.

        A source that starts its workers only at its first `next()` starts them here too, before
        there is another thread.

        Raises:
            RuntimeError: A live pass reads from the same iterator.
        """
        start = time.perf_counter()
        inner = arguments.dataloader(self._loader)
        if inner is not None and inner.persistent_workers:  # iter() would reset their one iterator
            self._wait_for(self._sources)
        elif inner is None or inner.num_workers == 0:  # its code was not made for two threads
            self._wait_for(source for source in self._sources if source.closed)
        iterator, region = self._transport.iterate(self._loader)
        self._wait_for(source for source in self._sources if source.reads(iterator))
        with nullcontext() if region is None else wanted():
            first = list(itertools.islice(iterator, 1))
        meter.waited(source=time.perf_counter() - start)
        return iterator, region, first

    def _wait_for(self, sources: Iterable[Source]) -> None:
        """Waits until closed passes have left the source.

        Raises:
            RuntimeError: A live one uses its one iterator.
        """
        for source in list(sources):
            if source.closed:
                source.join()
            elif source.alive:
                raise RuntimeError(arguments.second_pass(self._loader))

    def _finish(self, epoch: Epoch) -> None:
        """Ends a pass; the next one takes over its pinned memory."""
        if epoch.close() and epoch in self._live:
            self._live.discard(epoch)
            self._pools.append((epoch.slabs, epoch.window))

    def close(self) -> None:
        """Ends live passes and gives pinned memory back. The loader can be used again after it."""
        for epoch in list(self._live):
            self._finish(epoch)
        while self._pools:
            self._pools.pop()[0].close()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what it wraps ----------------------------------------------------------------------------

    @property
    def loader(self) -> Iterable[Batch_co]:
        """The loader that is wrapped."""
        return self._loader

    @property
    def device(self) -> torch.device | None:
        """Where batches go; None before it is settled, at the first `next()`."""
        known = self._device or self._asked
        return known.device if isinstance(known, Device) else known

    @property
    def prefetch_batches(self) -> int:
        """How many batches ahead of the step."""
        return self._depth

    @property
    def stats(self) -> Stats:
        """What was counted, in the last pass and in all: batches, bytes, waits."""
        return Stats(self._meter.counts(), self._total.counts())

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch to whoever shuffles by it; the transforms' randomness follows it too.

        That is the loader if it has a `set_epoch`, else its sampler, batch sampler and dataset,
        those that have one.

        Args:
            epoch: Of the next pass, from 0; later ones count on from it.
        """
        self._epoch = epoch
        for tell in arguments.epoch_setters(self._loader):
            tell(epoch)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError where it has none

    def __bool__(self) -> bool:
        return True  # not len(): a loader of unknown length is no empty one

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(
                f"StreamLoader has no {name}: the state of {type(self._loader).__name__} counts "
                f"batches that were read ahead and not handed over, so resuming would skip them"
            )
        if name.startswith("__") or name in StreamLoader.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(self._loader, name)
        except AttributeError:
            raise AttributeError(
                f"neither StreamLoader nor the {type(self._loader).__name__} that it wraps has an "
                f"attribute {name!r}"
            ) from None

    @override
    def __setattr__(self, name: str, value: object) -> None:
        if name not in StreamLoader.__slots__:
            raise AttributeError(
                f"StreamLoader has no attribute {name!r} to set: set it on the loader that it "
                f"wraps, as in stream_loader.loader.{name} = ..."
            )
        object.__setattr__(self, name, value)

    @override
    def __repr__(self) -> str:
        transforms = ", ".join(map(repr, self._transforms))
        device = None if self.device is None else str(self.device)
        return (
            f"{type(self).__name__}({self._loader!r}, device={device!r}, "
            f"transform=[{transforms}], prefetch_batches={self._depth})"
        )

    @override
    def __getstate__(self) -> dict[str, Any]:
        if self._live or any(source.alive for source in self._sources):
            raise TypeError(
                "a StreamLoader cannot be copied or pickled during a pass, which has a thread: "
                "do it before, or after close()"
            )
        names = ("_loader", "_asked", "_transforms", "_depth", "_shared", "_seed", "_epoch")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._rest()


def _resources(device: Device, depth: int) -> tuple[Slabs, Window]:
    return Slabs(device, depth + 2), Window(device, depth)  # what passes take over
