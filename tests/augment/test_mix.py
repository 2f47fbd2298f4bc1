"""MixUp, CutMix and RandomChoice against torchvision's. The seeds, 0, were fixed beforehand."""

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2

from streamloader import augment
from streamloader.augment import mix as module
from streamloader.augment.draws import uniforms
from streamloader.augment.mixing import PLACE, Mix
from tests.augment.oracle import bytes_, context, floats

COUNT = 4000
CRITICAL = math.sqrt(-math.log(1e-4 / 2) / COUNT)
"""The distance of two samples of COUNT that chance exceeds once in 10,000 times, or less often."""

ALPHAS = [0.05, 0.2, 0.5, 1.0, 3.0, 40.0]


def distance(first: Any, second: Any) -> float:
    """Kolmogorov and Smirnov's: the most by which two empirical distributions differ."""
    everything = np.concatenate([first, second])
    shares = [
        np.searchsorted(np.sort(one), everything, "right") / len(one) for one in (first, second)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


def planned(mix: Mix, count: int, height: int = 32, width: int = 48, number: int = 0) -> Any:
    images = torch.empty(1).expand(count, 3, height, width)
    table = mix.plan((images, torch.zeros(count, dtype=torch.int64)), context(number))
    return dict(zip(mix.columns, table.double().numpy().T, strict=True))


def theirs(transform: Any, images: Tensor, labels: Tensor, params: dict[str, Any]) -> Any:
    """What torchvision makes of a batch, all of whose samples have the same parameters."""
    params |= {"labels": labels, "batch_size": len(labels)}
    return transform.transform(images, params), transform.transform(labels, params)


def box(row: dict[str, Any], n: int) -> dict[str, Any]:
    top, left, height, width = (int(row[name][n]) for name in ("top", "left", "height", "width"))
    lam = 1.0 - height * width / (row["size"][0] * row["size"][1])
    return {"box": (left, top, left + width, top + height), "lam_adjusted": lam}


def check_sample(mix: Mix, images: Tensor, labels: Tensor, number: int) -> None:
    """Each sample against torchvision's functions, with its own parameters for the whole batch."""
    height, width = images.shape[-2:]
    row = planned(mix, len(images), height, width, number)
    out, targets = mix.run((images, labels), mix.plan((images, labels), context(number)))
    for n in range(len(images)):
        cut = isinstance(mix, augment.CutMix) or bool("choice" in row and row["choice"][n])
        kind = v2.CutMix(num_classes=5) if cut else v2.MixUp(num_classes=5)
        size = {"size": (height, width)}
        params = box(row | size, n) if cut else {"lam": float(row["lambda"][n])}
        pixels, target = theirs(kind, images, labels, params)
        assert torch.allclose(out[n], pixels[n], rtol=0, atol=1e-6)
        assert torch.allclose(targets[n], target[n], rtol=0, atol=1e-6)


edges = st.integers(1, 12)


@pytest.mark.slow
@pytest.mark.parametrize("per_batch", [False, True])
@given(st.integers(1, 5), edges, edges, st.sampled_from(ALPHAS), st.integers(0, 999))
def test_samples_are_torchvisions(
    per_batch: bool,  # noqa: FBT001
    count: int,
    height: int,
    width: int,
    alpha: float,
    number: int,
) -> None:
    images, labels = floats(count, 3, height, width), torch.arange(count)
    pair: list[Any] = [
        kind(alpha=alpha, num_classes=5, per_batch=per_batch)
        for kind in (augment.MixUp, augment.CutMix)
    ]
    for mix in (*pair, augment.RandomChoice(pair, per_batch=per_batch)):
        check_sample(mix, images, labels, number)


def test_a_whole_batch_is_torchvisions() -> None:
    images, labels = floats(6, 3, 9, 7), torch.arange(6) % 5
    mix = augment.MixUp(num_classes=5, per_batch=True)
    row = planned(mix, 6, 9, 7)
    pixels, targets = mix.run((images, labels), mix.plan((images, labels), context()))

    [lam] = set(row["lambda"])
    expected = theirs(v2.MixUp(num_classes=5), images, labels, {"lam": float(lam)})
    assert torch.allclose(pixels, expected[0], rtol=0, atol=1e-6)
    assert torch.allclose(targets, expected[1], rtol=0, atol=1e-6)


def test_pasted_pixels_are_bits_of_the_partner_in_any_dtype() -> None:
    mix, labels = augment.CutMix(num_classes=5), torch.arange(4)
    images = bytes_(4, 3, 9, 7)
    out, _ = mix((images, labels))
    assert out.dtype == torch.uint8
    assert ((out == images) | (out == images.roll(1, 0))).all()

    check_sample(mix, images, labels, 3)
    broken = floats(2, 3, 9, 7)
    broken[0] = math.nan
    out, _ = mix((broken, labels[:2]))
    pasted = out[1].isnan()
    assert torch.equal(out[1][~pasted], broken[1][~pasted])


@given(
    edges,
    edges,
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1),
)
def test_boxes_are_torchvisions(height: int, width: int, y: float, x: float, lam: float) -> None:
    drawn = [torch.tensor([int(x * width)]), torch.tensor([int(y * height)])]
    with pytest.MonkeyPatch.context() as patch:
        transform = v2.CutMix(num_classes=5)
        patch.setattr(transform._dist, "sample", lambda _: lam)
        patch.setattr(torch, "randint", lambda *_, **__: drawn.pop(0))
        expected = transform.make_params([torch.empty(1, 3, height, width)])
        patch.setattr(module, "_beta", lambda *_: np.array([lam]))
        rows = augment.CutMix().decide(np.array([[0, 0, 0, 0, y, x]]), (height, width))

    ours = box({name: rows[name] for name in rows} | {"size": (height, width)}, 0)
    assert ours["box"] == expected["box"]
    assert rows["lambda"][0] == pytest.approx(expected["lam_adjusted"], abs=1e-12)


# -- distributions -----------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_lambda_is_distributed_as_beta(alpha: float) -> None:
    mine = planned(augment.MixUp(alpha=alpha, num_classes=5), COUNT)["lambda"]
    other = np.random.Generator(np.random.Philox(0)).beta(alpha, alpha, COUNT)

    assert distance(mine, other.astype(np.float32)) < CRITICAL
    assert abs(mine.var() * 4 * (2 * alpha + 1) - 1) < 0.1
    assert abs(np.corrcoef(mine[1:], mine[:-1])[0, 1]) < 4 / math.sqrt(COUNT)
    wrong = np.random.Generator(np.random.Philox(0)).beta(1.4 * alpha, 1.4 * alpha, COUNT)
    assert distance(mine, wrong) > 0.75 * CRITICAL


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_boxes_are_distributed_as_torchvisions(alpha: float) -> None:
    mine = planned(augment.CutMix(alpha=alpha, num_classes=5), COUNT)
    transform, image = v2.CutMix(alpha=alpha, num_classes=5), [torch.empty(1, 3, 32, 48)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [transform.make_params(image) for _ in range(COUNT)]
    left, top, right, bottom = np.array([one["box"] for one in drawn], np.float64).T

    assert distance(mine["top"], top) < CRITICAL
    assert distance(mine["left"], left) < CRITICAL
    assert distance(mine["height"], bottom - top) < CRITICAL
    assert distance(mine["width"], right - left) < CRITICAL
    share = np.array([one["lam_adjusted"] for one in drawn])
    assert distance(mine["lambda"].round(5), share.round(5)) < CRITICAL


@given(st.floats(1e-3, 1e6), st.integers(0, 999))
def test_lambda_is_a_share_whatever_alpha(alpha: float, key: int) -> None:
    drawn = module._beta(uniforms(key, PLACE, 50, 4), alpha)
    assert ((drawn >= 0) & (drawn <= 1)).all()


@given(st.lists(st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]), min_size=4, max_size=4))
def test_the_ends_of_what_is_uniform_are_no_trouble(uniform: list[float]) -> None:
    for alpha in (1e-3, 0.2, 1.0, 1e3):
        [drawn] = module._beta(np.array([uniform]), alpha)
        assert 0 <= drawn <= 1


def test_all_samples_of_a_batch_may_share_what_is_drawn() -> None:
    for kind in (augment.MixUp, augment.CutMix):
        shared = planned(kind(num_classes=5, per_batch=True), 50)
        apart = planned(kind(num_classes=5), 50)
        assert all(len(set(column)) == 1 for column in shared.values())
        assert len(set(apart["lambda"])) > 30


# -- a choice ----------------------------------------------------------------------------------

PAIR = (augment.MixUp(alpha=0.2, num_classes=5), augment.CutMix(num_classes=5))


@pytest.mark.parametrize(("p", "share"), [(None, 0.5), ((3, 1), 0.25), ((0, 2), 1), ((2, 0), 0)])
def test_each_sample_gets_one(p: Any, share: float) -> None:
    row = planned(augment.RandomChoice(PAIR, p), COUNT)

    assert row["choice"].mean() == pytest.approx(share, abs=4 * 0.5 / math.sqrt(COUNT))
    blended = row["choice"] == 0
    assert (row["outside"][blended] == row["lambda"][blended]).all()
    assert not row["height"][blended].any()
    assert (row["outside"][~blended] == 1).all()
    if p is None:
        both = np.random.Generator(np.random.Philox(0)).beta(0.2, 0.2, COUNT)
        count = int(blended.sum())
        limit = CRITICAL * math.sqrt(COUNT / count)
        assert distance(row["lambda"][blended], both[:count].astype(np.float32)) < limit


def test_each_batch_gets_one_if_one_says_so() -> None:
    mix = augment.RandomChoice(PAIR, per_batch=True)
    rows = [planned(mix, 8, number=number) for number in range(20)]

    assert all(len(set(row["choice"])) == 1 for row in rows)
    assert {row["choice"][0] for row in rows} == {0, 1}
    assert all(len(set(row["lambda"])) > 1 for row in rows)


def test_a_choice_of_pasting_alone_takes_bytes() -> None:
    mix = augment.RandomChoice([augment.CutMix(num_classes=5), augment.CutMix(num_classes=5)])
    images = bytes_(4, 3, 9, 7)
    out, _ = mix((images, torch.arange(4)))

    assert out.dtype == torch.uint8
    assert ((out == images) | (out == images.roll(1, 0))).all()


# -- arguments ---------------------------------------------------------------------------------

mistaken: Any = augment  # called with what its types forbid


@pytest.mark.parametrize("name", ["MixUp", "CutMix", "RandomChoice"])
def test_arguments_are_given_as_to_torchvision(name: str) -> None:
    ours, others = (inspect.signature(getattr(of, name)).parameters for of in (augment, v2))

    assert [*ours][:-1] == [*others]
    assert all(ours[key].kind == others[key].kind for key in others)
    assert ours["per_batch"].kind == inspect.Parameter.KEYWORD_ONLY
    assert ours["per_batch"].default is False


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mistaken.MixUp(alpha="1"), TypeError, "alpha must be a number, got '1'$"),
        (lambda: mistaken.MixUp(alpha=True), TypeError, "alpha must be a number, got True$"),
        (
            lambda: mistaken.CutMix(alpha=0),
            ValueError,
            "alpha must be above 0 and finite, got 0: to mix nothing, leave CutMix out$",
        ),
        (lambda: mistaken.MixUp(alpha=math.nan), ValueError, "alpha must be above 0 and finite"),
        (lambda: mistaken.MixUp(alpha=math.inf), ValueError, "alpha must be above 0 and finite"),
        (
            lambda: mistaken.MixUp(num_classes=0),
            ValueError,
            "num_classes must be at least 1, got 0",
        ),
        (lambda: mistaken.MixUp(num_classes=2.0), TypeError, "num_classes must be a whole number"),
        (lambda: mistaken.MixUp(labels_getter=None), TypeError, 'labels_getter must be "default"'),
        (lambda: mistaken.RandomChoice(PAIR[0]), TypeError, "transforms must be a sequence, got M"),
        (lambda: mistaken.RandomChoice([]), ValueError, "transforms must hold at least one, got "),
        (
            lambda: mistaken.RandomChoice([*PAIR, augment.Normalize(0, 1)]),
            TypeError,
            r"transforms must be MixUp and CutMix, got Normalize\(",
        ),
        (
            lambda: mistaken.RandomChoice([PAIR[0], augment.CutMix(num_classes=6)]),
            ValueError,
            r"transforms must have the same num_classes and labels_getter, got \(5, 'default'\), ",
        ),
        (
            lambda: mistaken.RandomChoice(PAIR, [1]),
            ValueError,
            r"p must hold a number for each of the 2 transforms, got 1: \[1\]$",
        ),
        (
            lambda: mistaken.RandomChoice(PAIR, [1, -1]),
            ValueError,
            "p must hold no negative number",
        ),
        (lambda: mistaken.RandomChoice(PAIR, [0, 0]), ValueError, "p must hold no negative number"),
        (lambda: mistaken.RandomChoice(PAIR, "ab"), TypeError, "p must be a number, or"),
    ],
)
def test_a_wrong_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make()


def test_a_repr_shows_the_arguments() -> None:
    blend = "MixUp(alpha=0.2, num_classes=5, labels_getter='default', per_batch=False)"
    assert repr(PAIR[0]) == blend
    assert repr(augment.RandomChoice(PAIR[:1], [2])) == (
        f"RandomChoice(transforms=({blend},), p=(2.0,), per_batch=False)"
    )


def test_equal_arguments_make_equal_transforms() -> None:
    assert augment.MixUp(alpha=1, num_classes=5) == augment.MixUp(num_classes=5)
    assert augment.MixUp(alpha=2) != augment.MixUp()
    assert hash(augment.RandomChoice(list(PAIR))) == hash(augment.RandomChoice(PAIR))
