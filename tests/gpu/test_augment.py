"""Augmentation on CUDA against its definition on the CPU, in float64; and what it must not do."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from streamloader import StreamLoader, augment
from streamloader.augment import batches, reference
from streamloader.augment.mixing import Mix
from streamloader.augment.recipe import Recipe
from streamloader.context import Context
from tests.augment.test_evaluation import assert_alike, logits_of
from tests.augment.test_fused import FLIP, FLOATS, JITTER, NORMALIZE, RECIPES, images
from tests.gpu.sources import busy, nothing_waits

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-4

FULL = augment.Compose(
    [
        augment.RandomResizedCrop(224),
        FLIP,
        JITTER,
        augment.RandomGrayscale(0.2),
        NORMALIZE,
        augment.RandomErasing(0.5, value="random"),
        augment.ToDtype(torch.bfloat16),
    ],
    memory_format=torch.channels_last,
)
"""All that there is, as one would have it."""

EVALUATION = augment.Compose([augment.Resize(256), augment.CenterCrop(224), NORMALIZE])


def noise(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    made = torch.Generator("cuda").manual_seed(0)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, device="cuda", generator=made)
    return torch.rand(shape, device="cuda", generator=made).to(dtype)


def planned(recipe: Recipe, batch: Tensor, number: int = 0) -> Tensor:
    return recipe.plan(batch, Context(7, 0, number, 0)).cuda()


def assert_right(recipe: Recipe, batch: Tensor, number: int = 0, atol: float = TOLERANCE) -> None:
    """On CUDA within `atol` of the definition in float64, or within one level."""
    table = planned(recipe, batch, number)
    got = recipe.run(batch, table)
    wanted = reference.run(recipe.program(batch.dtype), batch.cpu(), table.cpu(), torch.float64)
    assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    if got.dtype == torch.uint8:
        assert (got.cpu().int() - wanted.int()).abs().max() <= 1
    else:
        torch.testing.assert_close(got.cpu(), wanted, rtol=max(atol, 1e-5), atol=atol)


# -- it is what the definition says ----------------------------------------------------------------


@pytest.mark.parametrize("transforms", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_all_recipes(transforms: Sequence[Recipe], dtype: torch.dtype) -> None:
    recipe = augment.Compose(transforms)
    for number in range(3):
        assert_right(recipe, images(dtype=dtype).cuda(), number)


@pytest.mark.parametrize("transforms", RECIPES.values(), ids=RECIPES)
def test_all_recipes_before_they_are_rounded(transforms: Sequence[Recipe]) -> None:
    """Within a level says little: what they make of uint8, in floats."""
    assert_right(augment.Compose([*transforms, FLOATS]), images().cuda())


def test_photographs_sizes() -> None:
    batch = noise(64, 3, 375, 500)
    assert_right(EVALUATION, batch)
    moves = [augment.RandomResizedCrop(224), FLIP]
    assert_right(augment.Compose([*moves, NORMALIZE]), batch)
    assert_right(augment.Compose([*moves, JITTER, NORMALIZE]), batch[:32])
    assert_right(augment.Compose([augment.RandomResizedCrop(224, interpolation="bicubic")]), batch)


@pytest.mark.parametrize("size", [(1, 1), (1, 8000), (8000, 1), (2, 3)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_small_and_long_images(size: tuple[int, int], channels: int) -> None:
    batch = noise(3, channels, *size)
    assert_right(augment.Compose([augment.RandomResizedCrop(40), FLIP, FLOATS]), batch)
    assert_right(augment.Compose([augment.Resize(64), augment.CenterCrop(48), FLOATS]), batch)
    assert_right(augment.Compose([augment.RandomCrop(50, pad_if_needed=True), FLIP]), batch)


def test_8000_pixels_each_way() -> None:
    batch = noise(1, 3, 8000, 8000)
    assert_right(EVALUATION, batch)
    assert_right(augment.Compose([augment.RandomResizedCrop(224), FLOATS]), batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_any_dtype_and_memory_format(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    moves: list[Recipe] = [augment.RandomResizedCrop(33), FLIP, JITTER]
    recipe = augment.Compose([*moves, augment.ToDtype(dtype, scale=True)], memory_format)
    for given in (torch.uint8, torch.float16, torch.float64):
        batch = noise(4, 3, 41, 57, dtype=given)
        assert_right(recipe, batch, atol=1e-2 if dtype.itemsize == 2 else TOLERANCE)
        assert_right(recipe, batch.to(memory_format=torch.channels_last), atol=1e-2)
        assert recipe.run(batch, planned(recipe, batch)).is_contiguous(memory_format=memory_format)


def test_a_batch_beyond_32_bits() -> None:
    """3.8e9 values: the last image's are found."""
    batch = torch.empty(1200, 3, 1024, 1024, dtype=torch.uint8, device="cuda")
    batch[:-1] = 0
    batch[-1] = noise(3, 1024, 1024)
    recipe = augment.Compose([augment.RandomResizedCrop(224), FLIP, NORMALIZE])
    table = planned(recipe, batch)
    got = recipe.run(batch, table)[-1].cpu()
    last = batch[-1:].cpu(), table[-1:].cpu()
    wanted = reference.run(recipe.program(torch.uint8), *last, torch.float64)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=TOLERANCE)


def test_an_image_beyond_32_bits() -> None:
    """A row of the image is 2**28 values away from the next, of which few are looked at."""
    storage = torch.zeros(9 << 28, dtype=torch.uint8, device="cuda")
    batch = storage.as_strided((1, 1, 9, 40), (0, 0, 1 << 28, 1))
    batch[:] = noise(1, 1, 9, 40)
    recipe = augment.Compose([augment.RandomResizedCrop(16), FLIP, FLOATS])
    table = planned(recipe, batch)
    assert torch.equal(recipe.run(batch, table), recipe.run(batch.contiguous(), table))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("sizes", [(41, 41), (55, 55), (62, 14), (13, 47)])
def test_the_nearest_pixel(mode: str, sizes: tuple[int, int]) -> None:
    """A division that is not rounded as IEEE says takes another one."""
    batch = noise(2, 3, sizes[0], 9, dtype=torch.float32)
    assert_right(augment.Resize((sizes[1], 9), mode), batch, atol=0)


def test_more_images_than_a_grid_is_high() -> None:
    batch = noise(70_000, 1, 8, 8)
    recipe = augment.Compose([augment.RandomHorizontalFlip(), augment.CenterCrop(6)])
    table = planned(recipe, batch)
    got = recipe.run(batch, table)
    assert len(got) == 70_000
    last = reference.run(recipe.program(batch.dtype), batch[-2:].cpu(), table[-2:].cpu())
    assert torch.equal(got[-2:].cpu(), last)


def test_channels_that_lie_more_than_32_bits_apart() -> None:
    apart = 3 << 29  # twice that is beyond a signed 32-bit number
    batch = noise(2 * apart + 256).as_strided((1, 3, 16, 16), (256, apart, 16, 1))
    assert_right(augment.Compose([augment.RandomResizedCrop(8), FLIP]), batch)


def test_gradients_pass() -> None:
    batch = noise(2, 3, 9, 9, dtype=torch.float32).requires_grad_()
    recipe = augment.Compose([augment.CenterCrop(5), NORMALIZE])
    recipe.run(batch, planned(recipe, batch)).sum().backward()
    assert batch.grad is not None
    assert int((batch.grad != 0).sum()) == 2 * 3 * 25


def test_logits_are_those_of_torchvisions_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # it would round differences up
    assert_alike(*logits_of("cuda", 8, (375, 500), (256, 224)))


# -- the same, always ------------------------------------------------------------------------------


def test_the_same_bits_on_every_run_and_stream() -> None:
    batch = noise(32, 3, 375, 500)
    table = planned(FULL, batch)
    first = FULL.run(batch, table)
    other = torch.cuda.Stream()
    for stream in (None, other, None):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = FULL.run(batch, table)
        torch.cuda.synchronize()
        assert torch.equal(again, first)


def late(loader: StreamLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """What a step sees that is slow to read."""
    for batch, labels in loader:
        busy(10)
        yield batch.clone(), labels.clone()


def test_the_same_batches_at_every_depth() -> None:
    source = [(images() if n % 2 else images().flip(0), torch.arange(2) + n) for n in range(12)]
    mix = augment.RandomChoice([augment.MixUp(num_classes=20), augment.CutMix(num_classes=20)])
    found = []
    for depth in range(4):
        how: dict[str, Any] = {"transform": [FULL, mix], "prefetch_batches": depth, "seed": 3}
        with StreamLoader(source, "cuda", **how) as got:
            found.append(list(late(got)))
    for other in found[1:]:
        for (batch, targets), (first, wanted) in zip(other, found[0], strict=True):
            assert torch.equal(batch, first)
            assert torch.equal(targets, wanted)
    assert not torch.equal(found[0][0][0], found[0][2][0])  # the same images, drawn anew


# -- what it must not do ---------------------------------------------------------------------------


def launches(run: Any) -> list[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    starts = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
    return [e.name for e in profile.events() or () if e.name.startswith(starts)]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_few_launches() -> None:
    batch = noise(8, 3, 375, 500)
    for recipe, most in ((FULL, 10), (EVALUATION, 1)):
        table = planned(recipe, batch)
        recipe.run(batch, table)
        found = launches(lambda recipe=recipe, table=table: recipe.run(batch, table))
        assert 1 <= len(found) <= most, found


MIXES: list[Mix] = [
    augment.MixUp(num_classes=10),
    augment.CutMix(num_classes=10),
    augment.RandomChoice([augment.MixUp(num_classes=10), augment.CutMix(num_classes=10)]),
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    batch, labels = noise(8, 3, 375, 500), torch.arange(8, device="cuda")
    table = planned(FULL, batch)
    mixed = FULL.run(batch, table), labels
    tables = [mix.plan(mixed, Context(7, 0, 0, 0)).cuda() for mix in MIXES]

    def everything() -> None:
        FULL.run(batch, table)
        for mix, drawn in zip(MIXES, tables, strict=True):
            mix.run(mixed, drawn)

    everything()
    torch.cuda.synchronize()
    with nothing_waits():
        everything()


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: type(mix).__name__)
def test_mixing_is_what_it_is_on_the_cpu(mix: Mix) -> None:
    batch = noise(8, 3, 64, 48, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    labels = torch.arange(8, device="cuda")
    table = mix.plan((batch, labels), Context(7, 0, 0, 0))
    got, targets = mix.run((batch, labels), table.cuda())
    wanted, shares = mix.run((batch.cpu(), labels.cpu()), table)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(targets.cpu(), shares)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("recipe", [FULL, EVALUATION], ids=["full", "evaluation"])
def test_within_what_is_compiled(recipe: Recipe) -> None:
    batch = noise(8, 3, 375, 500)
    table = planned(recipe, batch)

    def step(batch: Tensor, table: Tensor) -> Tensor:
        out: Tensor = recipe.run(batch, table)
        return out * 2

    torch.testing.assert_close(torch.compile(step)(batch, table), step(batch, table))


def test_a_batch_that_is_augmented_is_left_as_it_was() -> None:
    batch = noise(4, 3, 60, 70)
    before = batch.clone()
    FULL.run(batch, planned(FULL, batch))
    assert torch.equal(batch, before)
    assert batches.layout(batch).size == (60, 70)
