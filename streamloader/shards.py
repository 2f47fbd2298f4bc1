"""From shard URLs to batches: webdataset's tars, decoded, cropped and batched in workers.

    sharding.py  which shards there are, who reads which, how many batches that makes
    tars.py      one shard's samples, or an error with its name
    images.py    a sample's pixels: decoded, cropped, resized

and here a worker's pass through its shards, and the `DataLoader` around it. Of images that are not
resized, `augment.ragged` makes batches.
"""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

try:
    import webdataset

    from streamloader import images
    from streamloader.sharding import Reading, Seat, Urls, find, key, place
    from streamloader.tars import ShardError, fields, read
except ImportError as error:
    raise ImportError(
        f'streamloader.shards needs more: pip install "streamloader[webdataset,jpeg]" ({error})'
    ) from error

__all__ = ["ShardError", "ShardLoader", "loader"]


_REPEATED = 0.01
"""From this share of an epoch on, samples that come once more are worth a warning."""


class _Samples(IterableDataset[tuple[Tensor, int]]):
    """What one worker reads: images, uint8 (3, height, width), and their labels.

    Attributes:
        ticket: Epoch, rank and world of the pass that starts next, in shared memory, for persistent
            workers were born in an earlier one.
        skipped: How many samples each worker has skipped, in shared memory; again in each lap.
    """

    def __init__(self, reading: Reading, workers: int) -> None:
        self.reading = reading
        self.skipped = torch.zeros(workers, dtype=torch.int64, device="cpu").share_memory_()
        self.ticket = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        # No generator itself: the ticket is read now, before the next pass changes it.
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch, rank, world = self.ticket.tolist()
        seat = Seat(epoch, rank, world, worker, workers)
        batches = self.reading.quota(seat) if self.reading.train else None
        lap = functools.partial(self._lap, seat, itertools.count())
        if batches is None:
            return self._once(seat, lap(0))
        laps = itertools.chain.from_iterable(map(lap, itertools.count()))
        return itertools.islice(laps, batches * self.reading.batch_size)

    def _once(
        self, seat: Seat, samples: Iterator[tuple[Tensor, int]]
    ) -> Iterator[tuple[Tensor, int]]:
        """The samples of a pass of unknown length.

        Raises:
            ShardError: They are to be trained on, but fill no batch.
        """
        count = 0
        for sample in samples:
            count += 1
            yield sample
        if self.reading.train and count < self.reading.batch_size:
            raise ShardError(
                f"a worker fills no batch of {self.reading.batch_size} with the {count} samples of "
                f"{', '.join(self._urls(seat))}: give length, or use fewer workers"
            )

    def _lap(self, seat: Seat, numbers: Iterator[int], lap: int) -> Iterator[tuple[Tensor, int]]:
        """All usable samples of the worker's shards, once.

        Raises:
            ShardError: A shard cannot be read, or not one sample can be used.
        """
        used = bad = 0
        for sample in self._raw(seat, lap):
            number = next(numbers)
            try:
                data, label = fields(sample)
                image = images.decode(data)
            except ValueError as error:
                self._skip(sample, error, seat.worker)
                bad += 1
                continue
            used += 1
            yield self._cut(image, seat, number), label
        if not used and (bad or self.reading.train):
            raise ShardError(f"not one sample can be used of {', '.join(self._urls(seat))}")

    def _urls(self, seat: Seat) -> list[str]:
        return [shard.url for shard in self.reading.hand(seat)]

    def _raw(self, seat: Seat, lap: int) -> Iterator[dict[str, Any]]:
        samples = itertools.chain.from_iterable(map(read, self._urls(seat)))
        if not (self.reading.train and self.reading.shuffle):
            return samples
        rng = random.Random(key("buffer", self.reading.seed, *seat, lap))
        mixed: Iterator[dict[str, Any]] = webdataset.shuffle(self.reading.shuffle, rng=rng)(samples)
        return mixed

    def _cut(self, image: Tensor, seat: Seat, number: int) -> Tensor:
        if self.reading.deliver == "whole":
            return image
        if not self.reading.train:
            return images.evaluation(image, self.reading.size)
        rng = random.Random(key("crop", self.reading.seed, *seat, number))
        if self.reading.deliver == "crops":
            return images.random_box(image.shape[1], image.shape[2], rng).cut(image)
        return images.training(image, self.reading.size, rng)

    def _skip(self, sample: dict[str, Any], error: ValueError, worker: int) -> None:
        message = f"shard {sample['__url__']}, sample {sample['__key__']}: {error}"
        if self.reading.strict:
            raise ShardError(message) from error
        first = not self.skipped.any()  # of all workers and passes
        self.skipped[worker] += 1
        if first:
            warnings.warn(
                f"{message}; it is skipped, and others are without a warning: see `skipped`",
                stacklevel=2,
            )


class ShardLoader(DataLoader[tuple[Tensor, int]]):
    """What `loader` returns: a `DataLoader` of known length that shuffles by epoch."""

    def __init__(self, reading: Reading, num_workers: int, **options: Any) -> None:
        if reading.deliver != "squares":
            from streamloader.augment import collate  # noqa: PLC0415  # not for squares

            options = {"collate_fn": collate} | options
        self._samples = _Samples(reading, max(num_workers, 1))
        self._epoch = 0
        self._check()
        super().__init__(
            self._samples,
            batch_size=reading.batch_size,
            num_workers=num_workers,
            drop_last=reading.train,
            **options,
        )

    def _check(self) -> None:
        """Whatever is wrong is said at once, and by the first rank what is worth a warning."""
        self._batches()
        seat = self._seat()
        if not self._samples.reading.train or seat.rank:
            return
        share = self._samples.reading.repeated(seat)
        if share >= _REPEATED:
            warnings.warn(
                f"{share:.1%} of the samples of an epoch come once more, in place of others: "
                f"{len(self._samples.reading.shards)} shards cannot be shared evenly among "
                f"{seat.workers} worker(s) on each of {seat.world} rank(s); use fewer workers, or "
                f"more and smaller shards",
                stacklevel=4,
            )

    def _seat(self) -> Seat:
        return Seat(self._epoch, *place(), 0, len(self._samples.skipped))

    def _batches(self) -> int | None:
        return self._samples.reading.batches(self._seat())

    @override
    def __iter__(self) -> Any:
        self._batches()  # there may be more ranks than there were
        if self._iterator is None:  # a new ticket, as workers of a live pass may not have read
            self._samples.ticket = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()
        self._samples.ticket.copy_(torch.tensor([self._epoch, *place()], device="cpu"))
        self._epoch += 1
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next `iter()` starts, from 0; later ones count on from it."""
        self._epoch = epoch

    @property
    def skipped(self) -> int:
        """How many reads gave no usable sample: by all workers of this rank, in all passes.

        A bad sample counts each time that it is read, so once an epoch or more.
        """
        return int(self._samples.skipped.sum())

    @override
    def __len__(self) -> int:
        batches = self._batches()
        if batches is None:
            raise TypeError(
                "the number of batches is not known: give the shards' index.json, or length= for "
                "training, or for what one worker of one rank reads"
            )
        return batches


def loader(  # noqa: PLR0913  # all but the first by name
    urls: Urls,
    *,
    batch_size: int,
    size: int = 224,
    deliver: str = "squares",
    train: bool = True,
    num_workers: int = 0,
    seed: int = 0,
    shuffle: int = 1000,
    length: int | None = None,
    strict: bool = False,
    **options: Any,
) -> ShardLoader:
    """Batches of images and labels from WebDataset shards with `.jpg` (`.jpeg`, `.png`) and `.cls`.

    Each shard is read by one worker of one rank. To train, shards are shuffled anew each epoch and
    dealt to the ranks and their workers, samples are shuffled as they are read, and each image is
    random-resized-cropped and flipped: by `seed`, the epoch and the numbers of ranks and workers
    alone. An epoch that `set_epoch` does not name is the one after the last that this rank began.
    *Several ranks must all call `set_epoch` before each epoch*: one that began a pass more than the
    others, be it to look at a batch, would read some of their shards from then on.

    *An epoch of training* has `length // (batch_size * ranks)` full batches on every rank, so that
    ranks end together, shared among its workers by the samples that the index says their shards
    have, or else by the number of their shards. A worker whose shards hold fewer samples than its
    share, or some that are skipped, starts them again; the rest of one that has more is left out.
    Shards of equal size, in a multiple of the workers of all ranks, give every sample once, but for
    those that fill no batch; from 1 % of repeated samples on there is a warning. With no length
    known, each worker reads its shards once and drops what fills no batch (having none is an
    error); more than one rank is an error then.

    *Otherwise* every sample comes once, each worker's in the order of the shards, with its middle
    cut out after a resize of the shorter side to 256/224 of `size`. Each worker's last batch may be
    smaller, and ranks may differ in their number of batches, so let them wait for one another after
    the loop rather than in it.

    A sample that has no image or no label, or whose image cannot be decoded, is skipped: the first
    of all workers and passes with a warning, all counted in `skipped`. (`len()` does not know of
    them.) A shard that cannot be read is always an error, as is a worker that can use none of the
    samples it read.

        train = shards.loader("train-{000000..001023}.tar", batch_size=256, length=1_281_167, ...)
        for images, labels in StreamLoader(train): ...

    Args:
        urls: A folder (its `index.json`, or else all its `.tar`, `.tar.gz`, `.tgz`, `.tar.bz2` and
            `.tar.xz`), an `index.json` (of `make_shards.py` or webdataset), a glob, a brace
            pattern, an address that webdataset opens, or a list of those.
        batch_size: Samples in a batch.
        size: Both sides of an image, in pixels; of squares.
        deliver: What workers make of an image.
            "squares": all that is described above.
            "whole": it is decoded, and no more: `RaggedImages`, for `augment.RandomResizedCrop` and
            whatever else on the device. A worker does less, but sends more: of ImageNet some 500 KB
            an image, and not 150.
            "crops": to train; the box of a random-resized-crop is cut out, on average half of the
            image, but neither resized nor flipped: `RaggedImages`, for `augment.Resize((224, 224))`
            and `augment.RandomHorizontalFlip()`. The boxes are those of squares with the same seed.
        train: Whether to shuffle, crop at random and flip.
        num_workers: Worker processes; 0 reads in the caller's thread.
        seed: What all randomness depends on.
        shuffle: How many samples, encoded, a worker holds to draw the next from; 0 keeps order. Not
            a `DataLoader`'s `shuffle=True`, which would be a number too, 1, and is an error.
        length: Samples in an epoch of training, over all ranks; None is what the index says.
            Without `train` it is of use to `len()` alone, where there is no index.
        strict: Whether a sample that would be skipped is an error instead.
        options: What else a `DataLoader` takes: `prefetch_factor`, `persistent_workers`, ...

    Returns:
        A `DataLoader` of `[images, labels]`: uint8 (N, 3, size, size), or `augment.RaggedImages`,
        uint8, of 3 channels; and int64 (N,).

    Raises:
        ValueError: An argument breaks its rule; there are no shards, or fewer than workers on all
            ranks; or ranks train and no length is known.
    """
    shards = tuple(find(urls))
    if not shards:
        raise ValueError(f"urls must name at least one shard, got {urls!r}, where there is none")
    reading = Reading(shards, batch_size, size, train, seed, shuffle, length, strict, deliver)
    return ShardLoader(reading, num_workers, **options)
