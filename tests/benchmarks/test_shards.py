import dataclasses
import io
import itertools
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks._shards import endless, from_shards
from benchmarks._sources import Request
from streamloader.augment import RaggedImages
from tests.archives import write

REQUEST = Request(
    batch_size=4,
    image_size=8,
    workers=2,
    prefetch_factor=2,
    late=0,
    late_seconds=0.0,
    seed=0,
    shards=None,
)


def test_passes_follow_one_another() -> None:
    assert list(itertools.islice(endless([1, 2]), 5)) == [1, 2, 1, 2, 1]


def test_a_source_without_batches_is_an_error_not_a_hang() -> None:
    with pytest.raises(RuntimeError, match=r"^the source has no batches$"):
        next(endless([]))


def test_shards_that_are_not_there_are_named(tmp_path: Path) -> None:
    pytest.importorskip("streamloader.shards", exc_type=ImportError)
    request = dataclasses.replace(REQUEST, shards=str(tmp_path))
    with pytest.raises(SystemExit, match=rf"^--shards {tmp_path}: urls must name at least one"):
        from_shards(request)


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "streamloader.shards", None)
    with pytest.raises(SystemExit, match=r"^--source shards: .*streamloader.shards"):
        from_shards(REQUEST)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("streamloader.shards", exc_type=ImportError)
    request = dataclasses.replace(REQUEST, shards=str(tmp_path / "none"))
    with pytest.raises(SystemExit, match=r"none: no such folder or file$"):
        from_shards(request)


def test_a_list_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("streamloader.shards", exc_type=ImportError)
    urls = "::".join(str(tmp_path / f"a-rather-long-name-{number}.tar") for number in range(9))
    from_shards(dataclasses.replace(REQUEST, shards=urls))


@pytest.mark.slow
def test_batches_come_from_shards(tmp_path: Path) -> None:
    pytest.importorskip("streamloader.shards", exc_type=ImportError)
    for number in range(2):
        _write(tmp_path / f"{number}.tar")
    source = from_shards(dataclasses.replace(REQUEST, shards=str(tmp_path)))
    images, labels = next(itertools.islice(endless(source(pin_memory=False)), 9, None))
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (4, 3, 8, 8))
    assert labels.tolist() == [7] * 4


@pytest.mark.parametrize("augment", ["gpu", "gpu-cut"])
def test_where_the_device_augments_images_are_of_their_own_sizes(
    tmp_path: Path, augment: str
) -> None:
    pytest.importorskip("streamloader.shards", exc_type=ImportError)
    _write(tmp_path / "0.tar")
    request = dataclasses.replace(REQUEST, shards=str(tmp_path), workers=1, augment=augment)
    images, labels = next(iter(from_shards(request)(pin_memory=False)))
    assert isinstance(images, RaggedImages)
    assert labels.tolist() == [7] * 4
    assert (images.layout.size == (16, 16)) == (augment == "gpu")


def _write(path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (16, 16)).save(picture, "jpeg")
    contents = {"jpg": picture.getvalue(), "cls": b"7"}
    write(path, [(f"{key}.{name}", data) for key in range(3) for name, data in contents.items()])
