"""Images of different sizes: packed, sent, and made a batch of one size."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory
from typing_extensions import override

from streamloader import StreamLoader, augment, on, tree
from streamloader.augment import RaggedImages, batches, ragged
from streamloader.checker import CheckedDevice
from streamloader.context import Context
from tests.augment.oracle import bytes_, floats
from tests.loaders import DEPTHS, devices

SIZES = ((5, 7), (1, 1), (8, 3))
RECIPE = augment.Compose(
    [
        augment.RandomResizedCrop(6),
        augment.RandomHorizontalFlip(),
        augment.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.2)),
    ],
    memory_format=torch.channels_last,
)


def pictures(number: int = 0) -> list[Tensor]:
    return [bytes_(3, *size, seed=9 * number + n) for n, size in enumerate(SIZES)]


def hwc(image: Tensor) -> Tensor:
    """The same image, in memory pixel after pixel, as decoders give it."""
    return image.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def same(batch: RaggedImages, images: list[Tensor]) -> bool:
    return len(batch) == len(images) and all(
        torch.equal(one, other) for one, other in zip(batch, images, strict=True)
    )


# -- packing --------------------------------------------------------------------------------------


def test_images_come_out_as_they_went_in() -> None:
    images = pictures()
    batch = RaggedImages.pack(images)

    assert same(batch, images)
    assert (len(batch), batch.channels, batch.dtype) == (3, 3, torch.uint8)
    assert batch.elements.shape == (sum(image.numel() for image in images),)
    assert batch.places.tolist() == batch.known.tolist()
    assert batch.places.dtype == torch.int64
    assert list(zip(batch.layout.heights, batch.layout.widths, strict=True)) == list(SIZES)


def test_an_image_that_is_pixel_after_pixel_stays_so() -> None:
    image = bytes_(3, 5, 7)
    batch = RaggedImages.pack([hwc(image), image])

    assert same(batch, [image, image])
    assert batch[0].stride() == (1, 21, 3)
    assert batch[1].stride() == (35, 7, 1)
    assert torch.equal(batch.elements[:105].view(5, 7, 3), image.permute(1, 2, 0))
    assert batch.reach == 105


def test_arrays_are_height_width_channel() -> None:
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    readonly, turned = image.copy(), image[::-1]
    readonly.flags.writeable = False
    batch = RaggedImages.pack([image, readonly, turned])

    assert same(batch, [torch.from_numpy(image).permute(2, 0, 1)] * 2 + [batch[0].flip(1)])
    assert all(one.stride() == (1, 15, 3) for one in batch)


def test_a_part_of_an_image_is_packed_without_the_rest() -> None:
    image = hwc(bytes_(3, 9, 9))
    cut = image[:, 2:6, 1:4]
    batch = RaggedImages.pack([cut, cut[:, ::2], image[:1].expand(3, -1, -1)])

    assert same(batch, [cut, cut[:, ::2], image[:1].expand(3, -1, -1)])
    assert len(batch.elements) == 36 + 18 + 243


@given(st.data())
def test_any_sizes_strides_and_dtypes(data: Any) -> None:
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float32, torch.bfloat16]))
    channels, images = data.draw(st.integers(1, 4)), []
    for seed in range(data.draw(st.integers(1, 5))):
        shape = [channels, *data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))]
        axes = data.draw(st.permutations([0, 1, 2]))
        step = data.draw(st.integers(1, 2))
        values = (bytes_(*[step * shape[axis] for axis in axes], seed=seed)).to(dtype)
        image = values[::step, ::step, ::step].permute([axes.index(axis) for axis in range(3)])
        images.append(image)
    batch = RaggedImages.pack(images)

    assert same(batch, images)
    assert batch.reach == max(image.numel() for image in images)


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        ([], ValueError, r"^images must hold at least one, got none$"),
        (["x"], TypeError, r"^images must be tensors .*, got str: np.asarray makes one of Pillow"),
        ([floats(4, 4)], ValueError, r"^images must have three dimensions, and pixels, got .*4, 4"),
        ([floats(3, 0, 4)], ValueError, r"^images must have three dimensions, and pixels, got one"),
        ([floats(3, 4, 4), bytes_(3, 4, 4)], TypeError, r"^images must be of one dtype, got torch"),
        ([floats(3, 4, 4), floats(1, 4, 4)], ValueError, r"^images .* of channels, got 3 and 1: c"),
        ([torch.zeros(3, 4, 4).long()], TypeError, r"^images must be uint8 or floating point, got"),
        ([torch.empty(3, 4, 4, device="meta")], TypeError, r"^images must be on the CPU to be pac"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    images: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RaggedImages.pack(images)


def test_parts_that_do_not_fit_are_refused() -> None:
    batch = RaggedImages.pack(pictures())
    with pytest.raises(ValueError, match=r"places and known \(N, 6\), got \(180,\), \(2, 6\) and "):
        RaggedImages(batch.elements, batch.places[:2], batch.known, 3)
    with pytest.raises(ValueError, match=r"^elements must be of one dimension, places and known"):
        RaggedImages(batch.elements[None], batch.places, batch.known, 3)


# -- a batch --------------------------------------------------------------------------------------


def test_it_says_what_it_is() -> None:
    batch = RaggedImages.pack(pictures())
    none = RaggedImages(batch.elements, batch.places[:0], batch.known[:0], 3)

    assert repr(batch) == ("RaggedImages(3 images, 3 channels, 1x1 to 8x7, uint8, device='cpu')")
    assert repr(none) == "RaggedImages(0 images, 3 channels, none, uint8, device='cpu')"
    assert none.reach == 0
    assert not batch.is_cuda


def test_an_image_that_is_not_there() -> None:
    batch = RaggedImages.pack(pictures())
    assert torch.equal(batch[-1], batch[2])
    with pytest.raises(IndexError):
        batch[3]


def test_an_image_is_a_view_also_of_elements_that_are_one() -> None:
    batch = RaggedImages.pack(pictures())
    longer = torch.cat((torch.zeros(4, dtype=torch.uint8), batch.elements))
    moved = RaggedImages(longer[4:], batch.places, batch.known, 3)

    assert same(moved, list(batch))
    moved[1].fill_(7)
    assert longer[4 + 105] == 7


def test_moved_it_keeps_what_it_knows() -> None:
    batch = RaggedImages.pack(pictures())
    moved = batch.to("meta", non_blocking=True)

    assert (moved.device.type, moved.places.device.type) == ("meta", "meta")
    assert moved.known is batch.known
    assert moved.layout.count == 3
    assert batch.to("cpu") is batch


def test_it_is_pinned_as_a_loader_pins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    batch = RaggedImages.pack(pictures())
    found, labels = pin_memory([batch, torch.arange(3)])

    assert same(found, list(batch))
    assert isinstance(found, RaggedImages)
    assert pinned[0] is batch.elements
    assert pinned[1] is batch.places
    assert len(pinned) == 3
    assert labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_the_same_images(copied: Callable[[Any], Any]) -> None:
    batch = RaggedImages.pack(pictures())
    other = copied(batch)

    assert same(other, list(batch))
    assert other.elements.data_ptr() != batch.elements.data_ptr()


def test_it_can_be_made_anew_from_its_fields() -> None:
    """As others do to move a dataclass, torchtnt for one."""
    batch = RaggedImages.pack(pictures())
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    assert same(RaggedImages(**fields), pictures())


def test_a_tree_sees_its_tensors() -> None:
    batch = RaggedImages.pack(pictures())

    assert tree.leaves([batch, batch.places]) == [batch.elements, batch.places, batch.places]
    assert tree.leaves([batch, batch.places], RaggedImages) == [batch, batch.places]
    assert tree.copied(batch).known is not batch.known
    assert tree.replace(lambda leaf: leaf, batch) is batch


# -- collating ------------------------------------------------------------------------------------


class Sample(NamedTuple):
    name: str
    image: Any
    label: int


def test_images_alone_are_collated() -> None:
    assert same(augment.collate(pictures()), pictures())


def test_the_first_image_of_a_sample_is_packed_and_the_rest_is_as_ever() -> None:
    images, mask = pictures(), floats(1, 2, 2)
    out = augment.collate([(image, n, mask) for n, image in enumerate(images)])

    assert isinstance(out, list)
    assert same(out[0], images)
    assert out[1].tolist() == [0, 1, 2]
    assert out[2].shape == (3, 1, 2, 2)


def test_samples_may_be_of_other_kinds() -> None:
    images = [np.ascontiguousarray(image.permute(1, 2, 0)) for image in pictures()]
    named = augment.collate([Sample("x", image, n) for n, image in enumerate(images)])
    mapped = augment.collate([{"label": n, "image": i} for n, i in enumerate(images)])

    assert named[0] == ["x"] * 3
    assert same(named[1], pictures())
    assert same(mapped["image"], pictures())
    assert mapped["label"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("sample", [(1, 2), 3, {"x": "y"}, torch.zeros(3), ()])
def test_a_sample_without_an_image_is_refused(sample: Any) -> None:
    with pytest.raises(TypeError, match=r"^samples must hold an image, a tensor \(C, H, W\) or "):
        augment.collate([sample])


# -- in a recipe ----------------------------------------------------------------------------------


def test_each_image_is_augmented_as_it_would_be_alone() -> None:
    images = pictures()
    batch = RaggedImages.pack([images[0], hwc(images[1]), hwc(images[2])])
    table = RECIPE.plan(batch, Context(1, 0, 0, 0))
    out = RECIPE.run(batch, table)

    assert out.shape == (3, 3, 6, 6)
    assert out.is_contiguous(memory_format=torch.channels_last)
    for n, image in enumerate(images):
        assert torch.equal(out[n], RECIPE.run(image, table[n : n + 1]))


def test_of_one_size_they_are_planned_and_augmented_as_a_tensor() -> None:
    images = bytes_(4, 3, 9, 8)
    batch, context = RaggedImages.pack(list(images)), Context(1, 0, 0, 0)
    table = RECIPE.plan(images, context)

    assert torch.equal(RECIPE.plan(batch, context), table)
    assert torch.equal(RECIPE.run(batch, table), RECIPE.run(images, table))


def test_they_are_augmented_wherever_they_are() -> None:
    batch = {"label": torch.arange(3), "image": RaggedImages.pack(pictures())}
    found, place = batches.images([batch])

    assert (found, place) == (batch["image"], 1)
    out = RECIPE(batch)
    assert out["image"].shape == (3, 3, 6, 6)
    assert out["label"] is batch["label"]
    assert on("image", RECIPE)(batch)["image"].shape == (3, 3, 6, 6)


def test_the_first_images_are_meant_ragged_or_not() -> None:
    packed, plain = RaggedImages.pack(pictures()), bytes_(3, 3, 9, 9)

    assert RECIPE((plain, packed))[1] is packed
    assert RECIPE((packed, plain))[1] is plain


def test_images_that_come_out_in_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^images must come out in one size to be a batch, got"):
        augment.Resize(4)(RaggedImages.pack(pictures()))


def test_a_batch_of_none_is_refused() -> None:
    batch = RaggedImages.pack(pictures())
    with pytest.raises(ValueError, match=r"^the batch must hold images with pixels, got RaggedIm"):
        RECIPE(RaggedImages(batch.elements, batch.places[:0], batch.known[:0], 3))


def test_they_are_neither_mixed_nor_shown() -> None:
    batch = (RaggedImages.pack([image / 255 for image in pictures()]), torch.arange(3))
    with pytest.raises(
        ValueError, match=r"^images must be \(N, C, H, W\) here, of one size, got R"
    ):
        augment.MixUp(num_classes=3)(batch)
    with pytest.raises(ValueError, match=r"^images must be .*: crop or resize them before, as in "):
        augment.preview(batch)
    out = augment.MixUp(num_classes=3)(RECIPE(batch))
    assert out[1].shape == (3, 3)


# -- in a loader ----------------------------------------------------------------------------------


@pytest.fixture(params=[*devices(), pytest.param(CheckedDevice, id="checked")])
def device(request: pytest.FixtureRequest) -> Any:
    return request.param()


def expected(count: int, seed: int) -> list[Tensor]:
    made = []
    for number in range(count):
        batch = RaggedImages.pack(pictures(number))
        made.append(RECIPE.run(batch, RECIPE.plan(batch, Context(seed, 0, number, 0))))
    return made


def batch_of(number: int) -> tuple[RaggedImages, Tensor]:
    return RaggedImages.pack(pictures(number)), torch.full((3,), number)


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("key", [0, "image", None])
def test_a_loader_augments_them(device: Any, depth: int, key: Any) -> None:
    source = [batch_of(number) for number in range(4)]
    shaped: list[Any] = list(source)
    if key == "image":
        shaped = [{"label": label, "image": images} for images, label in source]
    transform: Any = RECIPE if key is None else on(key, RECIPE)
    loader = StreamLoader(shaped, device, transform=transform, prefetch_batches=depth, seed=3)
    found = [batch[key or 0] for batch in loader]

    assert all(map(torch.equal, found, expected(4, 3)))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_loader_hands_them_over(device: Any, depth: int) -> None:
    source = [batch_of(number) for number in range(3)]
    for number, (images, label) in enumerate(StreamLoader(source, device, prefetch_batches=depth)):
        assert isinstance(images, RaggedImages)
        assert same(images, pictures(number))
        assert label[0] == number


class Pictures(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    @override
    def __getitem__(self, index: int) -> Any:
        return hwc(pictures(index // 3)[index % 3]), index


def test_workers_share_the_memory_that_they_pack_into() -> None:
    loader = DataLoader(Pictures(), 3, num_workers=1, collate_fn=augment.collate)
    pairs = list(loader)

    assert [labels.tolist() for _, labels in pairs] == [[0, 1, 2], [3, 4, 5]]
    for number, (images, _) in enumerate(pairs):
        assert same(images, pictures(number))
        assert images.elements.is_shared()
    found = [images for images, _ in StreamLoader(loader, "cpu", transform=RECIPE, seed=3)]
    assert all(map(torch.equal, found, expected(2, 3)))


def test_in_a_worker_memory_is_shared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "get_worker_info", lambda: "a worker")
    batch = RaggedImages.pack(pictures())

    assert batch.elements.is_shared()
    assert same(batch, pictures())


def test_it_is_not_converted_nor_sliced() -> None:
    batch = RaggedImages.pack([torch.zeros(3, 2, 2)])
    with pytest.raises(TypeError, match=r"^device must be a device, got torch.float16: augment"):
        batch.to(torch.float16)
    with pytest.raises(TypeError, match="slice"):
        batch[0:1]  # type: ignore[index]


class Named(NamedTuple):
    image: Tensor
    label: int


def test_collate_keeps_a_namedtuple() -> None:
    made = augment.collate([Named(torch.zeros(3, 2, 2), 1), Named(torch.ones(3, 1, 4), 2)])
    assert type(made) is Named
    assert len(made.image) == 2
    assert made.label.tolist() == [1, 2]  # type: ignore[attr-defined]
