import dataclasses
import itertools
from typing import Any

import pytest
import torch

from benchmarks._sources import Endless, Images, Punctuated, Request, comes_late, memory

REQUEST = Request(
    batch_size=4,
    image_size=8,
    workers=1,
    prefetch_factor=2,
    late=0,
    late_seconds=0.0,
    seed=0,
)


def test_any_n_batches_in_a_row_have_one_late_one() -> None:
    late = [comes_late(number, 5) for number in range(20)]
    assert all(sum(late[start : start + 5]) == 1 for start in range(15))


def test_images_depend_on_the_seed_alone_and_go_round() -> None:
    first, second, other = Images(8, 4, 0), Images(8, 4, 0), Images(8, 4, 1)
    assert torch.equal(first[3][0], second[3][0])
    assert not torch.equal(first[3][0], other[3][0])
    assert torch.equal(first[3][0], first[11][0])
    assert first[3][1] == first[11][1]


def test_images_are_larger_where_the_device_crops_them() -> None:
    request = dataclasses.replace(REQUEST, image_size=224, batch_size=1, augment="gpu")
    dataset: Any = memory(request)(pin_memory=False).dataset
    assert dataset[0][0].shape == (3, 256, 256)


@pytest.mark.slow
def test_a_source_is_endless_batches_of_images_and_labels() -> None:
    batches = iter(memory(REQUEST)(pin_memory=False))
    images, labels = next(itertools.islice(batches, 20, None))
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (4, 3, 8, 8))
    assert (labels.dtype, tuple(labels.shape)) == (torch.int64, (4,))


def test_a_late_batch_is_delayed_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks._sources.time.sleep", slept.append)
    batches = iter(Punctuated(Images(8, 4, 0), late=3, late_seconds=0.25, sampler=Endless()))
    counts = [len(slept) for _ in range(6) if next(batches)]
    assert counts == [0, 0, 1, 1, 1, 2]
    assert set(slept) == {0.25}
