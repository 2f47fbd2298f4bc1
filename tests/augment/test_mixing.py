"""Samples mixed in pairs: planned on the host, run on the device, found in any batch."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamloader import StreamLoader, augment
from streamloader.augment.mixing import PLACE, Mix
from streamloader.checker import CheckedDevice
from streamloader.context import Context
from streamloader.testing import FakeDevice
from streamloader.transforms import Planned, planned
from tests.augment.oracle import bytes_, context, floats
from tests.loaders import DEPTHS

CLASSES = 10
BLEND = augment.MixUp(num_classes=CLASSES)
PASTE = augment.CutMix(num_classes=CLASSES)
EITHER = augment.RandomChoice([BLEND, PASTE])
SHARED = augment.RandomChoice(
    [
        augment.MixUp(num_classes=CLASSES, per_batch=True),
        augment.CutMix(num_classes=CLASSES, per_batch=True),
    ],
    per_batch=True,
)
ALL: list[Mix] = [BLEND, PASTE, EITHER, SHARED]

every = pytest.mark.parametrize("mix", ALL, ids=["MixUp", "CutMix", "RandomChoice", "per_batch"])


def batch(count: int = 6, size: tuple[int, int] = (9, 7)) -> tuple[Tensor, Tensor]:
    return floats(count, 3, *size), torch.arange(count) % CLASSES


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- planned -----------------------------------------------------------------------------------


@every
def test_a_mix_is_what_the_loader_plans(mix: Mix) -> None:
    assert isinstance(mix, Planned)
    assert planned(mix) is mix


@every
@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 99))
def test_a_shorter_batch_has_the_first_rows(mix: Mix, count: int, fewer: int, number: int) -> None:
    table = mix.plan(batch(count + fewer), context(number))
    shorter = mix.plan(batch(count), context(number))

    assert torch.equal(table[:count], shorter)
    assert table.shape == (count + fewer, len(mix.columns))
    assert table.dtype == torch.float32
    assert table.device.type == "cpu"


@every
def test_but_the_first_samples_partner_is_the_last(mix: Mix) -> None:
    (images, labels), table = batch(6), mix.plan(batch(6), context())
    whole = mix.run((images, labels), table)
    part = mix.run((images[:4], labels[:4]), table[:4])

    assert same([one[1:4] for one in whole], [one[1:] for one in part])
    assert not torch.equal(whole[1][0], part[1][0])


@every
def test_the_context_alone_decides(mix: Mix) -> None:
    here = Context(seed=1, epoch=2, number=3, rank=4, stage=5)
    table = mix.plan(batch(), here)
    other = (floats(6, 3, 9, 7, seed=9), torch.zeros(6, dtype=torch.int32))

    assert torch.equal(mix.plan(other, here), table)
    assert torch.equal(copy.deepcopy(mix).plan(batch(), here), table)
    others = [
        here._replace(seed=9),
        here._replace(epoch=9),
        here._replace(number=9),
        here._replace(rank=9),
        here._replace(stage=9),
    ]
    assert not any(torch.equal(mix.plan(batch(), one), table) for one in others)


@every
def test_a_plan_reads_shapes_alone(mix: Mix) -> None:
    there = tuple(one.to("meta") for one in batch())
    assert torch.equal(mix.plan(there, context()), mix.plan(batch(), context()))


def test_draws_are_apart_from_those_of_a_recipe_with_the_same_key() -> None:
    key, ours = context().key(), BLEND.rows(context().key(), PLACE, 9, (9, 9))
    for place in range(3):
        theirs = BLEND.rows(key, place, 9, (9, 9))
        assert not np.intersect1d(ours["lambda"], theirs["lambda"]).size


# -- run ---------------------------------------------------------------------------------------


@every
def test_a_run_asks_the_device_for_nothing(mix: Mix) -> None:
    table = mix.plan(batch(), context())
    there = tuple(one.to("meta") for one in batch())
    images, targets = mix.run(there, table.to("meta"))  # meta tensors have no values to ask for

    assert images.shape == there[0].shape
    assert targets.shape == (6, CLASSES)
    assert images.is_meta
    assert targets.is_meta


@every
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_dtype_and_memory_format_stay(
    mix: Mix, dtype: torch.dtype, layout: torch.memory_format, count: int
) -> None:
    images, labels = batch(count)
    images = images.to(dtype).to(memory_format=layout)
    table = mix.plan((images, labels), context())
    out, targets = mix.run((images, labels), table)

    assert out.dtype == dtype
    assert out.shape == images.shape
    assert out.is_contiguous(memory_format=layout)
    assert targets.dtype == torch.float32
    assert targets.shape == (count, CLASSES)
    exact, _ = mix.run((images.double(), labels), table)
    assert torch.allclose(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.slow
@every
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_targets_are_shares_and_pixels_lie_between(
    mix: Mix, count: int, height: int, width: int, number: int
) -> None:
    images, labels = batch(count, (height, width))
    table = mix.plan((images, labels), context(number))
    out, targets = mix.run((images, labels), table)

    share = table[:, mix.columns.index("lambda")]
    assert (targets >= 0).all()
    assert torch.allclose(targets.sum(dim=1), torch.ones(count), atol=1e-6)
    own = targets[torch.arange(count), labels]
    assert torch.allclose(own, share if count > 1 else torch.ones(1), atol=1e-6)
    both = torch.stack([images, images.roll(1, 0)])
    assert (out >= both.amin(dim=0) - 1e-6).all()
    assert (out <= both.amax(dim=0) + 1e-6).all()


@every
def test_a_sample_alone_is_mixed_with_itself(mix: Mix) -> None:
    images, labels = batch(1)
    out, targets = mix((images, labels))

    assert torch.allclose(out, images, atol=1e-6)
    assert targets[0].tolist() == pytest.approx([1.0] + [0.0] * 9)


@every
def test_nothing_is_written_to_and_no_generator_touched(mix: Mix) -> None:
    given_batch = batch()
    before = tuple(one.clone() for one in given_batch)
    torch_state, numpy_state = torch.get_rng_state(), pickle.dumps(np.random.get_state())
    out = copy.deepcopy(mix)(given_batch)

    assert same(given_batch, before)
    assert out[0].data_ptr() != given_batch[0].data_ptr()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert pickle.dumps(np.random.get_state()) == numpy_state


@every
def test_gradients_pass_to_both(mix: Mix) -> None:
    images, labels = batch()
    images.requires_grad_()
    mix((images, labels))[0].sum().backward()

    assert images.grad is not None
    assert images.grad.sum().item() == pytest.approx(images.numel(), rel=1e-5)


# -- batches of all kinds ----------------------------------------------------------------------


@dataclass
class Sample:
    name: str
    label: Tensor
    image: Tensor
    more: Tensor


@every
def test_images_and_labels_are_found_and_the_rest_passes(mix: Mix) -> None:
    images, labels = batch()
    more = torch.zeros(6, 1, 2, 2)
    table = mix.plan((images, labels), context())
    expected = mix.run((images, labels), table)

    pair = mix.run([images, labels], table)
    assert type(pair) is list
    assert same(pair, expected)
    mapping = {"name": "x", "label": labels, "image": images, "more": more}
    out = mix.run(mapping, table)
    assert same((out["image"], out["label"]), expected)
    assert out["more"] is more
    assert mapping["image"] is images
    record = mix.run(Sample(**mapping), table)  # type: ignore[arg-type]
    assert same((record.image, record.label), expected)
    assert record.name == "x"


def test_soft_labels() -> None:
    images, labels = batch()
    table = BLEND.plan((images, labels), context())
    hard = BLEND.run((images, labels), table)
    soft = torch.nn.functional.one_hot(labels, CLASSES).double()
    out = augment.MixUp().run((images, soft), table)

    assert same(out, hard)
    again = augment.MixUp().run(out, table)[1]
    assert torch.allclose(again.sum(dim=1), torch.ones(6))


def test_labels_are_where_one_says() -> None:
    images, labels = batch()
    where: Any
    for where in ("y", lambda found: found["y"]):
        mix = augment.CutMix(num_classes=CLASSES, labels_getter=where)
        out = mix({"x": images, "y": labels, "label": torch.zeros(6)})
        assert out["y"].shape == (6, CLASSES)
        assert not out["label"].any()


# -- called ------------------------------------------------------------------------------------


@every
def test_a_call_is_a_plan_and_a_run_whose_number_goes_up(mix: Mix) -> None:
    fresh, here = pickle.loads(pickle.dumps(mix)), Context(torch.initial_seed(), -1, 0, 0)
    made = [fresh(batch()) for _ in range(3)]

    for number, out in enumerate(made):
        table = mix.plan(batch(), here._replace(number=number, stage=fresh._place))
        assert same(out, mix.run(batch(), table))
    assert not same(made[0], made[1])


@every
def test_a_call_draws_by_rank(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = copy.deepcopy(mix), copy.deepcopy(mix)
    here = first(batch())
    monkeypatch.setenv("RANK", "1")

    assert not same(second(batch()), here)


# -- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mix", "given_batch", "error", "message"),
    [
        (
            BLEND,
            (bytes_(4, 3, 5, 5), torch.arange(4)),
            TypeError,
            r"images must be floating point to be blended, got uint8\[4, 3, 5, 5\]: put MixUp ",
        ),
        (EITHER, (bytes_(4, 3, 5, 5), torch.arange(4)), TypeError, "images must be floating point"),
        (
            PASTE,
            (floats(3, 5, 5), torch.arange(3)),
            ValueError,
            r"images must be \(N, C, H, W\), with pixels, to be mixed, got float32\[3, 5, 5\]$",
        ),
        (PASTE, (floats(0, 3, 5, 5), torch.arange(0)), ValueError, "images must be .* with pixels"),
        (BLEND, (floats(4, 3, 5, 5), torch.arange(3)), ValueError, "labels must be classes"),
        (BLEND, floats(4, 3, 5, 5), TypeError, "the batch must hold labels"),
        (BLEND, torch.arange(4), TypeError, "the batch must hold images"),
    ],
)
def test_a_batch_that_cannot_be_mixed_is_refused(
    mix: Mix, given_batch: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        mix.plan(given_batch, context())
    with pytest.raises(error, match=f"^{message}"):
        mix.run(given_batch, torch.zeros(4, len(mix.columns)))


@every
def test_another_table_is_refused(mix: Mix) -> None:
    with pytest.raises(
        ValueError, match=r"^table must have the shape \(6, \d\), a row for each of"
    ):
        mix.run(batch(), mix.plan(batch(5), context()))


# -- in the loader -----------------------------------------------------------------------------


def half(given_batch: Any) -> Any:
    images, labels = given_batch
    return (images.float() / 255).bfloat16().to(memory_format=torch.channels_last), labels


@pytest.mark.slow
@every
@pytest.mark.parametrize("make_device", [lambda: "cpu", FakeDevice, CheckedDevice])
def test_batches_are_the_same_whatever_the_depth(mix: Mix, make_device: Callable[[], Any]) -> None:
    source = [(bytes_(4, 3, 6, 5, seed=n), torch.arange(n, n + 4)) for n in range(4)]
    for depth in DEPTHS:
        device = make_device()
        loader: Any = StreamLoader(
            source, device, transform=[half, mix], prefetch_batches=depth, seed=7
        )
        got = list(loader)
        for number, out in enumerate(got):
            given_batch = half(source[number])
            table = mix.plan(given_batch, Context(7, 0, number, 0, stage=1))
            assert same(out, mix.run(given_batch, table))
        assert len(got) == 4
        if isinstance(device, CheckedDevice):
            device.verify()


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_first_transform_is_planned_on_the_host(depth: int) -> None:
    source = [(bytes_(4, 3, 6, 5, seed=n), torch.arange(4)) for n in range(3)]
    loader: Any = StreamLoader(
        source, FakeDevice(), transform=PASTE, prefetch_batches=depth, seed=7
    )
    for number, out in enumerate(loader):
        table = PASTE.plan(source[number], Context(7, 0, number, 0))
        assert same(out, PASTE.run(source[number], table))
