"""Keeps GPUs fed: batches on the device, transformed and ready, before the step asks for them.

The life of a batch:

    source ──► slab ──► copy ──► stages ──► hand-over ──► your step
    workers,   pinned   copy     a stream   your stream
    any        host     stream   per stage  waits on one event
    iterable   memory

and where each part of it is written down:

    loader.py     StreamLoader: passes, attributes, length, close
    arguments.py  what it accepts, what it warns of
    epoch.py      one pass: a batch's whole way on one screen
    source.py     the loader thread: pulls and packs, keeps order, carries exceptions
    transport.py  how batches leave workers: which loaders share memory, and how it is divided
    collate.py    what runs in a worker: `default_collate`, into a slab
    sent.py       a batch in the queue between them: where its tensors lie, the rest pickled
    shared.py     the memory of both sides; NOTE [Shared slabs]
    region.py     this side of it: pinned where it lies, taken over by the next pass
    pack.py       a host batch's bytes into a slab; what may be read when
    slabs.py      pinned slabs, round and round
    window.py     how far ahead: ask, admit; NOTE [Memory rules]
    stages.py     the copy, the transforms, the hand-over: a stream each
    transforms.py what a transform is; `Stage`; `on`; those that plan on the host
    results.py    what a transform may return, and which memory that is
    batch.py      the record that travels
    tree.py       nested batches: visit, rebuild any container
    layout.py     what is packed where, which tensors share a copy; pure
    carve.py      tensors out of a block's bytes, many by one call
    context.py    what a batch's randomness depends on; pure
    stats.py      what was waited for: the source, the device; how long launching took
    device/       the seam: eighteen verbs; CUDA and other accelerators, the CPU
    testing.py    a public fake device
    checker.py    one that reports what may race, by happens-before; time in it is virtual
    ledger.py     who did what to which memory, as the checker saw it
    clocks.py     vector clocks, and memory that remembers; pure

Transforms to give it, which nothing above imports:

    augment/      per-sample augmentation, with torchvision v2's names; a map of its own

A source to wrap, likewise:

    shards.py     WebDataset shards to batches: a `DataLoader`
    sharding.py   which shards, who reads which, how many batches; pure
    tars.py       one shard's samples
    images.py     bytes to pixels: decode, crop, flip
"""

from __future__ import annotations

from streamloader.loader import StreamLoader
from streamloader.stats import Counts, Stats
from streamloader.transforms import Planned, Stage, on

__all__ = ["Counts", "Planned", "Stage", "Stats", "StreamLoader", "on"]
__version__ = "0.1.0"
