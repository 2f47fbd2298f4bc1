import math

import torch
from torch.nn import functional
from torchvision.transforms.v2 import functional as F  # noqa: N812  # as everybody calls it

from benchmarks._article_augment import PerImage, Vectorised

SIDE = 16
CPU = torch.device("cpu")
NONE = torch.zeros(2, 1, 1)


def vectorised() -> Vectorised:
    return Vectorised(SIDE, CPU)


def images() -> torch.Tensor:
    return torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def corner(*pairs: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(pairs).T[:, :, None, None]


def test_without_rotation_a_crop_is_resized_as_torch_does_it() -> None:
    found = vectorised().sampled(images(), corner((3, 1), (8, 0)), NONE)
    for number, (x, y) in enumerate([(3, 1), (8, 0)]):
        crop = images()[number : number + 1, :, y : y + 8, x : x + 8]
        wanted = functional.interpolate(crop, size=(SIDE, SIDE), mode="bilinear")
        torch.testing.assert_close(found[number : number + 1], wanted, atol=1e-5, rtol=0)


def test_a_quarter_turn_is_exact_and_counter_clockwise() -> None:
    upright = vectorised().sampled(images(), corner((3, 1), (3, 1)), NONE)
    turned = vectorised().sampled(images(), corner((3, 1), (3, 1)), NONE + math.pi / 2)
    torch.testing.assert_close(turned, upright.rot90(1, (2, 3)), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned, F.rotate(upright, 90), atol=1e-5, rtol=0)


def test_what_a_rotation_uncovers_is_black() -> None:
    turned = vectorised().sampled(images() + 1, corner((0, 0), (0, 0)), NONE + math.pi / 4)
    assert turned[:, :, 0, 0].abs().max() == 0
    assert turned[:, :, SIDE // 2, SIDE // 2].min() >= 1


def test_each_image_is_blurred_with_its_own_sigma_as_torchvision_does_it() -> None:
    sigmas = torch.tensor([0.4, 1.7])
    found = vectorised().blurred(images(), sigmas.view(2, 1, 1))
    for image, sigma, blurred in zip(images(), sigmas.tolist(), found, strict=True):
        torch.testing.assert_close(
            blurred, F.gaussian_blur(image, [7, 7], [sigma]), atol=1e-6, rtol=0
        )


def test_both_make_float_images_of_bytes_that_differ_with_the_draw() -> None:
    batch = (images() * 255).byte()
    for augment in (vectorised(), PerImage(SIDE)):
        first, second = augment(batch), augment(batch)
        assert (first.shape, first.dtype) == (batch.shape, torch.float32)
        assert not torch.equal(first, second)
