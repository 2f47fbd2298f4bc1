"""Triton's executor against the definition: kernels are interpreted here, and compiled on a GPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from streamloader import augment
from streamloader.augment import batches, fused, reference
from streamloader.augment.ragged import Images, RaggedImages
from streamloader.augment.recipe import Recipe
from streamloader.context import Context

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = augment.Normalize(MEAN, STD)
CROP = augment.RandomResizedCrop(12)
FLIP = augment.RandomHorizontalFlip()
FLOATS = augment.ToDtype(torch.float32, scale=True)
JITTER = augment.ColorJitter(0.4, 0.4, 0.4, 0.1)


def images(channels: int = 3, dtype: torch.dtype = torch.uint8, size: Any = (19, 25)) -> Tensor:
    made = torch.Generator().manual_seed(channels)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (2, channels, *size), dtype=dtype, generator=made)
    return torch.rand(2, channels, *size, generator=made).to(dtype)


def both(recipe: Recipe, batch: Images, number: int = 0) -> tuple[Tensor, Tensor]:
    """What Triton and what the definition make of it."""
    layout, program = batches.layout(batch), recipe.program(batch.dtype)
    table = recipe.plan(layout, Context(3, 0, number, 0))
    got = fused.run(program, batch, table, recipe.layouts(layout))
    wanted = reference.run(program, batch, table)
    assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    return got, wanted


def assert_close(recipe: Recipe, batch: Images, atol: float = 4e-6) -> None:
    got, wanted = both(recipe, batch)
    if got.dtype == torch.uint8:
        apart = (got.int() - wanted.int()).abs()
        assert apart.max() <= 1  # a half may be rounded either way
        assert apart.float().mean() < 1e-2  # there are many: of 20 pixels made 30, say
    else:
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=atol)


RECIPES: dict[str, Sequence[Recipe]] = {
    "the ImageNet recipe": [CROP, FLIP, NORMALIZE],
    "with jitter": [CROP, FLIP, JITTER, augment.RandomGrayscale(0.5), NORMALIZE],
    "evaluation": [augment.Resize(12), augment.CenterCrop(10), NORMALIZE],
    "enlarged and padded": [augment.Resize(32), augment.CenterCrop(40)],
    "a padded crop": [augment.RandomCrop(20, padding=6, fill=3), FLIP],
    "bicubic": [augment.RandomResizedCrop(12, interpolation="bicubic")],
    "bicubic without antialias": [augment.Resize((10, 30), "bicubic", antialias=False)],
    "bilinear without antialias": [augment.Resize((10, 30), antialias=False)],
    "nearest": [augment.Resize(10, "nearest"), augment.CenterCrop(7)],
    "nearest-exact": [augment.Resize(30, "nearest-exact"), augment.CenterCrop(21)],
    "only flips": [augment.RandomVerticalFlip(), FLIP],
    "only jitter": [JITTER],
    "jitter without contrast": [augment.ColorJitter(0.4, 0, 0.4, 0.1)],
    "only grey": [augment.RandomGrayscale(0.5)],
    "erased": [CROP, NORMALIZE, augment.RandomErasing(1.0, value=(0.1, 0.2, 0.3))],
    "noise": [FLOATS, augment.RandomErasing(1.0, value="random")],
    "several passes": [augment.Resize(15), CROP, JITTER, JITTER, augment.RandomCrop(8)],
    "other values": [augment.ToDtype(torch.float32), augment.CenterCrop(9)],
}


@pytest.mark.parametrize("transforms", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(
    "dtype", [torch.uint8, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_it_is_what_the_definition_says(transforms: Sequence[Recipe], dtype: torch.dtype) -> None:
    assert_close(augment.Compose(transforms), images(dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.float16])
def test_any_channels_and_dtypes(channels: int, dtype: torch.dtype) -> None:
    rest: list[Recipe] = [augment.RandomErasing(1.0)]
    rest = [JITTER, *rest] if channels == 1 else rest
    recipe = augment.Compose([CROP, FLIP, *rest])
    assert_close(recipe, images(channels, dtype), atol=1e-3 if dtype == torch.float16 else 4e-6)


@pytest.mark.parametrize("channels", [1, 2])
def test_every_operation_that_any_channels_take(channels: int) -> None:
    noise = augment.RandomErasing(1.0, value="random")
    grey = [augment.RandomGrayscale(0.5)] if channels == 1 else []
    recipe = augment.Compose([augment.CenterCrop(9), *grey, augment.Normalize(0.5, 0.2), noise])
    assert_close(recipe, images(channels))


def test_compiled_kernels_work_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_interpreted", lambda: False)
    monkeypatch.setattr(fused, "TILE", (16, 32))
    out = torch.empty(2, 3, 40, 65)
    assert fused._tile(out) == (16, 32)
    assert fused._tiles(out) == 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_it_is_written_once_as_it_should_come_out(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    recipe = augment.Compose([CROP, FLIP, augment.ToDtype(dtype, scale=True)], memory_format)
    got, wanted = both(recipe, images())
    assert got.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1)


def ragged(channels: int = 3, dtype: torch.dtype = torch.uint8, *sizes: Any) -> RaggedImages:
    """Images of different sizes, one of them pixel after pixel."""
    made = [images(channels, dtype, size)[0] for size in sizes or ((19, 25), (31, 8), (3, 14))]
    made[0] = made[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return RaggedImages.pack(made)


RAGGED = {
    name: transforms
    for name, transforms in RECIPES.items()
    if name not in ("only flips", "only jitter", "jitter without contrast", "only grey", "noise")
} | {
    "jitter, then a crop": [JITTER, CROP],
    "jitter twice, then a crop": [JITTER, FLIP, JITTER, CROP],
    "flips, then a crop": [FLIP, augment.RandomGrayscale(0.5), augment.RandomCrop(9, padding=5)],
    "noise, then a crop": [FLOATS, augment.RandomErasing(1.0, value="random"), CROP],
}
RAGGED["a padded crop"] = [augment.RandomCrop(20, 6, pad_if_needed=True, fill=3), FLIP]


@pytest.mark.slow
@pytest.mark.parametrize("transforms", RAGGED.values(), ids=RAGGED)
def test_images_of_different_sizes(transforms: Sequence[Recipe]) -> None:
    assert_close(augment.Compose(transforms), ragged(3, torch.uint8))


@pytest.mark.slow
def test_images_of_different_sizes_may_be_floats() -> None:
    assert_close(augment.Compose(RECIPES["with jitter"]), ragged(3, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 2])
def test_images_of_different_sizes_have_any_channels(channels: int) -> None:
    recipe = augment.Compose([FLIP, augment.RandomErasing(1.0), CROP])
    assert_close(recipe, ragged(channels, torch.float32))


def test_images_packed_together_may_be_of_one_size_and_never_resampled() -> None:
    assert_close(JITTER, ragged(3, torch.uint8, (9, 7), (9, 7)))


@pytest.mark.slow
def test_packed_or_not_the_bits_are_the_same() -> None:
    recipe, batch = augment.Compose(RECIPES["with jitter"]), images()
    together, _ = both(recipe, RaggedImages.pack(list(batch)))
    apart, _ = both(recipe, batch)
    assert torch.equal(together, apart)


def test_images_that_take_more_than_32_bits_to_get_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "FAR", 1)
    assert_close(augment.Compose([CROP, JITTER]), ragged())


def test_one_image_without_a_batch() -> None:
    got, wanted = both(augment.Compose([CROP, NORMALIZE]), images()[0])
    assert got.ndim == 3
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=4e-6)


@pytest.mark.slow
def test_images_may_lie_in_memory_in_any_way() -> None:
    batch = images().to(memory_format=torch.channels_last)
    assert_close(augment.Compose([CROP, FLIP]), batch)
    assert_close(augment.Compose([CROP, JITTER]), batch[:, :, ::2, 3:].flip(0))
    assert_close(augment.Compose([CROP]), batch[:1].expand(2, -1, -1, -1))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 8000), (8000, 2), (1, 1)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_lines_whose_places_do_not_fit_32_bits(size: tuple[int, int], mode: str) -> None:
    """A shorter edge of 1 made 256, and so a longer one of two million, of which 8 are seen."""
    resized = augment.Compose([augment.Resize(256, mode), augment.CenterCrop(8), FLOATS])
    assert_close(resized, images(size=size))


def test_an_image_that_takes_more_than_32_bits_to_get_through() -> None:
    """Only on paper: rows that lie far apart, of which two are looked at."""
    far = torch.empty(0, dtype=torch.uint8).set_(
        torch.UntypedStorage(64), 0, (1, 1, 2, 4), (64, 64, 8, 1)
    )
    assert fused._reach(far) == 12
    wide = torch.empty((1, 1, 3, 4), device="meta").as_strided((1, 1, 3, 4), (0, 0, 2**30, 1))
    assert fused._reach(wide) == 2**31 + 4


@pytest.mark.slow
def test_the_same_bits_every_time() -> None:
    recipe, batch = augment.Compose(RECIPES["with jitter"]), images()
    first, _ = both(recipe, batch)
    again, _ = both(recipe, batch)
    assert torch.equal(first, again)


@pytest.mark.slow
def test_tiles_that_do_not_fit_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_tile", lambda _: (8, 4))
    monkeypatch.setattr(fused, "MEANS_BLOCK", 4)
    transforms = [augment.RandomResizedCrop((9, 6)), JITTER, augment.RandomCrop(7, padding=2)]
    assert_close(augment.Compose(transforms), images(size=(12, 11)))


@pytest.mark.slow
@settings(max_examples=5)
@given(st.data())
def test_any_sizes(data: Any) -> None:
    edge = st.integers(1, 14)
    sizes = data.draw(st.lists(st.tuples(edge, edge), min_size=1, max_size=4))
    size = data.draw(st.tuples(edge, edge))
    chains: list[list[Recipe]] = [
        [augment.RandomResizedCrop(size, scale=(0.01, 1.0)), FLIP],
        [augment.Resize(data.draw(edge)), augment.CenterCrop(size)],
        [augment.ColorJitter(0.5, 0.5), augment.Resize(size)],
        [FLIP, augment.RandomCrop(size, pad_if_needed=True)],
    ]
    recipe = augment.Compose(data.draw(st.sampled_from(chains)))
    assert_close(recipe, ragged(1, torch.float32, *sizes))


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_any_view(data: Any) -> None:
    edge = st.integers(1, 14)
    batch = images(1, torch.float32, (data.draw(edge), data.draw(edge)))
    small, large = data.draw(edge), data.draw(edge)
    chains: list[list[Recipe]] = [
        [augment.RandomResizedCrop((small, large), scale=(0.01, 1.0)), FLIP],
        [augment.Resize((small, large)), augment.CenterCrop(data.draw(edge))],
        [augment.CenterCrop((small, large)), augment.RandomVerticalFlip()],
        [augment.RandomCrop((small, large), pad_if_needed=True), FLIP],
    ]
    assert_close(augment.Compose(data.draw(st.sampled_from(chains))), batch)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("sizes", [(41, 41), (55, 55), (62, 14), (13, 47)])
def test_the_nearest_pixel_is_that_of_the_definition(mode: str, sizes: tuple[int, int]) -> None:
    got, wanted = both(augment.Resize((sizes[1], 5), mode), images(1, torch.float32, (sizes[0], 5)))
    assert torch.equal(got, wanted)


def test_channels_may_lie_far_apart() -> None:
    """As those of (C, N, H, W) with its first two dimensions exchanged; here only on paper."""
    reached = torch.empty((1, 3, 4, 4), device="meta").as_strided((1, 3, 4, 4), (16, 2**30, 4, 1))
    assert fused._reach(reached) > fused.FAR
    apart = images().permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    assert_close(augment.Compose([CROP, FLIP]), apart)


def test_what_only_traces_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_ON_DEVICE", {})
    rows = ((0.25,),)
    with FakeTensorMode():
        assert type(fused._constants(rows, 3, "cpu")) is not Tensor
    known = fused._constants(rows, 3, "cpu")
    assert type(known) is Tensor
    assert fused._constants(rows, 3, "cpu") is known


def test_a_table_may_be_transposed_or_of_another_dtype() -> None:
    recipe, batch = augment.Compose([CROP, JITTER]), images()
    table = recipe.plan(batch, Context(3, 0, 0, 0))
    wanted = recipe.run(batch, table)
    assert torch.equal(recipe.run(batch, table.T.contiguous().T), wanted)
    assert torch.equal(recipe.run(batch, table.double()), wanted)
