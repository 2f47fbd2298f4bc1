from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import pickle
import random
import re
import sys
import tarfile
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from streamloader import StreamLoader, augment, pack, shards
from streamloader.shards import ShardError
from streamloader.testing import FakeDevice
from tests.archives import write

SIZE = 16
TWO = pytest.param(2, marks=pytest.mark.slow)


def jpeg(label: int) -> bytes:
    """A plain picture whose grey level says its label, up to 63."""
    file = io.BytesIO()
    Image.new("RGB", (40, 32), (label * 4,) * 3).save(file, "JPEG")
    return file.getvalue()


def sample(label: int, key: str | None = None) -> list[tuple[str, bytes]]:
    name = f"{label:04d}" if key is None else key
    return [(f"{name}.jpg", jpeg(label)), (f"{name}.cls", b"%d" % label)]


def made(folder: Path, *counts: int, index: bool = True) -> Path:
    """A folder of shards with so many samples each, labelled from 0."""
    labels = itertools.count()
    for number, count in enumerate(counts):
        files = [file for _ in range(count) for file in sample(next(labels))]
        write(folder / f"s-{number:06d}.tar", files)
    listing = [{"name": f"s-{i:06d}.tar", "samples": count} for i, count in enumerate(counts)]
    if index:
        (folder / "index.json").write_text(json.dumps({"shards": listing}))
    return folder


def labels_of(loader: Iterable[Any]) -> list[list[int]]:
    """The labels of each batch, every image checked to be the one that belongs to its label."""
    found = []
    for images, labels in StreamLoader(loader, device="cpu"):
        assert images.dtype == torch.uint8
        assert images.shape == (len(labels), 3, SIZE, SIZE)
        assert images.is_contiguous()
        assert labels.dtype == torch.int64
        assert (images.float().mean((1, 2, 3)) - labels * 4).abs().max() < 3
        found.append(labels.tolist())
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def pixels(loader: Iterable[Any]) -> list[Tensor]:
    return [images for images, _ in loader]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world))
        yield


@contextlib.contextmanager
def shard_error(match: str) -> Iterator[None]:
    with pytest.raises(ShardError, match=match) as caught:
        yield
    # Its frames and itself are a cycle that holds the pass: of one that is left to the garbage
    # collector, a DataLoader waits five seconds for the workers.
    traceback.clear_frames(caught.tb)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# -- what it is


@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_is_a_dataloader_and_its_passes_are_a_dataloaders_own(
    tmp_path: Path, num_workers: int
) -> None:
    loader = shards.loader(made(tmp_path, 4), batch_size=2, size=SIZE, num_workers=num_workers)
    assert isinstance(loader, DataLoader)
    assert loader.collate_fn is default_collate
    plain = DataLoader(loader.dataset, num_workers=num_workers)
    assert type(iter(loader)) is type(iter(plain))


def test_its_ticket_is_on_the_host_whatever_the_default_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        loader = shards.loader(made(tmp_path, 4), batch_size=2, size=SIZE)
    assert len(list(loader)) == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_loader_takes_its_batches_for_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    found: list[bool] = []

    def fresh(loader: object, iterator: object) -> bool:
        found.append(plain(loader, iterator))
        return found[-1]

    plain = pack.fresh
    monkeypatch.setattr(pack, "fresh", fresh)
    loader = shards.loader(made(tmp_path, 4), batch_size=2, size=SIZE, num_workers=num_workers)
    assert len(list(StreamLoader(loader, device=FakeDevice()))) == 2
    assert found == [True]


def test_options_are_the_dataloaders(tmp_path: Path) -> None:
    loader = shards.loader(made(tmp_path, 4), batch_size=2, num_workers=1, prefetch_factor=3)
    assert loader.prefetch_factor == 3


@pytest.mark.parametrize("urls", ["s-{000000..000001}.tar", "s-*.tar", ".", "index.json"])
def test_urls_may_be_braces_a_glob_a_folder_or_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urls: str
) -> None:
    made(tmp_path, 3, 4)
    monkeypatch.chdir(tmp_path)
    loader = shards.loader(urls, batch_size=8, size=SIZE, train=False)
    assert flat(labels_of(loader)) == list(range(7))


def test_no_shards_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^urls must name at least one shard, got .*, where "):
        shards.loader(tmp_path, batch_size=2)


@pytest.mark.parametrize("missing", ["webdataset", "torchcodec.decoders", "PIL"])
def test_without_a_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for name in ("images", "sharding", "tars"):  # they are imported again
        monkeypatch.delitem(sys.modules, f"streamloader.{name}")
        monkeypatch.delattr(f"streamloader.{name}")
    spec = importlib.util.spec_from_file_location("again", shards.__file__)
    assert spec is not None
    assert spec.loader is not None
    message = r'^streamloader.shards needs more: pip install "streamloader\[webdataset,jpeg\]" \('
    with pytest.raises(ImportError, match=message):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# -- testing


@pytest.mark.parametrize("num_workers", [0, 1, TWO])
def test_every_sample_comes_once_and_partial_batches_are_kept(
    tmp_path: Path, num_workers: int
) -> None:
    urls = made(tmp_path, 5, 3, 6)
    loader = shards.loader(urls, batch_size=4, size=SIZE, train=False, num_workers=num_workers)
    batches = labels_of(loader)
    assert sorted(flat(batches)) == list(range(14))
    assert len(batches) == len(loader) == len(StreamLoader(loader, device="cpu"))
    if num_workers < 2:
        assert flat(batches) == list(range(14))


def test_testing_repeats_exactly(tmp_path: Path) -> None:
    loader = shards.loader(made(tmp_path, 5, 3), batch_size=4, size=SIZE, train=False)
    assert same(pixels(loader), pixels(loader))


@pytest.mark.parametrize("num_workers", [0, TWO])
def test_ranks_test_disjoint_samples_and_all(tmp_path: Path, num_workers: int) -> None:
    urls, found = made(tmp_path, 5, 3, 6, 1), []
    for rank in range(2):
        with as_rank(rank, 2):
            loader = shards.loader(
                urls, batch_size=4, size=SIZE, train=False, num_workers=num_workers
            )
            batches = labels_of(loader)
            assert len(batches) == len(loader)
            found += flat(batches)
    assert sorted(found) == list(range(15))


# -- training


@pytest.mark.parametrize("num_workers", [0, 1, TWO])
def test_equal_shards_give_every_sample_once_in_another_order_each_epoch(
    tmp_path: Path, num_workers: int
) -> None:
    urls = made(tmp_path, 8, 8, 8, 8)
    loader = shards.loader(urls, batch_size=4, size=SIZE, num_workers=num_workers)
    epochs = [labels_of(loader) for _ in range(3)]
    assert {len(epoch) for epoch in epochs} == {len(loader)} == {8}
    assert all(sorted(flat(epoch)) == list(range(32)) for epoch in epochs)
    assert len({tuple(flat(epoch)) for epoch in epochs}) == 3


@pytest.mark.parametrize("num_workers", [0, TWO])
def test_the_same_seed_gives_the_same_batches_and_another_others(
    tmp_path: Path, num_workers: int
) -> None:
    urls = made(tmp_path, 8, 8, 8)

    def first(seed: int) -> list[Tensor]:
        loader = shards.loader(urls, batch_size=4, size=8, seed=seed, num_workers=num_workers)
        return pixels(loader)

    assert same(first(3), first(3))
    assert not same(first(3), first(4))


def test_no_global_generator_is_drawn_from_or_matters(tmp_path: Path) -> None:
    loader = shards.loader(made(tmp_path, 8), batch_size=4, size=8)
    random.seed(1)
    state = random.getstate()
    first = pixels(loader)
    assert random.getstate() == state
    random.seed(2)
    torch.manual_seed(2)
    loader.set_epoch(0)
    assert same(first, pixels(loader))


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"num_workers": 2}, marks=pytest.mark.slow),
        {"num_workers": 2, "persistent": 1},
    ],
    ids=["alone", "workers", "persistent"],
)
def test_set_epoch_takes_effect_at_the_next_iter_and_epochs_count_themselves(
    tmp_path: Path, options: dict[str, int]
) -> None:
    urls = made(tmp_path, 8, 8)
    workers = options.get("num_workers", 0)
    plain = shards.loader(urls, batch_size=4, size=8, num_workers=workers)
    expected = [pixels(plain) for _ in range(3)]
    loader = shards.loader(
        urls,
        batch_size=4,
        size=8,
        num_workers=workers,
        persistent_workers="persistent" in options,
    )
    stream = StreamLoader(loader, device="cpu")
    assert same(pixels(stream), expected[0])
    assert same(pixels(stream), expected[1])
    stream.set_epoch(1)
    assert same(pixels(stream), expected[1])
    assert same(pixels(loader), expected[2])


def test_set_epoch_during_a_pass_leaves_the_pass_alone(tmp_path: Path) -> None:
    loader = shards.loader(made(tmp_path, 8, 8), batch_size=4, size=8, num_workers=2)
    expected = pixels(loader)
    loader.set_epoch(0)
    live = iter(loader)
    loader.set_epoch(7)
    iter(loader)  # and so does the start of another
    assert same(pixels(live), expected)


def test_leaving_a_pass_of_persistent_workers_starts_the_next_clean(tmp_path: Path) -> None:
    urls = made(tmp_path, 8, 8)
    plain = shards.loader(urls, batch_size=4, size=8)
    loader = shards.loader(urls, batch_size=4, size=8, num_workers=1, persistent_workers=True)
    next(iter(StreamLoader(loader, device="cpu")))
    pixels(plain)
    assert same(pixels(StreamLoader(loader, device="cpu")), pixels(plain))


@pytest.mark.parametrize("num_workers", [0, TWO])
def test_ranks_train_on_disjoint_shards_that_change_with_the_epoch(
    tmp_path: Path, num_workers: int
) -> None:
    urls = made(tmp_path, *[4] * 8)
    seen: list[list[list[int]]] = []
    for rank in range(2):
        with as_rank(rank, 2):
            loader = shards.loader(urls, batch_size=4, size=SIZE, num_workers=num_workers)
            seen.append([flat(labels_of(loader)) for _ in range(3)])
    for epoch in range(3):
        assert sorted(seen[0][epoch] + seen[1][epoch]) == list(range(32))
    assert len({frozenset(labels) for labels in seen[0]}) == 3


@pytest.mark.filterwarnings("ignore:.* come once more, in place of others")
@pytest.mark.parametrize("num_workers", [0, TWO])
def test_ranks_make_equally_many_full_batches_of_unequal_shards(
    tmp_path: Path, num_workers: int
) -> None:
    urls = made(tmp_path, 1, 2, 20, 3)
    for rank in range(2):
        with as_rank(rank, 2):
            loader = shards.loader(urls, batch_size=3, size=SIZE, num_workers=num_workers)
            assert [len(batch) for batch in labels_of(loader)] == [3] * 4
            assert len(loader) == 4


def test_ranks_draw_different_crops(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.linear_gradient("L").save(file, "JPEG")
    files = [(f"{i}.{name}", data) for i in range(4) for name, data in
             (("jpg", file.getvalue()), ("cls", b"0"))]  # fmt: skip
    urls = [write(tmp_path / f"{i}.tar", files) for i in range(2)]
    crops = []
    for rank in range(2):
        with as_rank(rank, 2):
            loader = shards.loader(urls, batch_size=4, size=8, length=8)
            crops += list(torch.cat(pixels(loader)))
    assert len({crop.numpy().tobytes() for crop in crops}) == 8


def test_a_length_may_be_given_and_is_that_of_an_epoch(tmp_path: Path) -> None:
    urls = made(tmp_path, 4, 4, index=False)
    for length, batches in ((8, 2), (20, 5), (5, 1)):
        loader = shards.loader(urls, batch_size=4, size=SIZE, length=length)
        assert len(loader) == len(labels_of(loader)) == batches


@pytest.mark.parametrize("train", [True, False])
def test_len_is_an_error_where_it_is_not_known(tmp_path: Path, *, train: bool) -> None:
    urls = made(tmp_path, 5, 5, index=False)
    loader = shards.loader(urls, batch_size=4, size=SIZE, train=train, num_workers=2)
    with pytest.raises(TypeError, match=r"^the number of batches is not known: give the shards' "):
        len(StreamLoader(loader, device="cpu"))
    assert [len(batch) for batch in labels_of(loader)] == ([4, 4] if train else [4, 4, 1, 1])


def test_several_ranks_do_not_train_on_an_unknown_length(tmp_path: Path) -> None:
    urls = made(tmp_path, 5, 5, index=False)
    with as_rank(0, 2), pytest.raises(ValueError, match=r"^length must be given, .* on 2 ranks"):
        shards.loader(urls, batch_size=4)


def test_a_single_shard_is_shuffled_anew_each_epoch_and_lap(tmp_path: Path) -> None:
    loader = shards.loader(made(tmp_path, 16), batch_size=16, size=SIZE, length=32)
    laps = [*labels_of(loader), *labels_of(loader)]
    assert len(set(map(tuple, laps))) == 4
    assert all(sorted(lap) == list(range(16)) for lap in laps)


def test_samples_are_mixed_across_shards_unless_shuffle_is_0(tmp_path: Path) -> None:
    urls = made(tmp_path, 16, 16)
    ordered = flat(labels_of(shards.loader(urls, batch_size=4, size=SIZE, shuffle=0)))
    assert ordered in (list(range(32)), [*range(16, 32), *range(16)])
    mixed = flat(labels_of(shards.loader(urls, batch_size=4, size=SIZE)))
    assert 0 < sum(label < 16 for label in mixed[:16]) < 16


# -- images of their own sizes


def of_sizes(path: Path, *sizes: tuple[int, int]) -> Path:
    """A shard of pictures that change from pixel to pixel, labelled from 0."""
    files = []
    for label, (height, width) in enumerate(sizes):
        file = io.BytesIO()
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        levels = torch.stack((4 * rows, 4 * columns, rows + columns), dim=2).byte()
        Image.fromarray(levels.numpy()).save(file, "PNG")
        files += [(f"{label}.png", file.getvalue()), (f"{label}.cls", b"%d" % label)]
    return write(path, files)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_whole_images_are_only_decoded(tmp_path: Path, num_workers: int) -> None:
    urls = of_sizes(tmp_path / "0.tar", (9, 12), (20, 7), (1, 1))
    [(images, labels)] = shards.loader(
        urls, batch_size=4, deliver="whole", train=False, num_workers=num_workers
    )
    assert isinstance(images, augment.RaggedImages)
    assert [tuple(image.shape) for image in images] == [(3, 9, 12), (3, 20, 7), (3, 1, 1)]
    assert images[1][:, 3, 5].tolist() == [12, 20, 8]
    assert labels.tolist() == [0, 1, 2]


def test_crops_are_those_of_squares_before_they_are_resized(tmp_path: Path) -> None:
    urls = of_sizes(tmp_path / "0.tar", (40, 50), (33, 60), (48, 31), (8, 8))
    squares, crops = (
        shards.loader(urls, batch_size=4, size=SIZE, seed=5, length=4, deliver=deliver)
        for deliver in ("squares", "crops")
    )
    [(wanted, labels)], [(images, same_labels)] = list(squares), list(crops)
    assert labels.tolist() == same_labels.tolist()
    assert len({tuple(image.shape) for image in images}) > 1
    resized = augment.Resize((SIZE, SIZE))(images).int()
    apart = torch.stack([(one - wanted.int()).abs() for one in (resized, resized.flip(-1))])
    assert apart.amax((2, 3, 4)).amin(0).max() <= 2  # torch rounds after each axis


def test_a_stream_loader_makes_them_one_size(tmp_path: Path) -> None:
    urls = made(tmp_path, 8)
    loader = shards.loader(urls, batch_size=4, deliver="whole")
    recipe = augment.Compose([augment.RandomResizedCrop(SIZE), augment.RandomHorizontalFlip()])
    found = []
    for images, labels in StreamLoader(loader, FakeDevice(), transform=recipe):
        assert images.shape == (4, 3, SIZE, SIZE)
        assert (images.float().mean((1, 2, 3)) - labels * 4).abs().max() < 3
        found += labels.tolist()
    assert sorted(found) == list(range(8))


def test_a_collate_fn_of_the_users_comes_first(tmp_path: Path) -> None:
    urls = made(tmp_path, 4)
    loader = shards.loader(urls, batch_size=2, deliver="whole", collate_fn=list, train=False)
    assert [label for _, label in next(iter(loader))] == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deliver": "boxes"}, r'^deliver must be "squares", "crops" or "whole", got \'boxes\'$'),
        ({"deliver": "crops", "train": False}, r'^deliver="crops" are cut at random, to train, g'),
    ],
)
def test_what_cannot_be_delivered_is_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shards.loader(made(tmp_path, 4), batch_size=2, **options)


# -- what goes wrong


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("num_workers", [0, TWO])
def test_a_missing_shard_is_an_error_with_its_name(
    tmp_path: Path, num_workers: int, *, strict: bool
) -> None:
    urls = [made(tmp_path, 4) / "s-000000.tar", tmp_path / "gone.tar"]
    loader = shards.loader(
        urls, batch_size=2, train=False, num_workers=num_workers, strict=strict, size=SIZE
    )
    with shard_error(rf"(?m)^.*shard {tmp_path}/gone.tar: \[Errno 2\] No such"):
        labels_of(loader)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("size", [0, 700, 1024 + 512, 3072, 4096 + 100], ids=str)
def test_a_truncated_shard_is_an_error_with_its_name(tmp_path: Path, size: int) -> None:
    # Of a sample's files the first takes 512 + 1,024 bytes here, the second 512 + 512.
    urls = made(tmp_path, 6)
    assert len(jpeg(0)) < 1024
    cut(urls / "s-000000.tar", size)
    loader = shards.loader(urls, batch_size=1, size=SIZE, train=False)
    with shard_error(rf"^shard {tmp_path}/s-000000.tar: .+"):
        labels_of(loader)


def test_a_cut_between_two_files_is_seen_too(tmp_path: Path) -> None:
    urls = made(tmp_path, 3)
    data = (urls / "s-000000.tar").read_bytes()
    cut(urls / "s-000000.tar", data.index(b"0001.jpg"))
    loader = shards.loader(urls, batch_size=1, size=SIZE, train=False, num_workers=1)
    with shard_error(r"(?m)^.*s-000000.tar: no end of archive @ byte \d+: truncated"):
        labels_of(loader)


def test_an_empty_shard_has_no_samples(tmp_path: Path) -> None:
    loader = shards.loader(made(tmp_path, 2, 0, 1), batch_size=2, size=SIZE, train=False)
    assert labels_of(loader) == [[0, 1], [2]]


def test_a_compressed_shard_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    plain = write(tmp_path / "a.tar", [*sample(1), *sample(2)])
    with tarfile.open(path, "w:gz") as tar, tarfile.open(plain) as source:
        for entry in source:
            tar.addfile(entry, source.extractfile(entry))
    assert labels_of(shards.loader(path, batch_size=2, size=SIZE, train=False)) == [[1, 2]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_where_no_sample_can_be_used_training_ends_with_an_error(
    tmp_path: Path, num_workers: int
) -> None:
    path = write(tmp_path / "a.tar", [("0.txt", b"")])
    loader = shards.loader(path, batch_size=1, length=3, num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with shard_error(rf"(?m)^.*not one sample can be used of {path}$"):
            labels_of(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_where_no_sample_can_be_used_testing_ends_with_an_error(
    tmp_path: Path, num_workers: int
) -> None:
    path = write(tmp_path / "a.tar", [("0.txt", b"")])
    loader = shards.loader(path, batch_size=1, train=False, num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with shard_error(rf"(?m)^.*not one sample can be used of {path}$"):
            labels_of(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_worker_that_fills_no_batch_is_an_error(tmp_path: Path, num_workers: int) -> None:
    urls = made(tmp_path, 24, 24, index=False)
    loader = shards.loader(urls, batch_size=60, size=SIZE, num_workers=num_workers)
    count = 24 if num_workers else 48
    message = rf"(?m)^.*a worker fills no batch of 60 with the {count} samples of .*: give length"
    with shard_error(message):
        labels_of(loader)


def test_unequal_shards_with_an_index_are_read_nearly_whole(tmp_path: Path) -> None:
    loader = shards.loader(made(tmp_path, 40, 10), batch_size=10, size=SIZE, num_workers=2)
    assert len(set(flat(labels_of(loader)))) == 50


def test_samples_that_come_again_are_a_warning_of_the_first_rank(tmp_path: Path) -> None:
    urls = made(tmp_path, *[8] * 5)
    message = (
        r"^10.0% of the samples of an epoch come once more, in place of others: 5 shards cannot be "
        r"shared evenly among 1 worker\(s\) on each of 2 rank\(s\); use fewer workers, or more and "
    )
    with as_rank(0, 2), pytest.warns(UserWarning, match=message) as caught:
        shards.loader(urls, batch_size=4, size=SIZE)
    assert [warning.filename for warning in caught] == [__file__]
    with as_rank(1, 2):
        shards.loader(urls, batch_size=4, size=SIZE)
    with as_rank(0, 2):
        shards.loader(urls, batch_size=4, size=SIZE, train=False)


def test_shuffle_is_not_a_dataloaders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^shuffle must be a number of samples .*, got True: "):
        shards.loader(made(tmp_path, 4), batch_size=4, shuffle=True)


@pytest.mark.parametrize("num_workers", [0, TWO])
def test_skipped_samples_are_made_up_for_in_training(tmp_path: Path, num_workers: int) -> None:
    urls = [write(tmp_path / f"{i}.tar", [("x.jpg", b""), ("x.cls", b"0"), *sample(i + 1)])
            for i in range(2)]  # fmt: skip
    loader = shards.loader(urls, batch_size=1, size=SIZE, length=4, num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sorted(flat(labels_of(loader))) == [1, 1, 2, 2]
    assert loader.skipped >= 2


def test_all_workers_and_passes_warn_once_and_count(tmp_path: Path) -> None:
    bad = [(f"{key}.{name}", b"0") for key in "abc" for name in ("jpg", "cls")]
    write(tmp_path / "0.tar", [*bad, *sample(0)])
    good = [file for i in range(60) for file in sample(1, f"{i}")]
    write(tmp_path / "1.tar", [*good, *bad])  # later, so that there is no race to be first
    loader = shards.loader(tmp_path, batch_size=4, size=SIZE, train=False, num_workers=2)
    log = tmp_path / "warnings"

    def note(message: Warning | str, *_: object, **__: object) -> None:
        with log.open("a") as file:
            file.write(f"{message}\n")

    with warnings.catch_warnings():  # which forked workers inherit
        warnings.simplefilter("always")
        warnings.showwarning = note
        for _ in range(3):
            labels_of(loader)
    assert [line.split(":")[0] for line in log.read_text().splitlines()] == [
        f"shard {tmp_path}/0.tar, sample a"
    ]
    assert loader.skipped == 18
    assert StreamLoader(loader, device="cpu").skipped == 18


def test_labels_must_be_whole_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [("0.jpg", jpeg(1)), ("0.cls", b"cat")])
    loader = shards.loader(path, batch_size=1, train=False, strict=True)
    with shard_error(rf"^shard {path}, sample 0: invalid literal .* b'cat'$"):
        labels_of(loader)


def test_the_error_survives_its_way_out_of_a_worker() -> None:
    assert str(pickle.loads(pickle.dumps(ShardError("shard a: why")))) == "shard a: why"


# -- cases.md, I and J


@pytest.mark.parametrize(("world", "num_workers"), [(1, 4), (3, 0), (2, 2)])
def test_i01_fewer_shards_than_workers_or_ranks_is_an_error_that_says_how_many(
    tmp_path: Path, world: int, num_workers: int
) -> None:
    urls, needed = made(tmp_path, 10, 10), world * max(num_workers, 1)
    message = rf"^urls must name at least {needed} shard\(s\), .* {world} rank\(s\), got 2: "
    with as_rank(0, world), pytest.raises(ValueError, match=message):
        shards.loader(urls, batch_size=2, num_workers=num_workers)


def test_i01_ranks_that_come_later_are_seen_when_a_pass_starts(tmp_path: Path) -> None:
    loader = shards.loader(made(tmp_path, 10, 10), batch_size=2, size=SIZE)
    with as_rank(1, 3), pytest.raises(ValueError, match=r"^urls must name at least 3 shard\(s\)"):
        labels_of(loader)


def test_i01_as_many_shards_as_workers_are_enough(tmp_path: Path) -> None:
    loader = shards.loader(made(tmp_path, 10, 10), batch_size=2, size=SIZE, num_workers=2)
    assert sorted(flat(labels_of(loader))) == list(range(20))


INCOMPLETE = [*sample(0), ("1.jpg", jpeg(1)), *sample(2), ("3.cls", b"3"), *sample(4)]


def test_i02_an_incomplete_sample_is_skipped_with_one_warning(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", INCOMPLETE)
    loader = shards.loader(path, batch_size=2, size=SIZE, train=False)
    message = rf"^shard {path}, sample 1: needs .jpg .* and .cls, has .jpg; it is skipped, and"
    with pytest.warns(UserWarning, match=message) as caught:
        assert labels_of(loader) == [[0, 2], [4]]
    assert len(caught) == 1
    assert loader.skipped == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_i02_an_incomplete_sample_is_an_error_if_strict(tmp_path: Path, num_workers: int) -> None:
    path = write(tmp_path / "a.tar", INCOMPLETE)
    loader = shards.loader(
        path, batch_size=1, size=SIZE, train=False, strict=True, num_workers=num_workers
    )
    got = []
    message = rf"(?m)^.*shard {path}, sample 1: needs .* and .cls, has .jpg$"
    with shard_error(message):
        for _, labels in StreamLoader(loader, device="cpu"):
            got += labels.tolist()
    assert got == [0]


@pytest.mark.parametrize("num_workers", [0, 1, TWO])
def test_i03_the_length_is_not_multiplied_by_the_workers(tmp_path: Path, num_workers: int) -> None:
    urls = made(tmp_path, *[5] * 4)
    loader = shards.loader(urls, batch_size=2, size=SIZE, length=12, num_workers=num_workers)
    assert len(labels_of(loader)) == len(loader) == 6


def test_i04_with_a_process_group_shards_are_split_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, seen = made(tmp_path, 4, 4, 4, 4), []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        loader = shards.loader(urls, batch_size=4, size=SIZE, num_workers=2)
        seen += flat(labels_of(loader))
    assert sorted(seen) == list(range(16))


def test_i05_a_name_twice_in_a_shard_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [*sample(0), *sample(1, "a"), sample(2, "a")[0]])
    loader = shards.loader(path, batch_size=1, size=SIZE, train=False)
    for _ in range(2):  # and it leaves the loader in good health
        with shard_error(rf"^shard {path}: a.jpg: duplicate file name in tar"):
            labels_of(loader)


def test_i05_one_name_in_two_shards_is_two_samples(tmp_path: Path) -> None:
    urls = [write(tmp_path / f"{i}.tar", sample(i, "same")) for i in range(2)]
    assert labels_of(shards.loader(urls, batch_size=2, size=SIZE, train=False)) == [[0, 1]]


def test_i06_dots_and_folders_in_names(tmp_path: Path) -> None:
    good = [*sample(1, "dir.x/7"), *sample(2, "dir.x/8")]
    upper = [("9.JPEG", jpeg(3)), ("9.cls", b"3"), ("9.seg.png", b"")]
    path = write(tmp_path / "a.tar", [*good, *upper])
    loader = shards.loader(path, batch_size=3, size=SIZE, train=False, strict=True)
    assert labels_of(loader) == [[1, 2, 3]]


def test_i06_the_error_lists_the_keys_that_were_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", sample(1, "n0.1_33"))
    loader = shards.loader(path, batch_size=1, train=False, strict=True)
    message = (
        f"shard {path}, sample n0: needs .jpg (or .jpeg, .png) and .cls, has .1_33.cls, .1_33.jpg"
    )
    with shard_error(f"^{re.escape(message)}$"):
        labels_of(loader)


def test_i07_the_end_of_a_shard_ends_its_last_sample(tmp_path: Path) -> None:
    # webdataset marks the end by an empty dict; without it the two halves would be one sample.
    first = write(tmp_path / "0.tar", [*sample(0), ("x.jpg", jpeg(1))])
    second = write(tmp_path / "1.tar", [("x.cls", b"1"), *sample(2)])
    loader = shards.loader([first, second], batch_size=2, size=SIZE, train=False)
    with pytest.warns(UserWarning, match=rf"^shard {first}, sample x: needs .*, has .jpg; "):
        assert labels_of(loader) == [[0, 2]]
    assert loader.skipped == 2


def odd(label: int, mode: str, kind: str) -> list[tuple[str, bytes]]:
    """A sample whose picture is of another kind than its name says."""
    file = io.BytesIO()
    if mode == "I;16":
        picture = Image.frombytes(mode, (40, 32), (label * 4 * 257).to_bytes(2, "little") * 1280)
    else:
        picture = Image.new("RGB", (40, 32), (label * 4,) * 3).convert(mode)
    picture.save(file, kind)
    return [(f"{label:04d}.jpg", file.getvalue()), (f"{label:04d}.cls", b"%d" % label)]


@pytest.mark.parametrize("train", [True, False])
def test_j01_j05_j06_odd_images_are_batched_with_the_others(tmp_path: Path, *, train: bool) -> None:
    kinds = [("CMYK", "JPEG"), ("L", "JPEG"), ("RGBA", "PNG"), ("P", "PNG"), ("I;16", "PNG"),
             ("RGB", "WEBP"), ("P", "GIF"), ("RGB", "BMP")]  # fmt: skip
    files = [file for i, kind in enumerate(kinds) for file in odd(8 + 2 * i, *kind)]
    path = write(tmp_path / "a.tar", [*sample(1), *files, *sample(2)])
    loader = shards.loader(path, batch_size=5, size=SIZE, train=train, strict=True, length=10)
    assert sorted(flat(labels_of(loader))) == [1, 2, *range(8, 24, 2)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_j02_bad_images_are_skipped_and_labels_stay_with_their_images(
    tmp_path: Path, num_workers: int
) -> None:
    bad = [b"", b"\xff\xd8\xff" + bytes(range(200)), b"<html>", jpeg(9)[:300]]
    files = [file for label in range(60) for file in sample(label)]
    for number, data in enumerate(bad):
        files[20 * number : 20 * number] = [(f"bad{number}.jpg", data), (f"bad{number}.cls", b"1")]
    path = write(tmp_path / "a.tar", files)
    loader = shards.loader(path, batch_size=7, size=SIZE, train=False, num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert flat(labels_of(loader)) == list(range(60))
    assert loader.skipped == 4


def test_j02_a_bad_image_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [*sample(0), ("b.jpg", b"<html>"), ("b.cls", b"1")])
    reason = rf"shard {path}, sample b: no image can be decoded from its 6 bytes: cannot identify "
    with pytest.warns(UserWarning, match=f"^{reason}"):
        labels_of(shards.loader(path, batch_size=1, size=SIZE, train=False))
    with shard_error(f"^{reason}"):
        labels_of(shards.loader(path, batch_size=1, size=SIZE, train=False, strict=True))


def test_j07_broken_exif_passes_without_a_warning(tmp_path: Path) -> None:
    file = io.BytesIO()
    picture = Image.new("RGB", (40, 32), (20,) * 3)
    picture.save(file, "JPEG", exif=b"Exif\0\0" + bytes(range(256)) * 200)
    path = write(tmp_path / "a.tar", [("5.jpg", file.getvalue()), ("5.cls", b"5")])
    assert labels_of(shards.loader(path, batch_size=1, size=SIZE, train=False)) == [[5]]
