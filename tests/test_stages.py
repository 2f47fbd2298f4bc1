"""The legs on the device: who waits for whom, and what a transform sees."""

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile
from typing_extensions import override

from streamloader.batch import Batch
from streamloader.context import Context
from streamloader.device.streamless import Streamless
from streamloader.pack import Packer
from streamloader.results import OverwrittenError
from streamloader.stages import Pipeline
from streamloader.testing import FakeDevice
from streamloader.transforms import Planned, Stage, on
from tests.test_results import Closed, Linked, Moves, Slots

FIRST = Context(0, 0, 0, 0, apart=False)
SEEDED = Context(3, 0, 0, 0)
NUMBER_7 = FIRST._replace(number=7)
X = torch.ones(2, 3)


def doubled(batch: Any) -> Any:
    return batch * 2


class Image(Tensor):
    """A subclass with metadata."""


def sent(device: FakeDevice, pipeline: Pipeline, value: Any, context: Context = FIRST) -> Batch:
    pack = Packer(
        device,
        lambda nbytes, _: device.slab(nbytes),
        fresh=True,
        pinned=False,
        plan=pipeline.planner(context),
    )
    batch = pack(context.number, value, lambda: False)
    assert batch is not None
    pipeline.send(batch)
    return batch


def through(transforms: list[Any], value: Any, context: Context = FIRST) -> Any:
    device = FakeDevice()
    pipeline = Pipeline(device, transforms)
    batch = sent(device, pipeline, value, context)
    pipeline.transform(batch, context)
    return pipeline.hand_over(batch, context)


class Doubled(Planned):
    """By a table that is planned on the host."""

    @override
    def plan(self, batch: Any, context: Context) -> Tensor:
        return torch.full((1,), 2.0)

    @override
    def run(self, batch: Any, table: Tensor) -> Any:
        return batch * table


# -- streams -----------------------------------------------------------------------------------


def test_each_leg_has_one_stream_for_the_pipelines_life() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [doubled, doubled])
    for _ in range(3):
        pipeline.transform(sent(device, pipeline, X), FIRST)

    assert [name for _, name in device.verbs("stream")] == ["copy", "stage 0", "stage 1"]


def test_a_batch_goes_from_stream_to_stream_waited_for_and_recorded() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [doubled])
    device.log.clear()

    batch = sent(device, pipeline, torch.ones(2))
    pipeline.transform(batch, FIRST)
    pipeline.hand_over(batch, FIRST)

    assert [entry for entry in device.log if entry[0] != "stream"] == [
        ("slab", 64),
        ("arena", "copy", 8),
        ("copy", "copy", 8),
        ("record", "copy"),
        ("wait", "stage 0", "copy"),
        ("uses", "stage 0", 8),
        ("record", "stage 0"),
        ("wait", "default", "stage 0"),
        ("uses", "default", 8),
    ]


def test_it_is_handed_over_to_the_stream_that_is_current_then() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [])
    batch = sent(device, pipeline, X)
    device.log.clear()

    with device.on(device.stream("mine")):
        pipeline.hand_over(batch, FIRST)

    assert device.log[1:] == [("wait", "mine", "copy"), ("uses", "mine", X.nbytes)]


def test_a_transform_runs_on_its_own_stream() -> None:
    device = FakeDevice()
    seen: list[str] = []

    def look(batch: Any) -> Any:
        seen.append(device.current().name)
        return batch

    pipeline = Pipeline(device, [look, look])
    pipeline.transform(sent(device, pipeline, X), FIRST)

    assert seen == ["stage 0", "stage 1"]
    assert device.current().name == "default"


def test_the_copy_waits_for_what_was_written_on_the_device_before() -> None:
    device = FakeDevice()
    here = device.put(torch.zeros(2))
    device.current().submit(functools.partial(here.fill_, 5))
    pipeline = Pipeline(device, [])

    got = pipeline.hand_over(sent(device, pipeline, (here, X)), FIRST)

    assert ("wait", "copy", "default") in device.log
    assert got[0] is here
    assert here.tolist() == [5, 5]
    assert device.verbs("uses") == [("uses", "default", 8), ("uses", "default", X.nbytes)]


def test_a_sparse_tensor_on_the_device_is_recorded_by_its_parts() -> None:
    class Holds(FakeDevice):
        @override
        def holds(self, tensor: Tensor) -> bool:
            return True

    device = Holds()
    pipeline = Pipeline(device, [])

    pipeline.hand_over(sent(device, pipeline, torch.eye(4).to_sparse()), FIRST)

    assert device.verbs("uses") == [("uses", "default", 64), ("uses", "default", 16)]


def test_every_large_tensor_is_one_copy_and_small_ones_share_one() -> None:
    device = FakeDevice()
    large = torch.ones(1 << 18)

    sent(device, Pipeline(device, []), [large, X, X, large])

    assert [nbytes for *_, nbytes in device.verbs("copy")] == [1 << 20, 1 << 20, 64 + 24]


def test_the_event_is_set_even_if_the_copy_fails() -> None:
    class Full(FakeDevice):
        @override
        def arena(self, nbytes: int) -> Tensor:
            if nbytes == X.nbytes:
                raise MemoryError("full")
            return super().arena(nbytes)

    device = Full()
    pipeline = Pipeline(device, [])
    large = torch.ones(1 << 18)
    pack = Packer(device, lambda nbytes, _: device.slab(nbytes), fresh=True, pinned=False)
    batch = pack(0, [large, X], lambda: False)
    assert batch is not None

    with pytest.raises(MemoryError, match=r"^full$"):
        pipeline.send(batch)

    assert batch.ready is not None
    assert batch.ready.position == 1  # the first block's copy is under way


def test_a_batch_is_let_go_of_at_hand_over() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [])
    batch = sent(device, pipeline, [X])

    got = pipeline.hand_over(batch, FIRST)
    assert (batch.value, batch.memory) == (None, [])

    alive = weakref.ref(got[0])
    del got
    assert alive() is None
    assert device.arenas == 0


def test_editing_one_tensor_in_place_leaves_the_others_version() -> None:
    images, labels = through([], (torch.ones(2), torch.zeros(2)))
    weight = torch.ones(2, requires_grad=True)
    loss = (images * weight).sum()

    labels.add_(1)
    loss.backward()

    assert weight.grad is not None
    assert images.untyped_storage().data_ptr() == labels.untyped_storage().data_ptr()


# -- transforms --------------------------------------------------------------------------------


def test_transforms_are_called_in_order() -> None:
    assert through([doubled, lambda batch: batch + 1], X).tolist() == (X * 2 + 1).tolist()


def test_a_transform_runs_without_gradients() -> None:
    weight = torch.ones(2, 3, requires_grad=True)

    assert not through([lambda batch: batch * weight], X).requires_grad
    assert torch.is_grad_enabled()


def test_a_transform_runs_without_the_callers_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert through([lambda batch: batch @ batch.T], X).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")


def test_draws_are_those_of_the_context_and_the_stage() -> None:
    def draw(batch: Any) -> Any:
        return [*batch, torch.rand(3)]

    first, second = through([draw, draw], [], SEEDED)
    again, _ = through([draw, draw], [], SEEDED)
    other, _ = through([draw, draw], [], SEEDED._replace(number=1))

    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.filterwarnings("ignore:transform <lambda> draws from torch's generators:UserWarning")
def test_without_a_seed_a_transform_draws_as_it_comes() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    assert torch.equal(through([lambda _: torch.rand(3)], X, FIRST), expected)


def test_a_seeded_transform_leaves_the_callers_generator() -> None:
    before = torch.get_rng_state()

    through([lambda _: torch.rand(3)], X, SEEDED)

    assert torch.equal(torch.get_rng_state(), before)


def test_whoever_draws_unseeded_is_warned_of_once_and_early() -> None:
    torch.manual_seed(1)
    device = FakeDevice()
    pipeline = Pipeline(device, [Stage(lambda batch: batch + torch.rand(3), name="noise")] * 2)
    text = (
        r"^transform noise draws from torch's generators \(or the loader does meanwhile\): ahead "
        r"of the step, unseeded, so that neither these draws nor your own can be repeated\. Use a "
        r"DataLoader with num_workers >= 1, or prefetch_batches=0, or a generator of the "
        r"transform's own$"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        pipeline.transform(sent(device, pipeline, X), FIRST)
    pipeline.transform(sent(device, pipeline, X), FIRST._replace(number=1))

    assert len(caught) == 1


def test_after_some_batches_nobody_is_watched() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [lambda batch: batch + torch.rand(3)])
    pipeline.transform(sent(device, pipeline, X), FIRST._replace(number=3))


def test_whoever_plans_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "generators", None)

    assert torch.equal(through([Doubled()], X), X * 2)


# -- stages --------------------------------------------------------------------------------------


def test_a_stages_stream_has_its_priority() -> None:
    device = FakeDevice()
    seen: list[int] = []

    def look(batch: Any) -> Any:
        seen.append(device.current().priority)
        return batch

    pipeline = Pipeline(device, [look, Stage(look, priority=-1), Stage(look, priority=-3)])
    pipeline.transform(sent(device, pipeline, X), FIRST)

    assert seen == [0, -1, -3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_stage_runs_under_the_autocast_it_was_given_and_no_other(
    dtype: torch.dtype | None,
) -> None:
    stages = [Stage(lambda batch: batch @ batch.T, autocast=dtype), Tensor.float, torch.t]
    with torch.autocast("cpu", dtype=torch.float16):
        first = through([stages[0]], X)
        last = through([*stages, lambda batch: batch @ batch.T], X)

    assert first.dtype == (dtype or torch.float32)
    assert last.dtype == torch.float32


def test_a_planned_stage_runs_under_its_autocast_too() -> None:
    class Product(Doubled):
        @override
        def run(self, batch: Any, table: Tensor) -> Any:
            return batch @ batch.T

    assert through([Stage(Product(), autocast=torch.bfloat16)], X).dtype == torch.bfloat16


def test_weights_that_a_stage_casts_are_not_found_by_the_callers_autocast() -> None:
    layer = torch.nn.Linear(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = through([Stage(layer, autocast=torch.bfloat16)], X)
        assert not got.requires_grad
        layer.weight.data.add_(1)  # which nothing tells the cache of
        made = layer(X)
        made.sum().backward()

    assert torch.allclose(made, got + 3, rtol=0.1)
    assert layer.weight.grad is not None


@pytest.mark.parametrize("enabled", [False, True])
def test_nor_are_those_that_its_own_autocast_casts(*, enabled: bool) -> None:
    layer = torch.nn.Linear(3, 3)

    def cast(batch: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(batch)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        got = through([cast], X)
        assert torch.is_autocast_cache_enabled()
        layer.weight.data.add_(1)
        assert torch.allclose(cast(X), got + 3, rtol=0.1)


def test_a_module_runs_in_the_mode_it_is_in() -> None:
    layer = torch.nn.Dropout(1.0)

    assert through([layer], X).sum() == 0
    assert layer.training
    assert torch.equal(through([layer.eval()], X), X)


def test_what_a_stage_makes_in_inference_mode_is_of_use_to_autograd() -> None:
    weight = torch.ones(2, 3, requires_grad=True)

    (through([torch.inference_mode()(doubled)], X) * weight).sum().backward()

    assert weight.grad is not None
    assert torch.equal(weight.grad, X * 2)


def test_in_the_callers_inference_mode_nothing_is_copied() -> None:
    made: list[Tensor] = []

    def make(batch: Tensor) -> Tensor:
        made.append(batch * 2)
        return made[0]

    with torch.inference_mode():
        assert through([make], X) is made[0]


def test_a_profiler_sees_each_stage_with_its_name_and_the_batchs_number() -> None:
    with profile() as seen:
        through([doubled, Stage(doubled, name="encoder"), Doubled()], X, NUMBER_7)

    names = {event.key for event in seen.key_averages()}
    assert names >= {
        "transform doubled on batch 7",
        "transform encoder on batch 7",
        "transform Doubled on batch 7",
    }


@pytest.mark.parametrize("plans", [False, True])
def test_none_is_an_error_that_names_the_stage_and_the_batch(*, plans: bool) -> None:
    class Nothing(Doubled):
        @override
        def run(self, batch: Any, table: Tensor) -> Any:
            return None

    stage = Stage(Nothing() if plans else lambda _: None, name="augment")
    with pytest.raises(TypeError, match=r"^transform augment on batch 7 returned None: it must "):
        through([doubled, stage], X, NUMBER_7)


def test_a_tensor_on_another_device_is_an_error_that_names_the_stage_and_the_batch() -> None:
    with pytest.raises(
        ValueError, match=r"^transform on\(0, to\) on batch 7 returned a tensor on meta: "
    ):
        through([doubled, on(0, functools.partial(Tensor.to, device="meta"))], [X], NUMBER_7)


def test_one_buffer_for_all_batches_is_an_error_where_batches_are_made_ahead() -> None:
    device, buffer = FakeDevice(), torch.empty(2, 3)
    pipeline = Pipeline(device, [doubled, lambda batch: torch.add(batch, 1, out=buffer)])
    pipeline.transform(sent(device, pipeline, X), FIRST)

    with pytest.raises(OverwrittenError, match=r"^transform <lambda> on batch 1 returned memory "):
        pipeline.transform(sent(device, pipeline, X), FIRST._replace(number=1))

    pipeline.begin()
    pipeline.transform(sent(device, pipeline, X), FIRST)


def test_without_look_ahead_one_buffer_is_as_good_as_in_a_plain_loop() -> None:
    buffer = torch.empty(2, 3)
    pipeline = Pipeline(FakeDevice(), [lambda batch: torch.add(batch, 1, out=buffer)])

    for number in range(2):
        assert pipeline.finish(X * number, FIRST) is buffer


# -- after the step --------------------------------------------------------------------------------


def test_a_stage_after_the_step_and_those_behind_it_run_at_hand_over_behind_the_asks() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [doubled, Stage(doubled, after_step=True), doubled])
    asked = [device.record(device.current()), device.record(device.stream("mine"))]
    batch = sent(device, pipeline, X)
    pipeline.transform(batch, FIRST)
    assert torch.equal(batch.value, X * 2)
    device.log.clear()

    got = pipeline.hand_over(batch, FIRST, asked)

    assert torch.equal(got, X * 8)
    assert [entry for entry in device.log if entry[0] != "stream"] == [
        ("wait", "stage 1", "default"),
        ("wait", "stage 1", "mine"),
        ("wait", "stage 1", "stage 0"),
        ("uses", "stage 1", 24),
        ("record", "stage 1"),
        ("wait", "stage 2", "stage 1"),
        ("uses", "stage 2", 24),
        ("record", "stage 2"),
        ("wait", "default", "stage 2"),
        ("uses", "default", 24),
    ]


def test_its_table_is_not_sent_behind_the_batches_that_come_later() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [doubled, Stage(Doubled(), after_step=True)])
    batch, later = sent(device, pipeline, X), sent(device, pipeline, X)
    pipeline.transform(batch, FIRST)
    device.log.clear()

    assert torch.equal(pipeline.hand_over(batch, FIRST), X * 4)

    assert ("wait", "stage 1", "tables") in device.log
    assert ("wait", "stage 1", "copy") not in device.log
    assert later.ready is not None
    assert later.ready.stream.todo  # its copy has not run


def test_the_callers_stream_waits_for_a_stage_that_failed_after_the_step() -> None:
    def fail(_: Any) -> Any:
        raise KeyError("x")

    device = FakeDevice()
    pipeline = Pipeline(device, [Stage(fail, after_step=True)])
    batch = sent(device, pipeline, X)
    pipeline.transform(batch, FIRST)

    with pytest.raises(KeyError, match=r"^'x'"):
        pipeline.hand_over(batch, FIRST)

    assert device.log[-2:] == [("wait", "default", "stage 0"), ("uses", "default", 24)]


def test_an_opaque_batch_waits_for_the_asks_where_it_is_transformed() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [Stage(lambda batch: batch, after_step=True)])
    batch = sent(device, pipeline, [Moves(X)])
    asked = [device.record(device.stream("mine"))]
    device.log.clear()

    pipeline.hand_over(batch, FIRST, asked)

    assert device.log[0] == ("wait", "default", "mine")


# -- opaque batches and inline -----------------------------------------------------------------


def test_an_object_of_its_own_kind_is_moved_and_transformed_at_hand_over() -> None:
    device = FakeDevice()
    streams: list[str] = []

    def look(batch: Any) -> Any:
        streams.append(device.current().name)
        return batch

    pipeline = Pipeline(device, [look])
    thing = Moves(X)
    batch = sent(device, pipeline, [thing])
    pipeline.transform(batch, FIRST)
    assert streams == []

    got = pipeline.hand_over(batch, FIRST)[0]

    assert streams == ["default"]
    assert type(got) is Moves
    assert got is not thing


def test_an_object_whose_to_returns_none_was_moved_in_place() -> None:
    class InPlace:
        def to(self, device: Any) -> None:
            self.device = device

    thing = InPlace()

    assert Pipeline(FakeDevice(), []).finish([thing], FIRST)[0] is thing
    assert thing.device == torch.device("cpu")


def test_inline_moves_and_transforms() -> None:
    meta = Streamless(torch.device("meta"))

    got = Pipeline(meta, []).finish((X, "a", torch.eye(2).to_sparse()), FIRST)
    transformed = Pipeline(FakeDevice(), [on(0, doubled), on(0, doubled)]).finish([X], FIRST)

    assert got[0].device.type == got[2].device.type == "meta"
    assert got[1] == "a"
    assert torch.equal(transformed[0], X * 4)


def test_inline_leaves_what_is_there_already() -> None:
    batch = [torch.ones(2, device="meta")]

    assert Pipeline(Streamless(torch.device("meta")), []).finish(batch, FIRST) is batch


def test_inline_keeps_a_subclasss_metadata_as_lookahead_does() -> None:
    image = torch.ones(2).as_subclass(Image)
    image.size_before = (3, 4)  # type: ignore[attr-defined]

    got = Pipeline(Streamless(torch.device("meta")), []).finish(image, FIRST)

    assert vars(got) == {"size_before": (3, 4)}


def test_inline_a_tensor_that_wants_a_gradient_is_a_leaf_as_with_lookahead() -> None:
    tensor = torch.ones(2, requires_grad=True)

    assert Pipeline(Streamless(torch.device("meta")), []).finish(tensor, FIRST).is_leaf


# -- hidden memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [Closed, Slots, Linked], ids=lambda kind: str(kind.__name__))
def test_the_callers_stream_is_recorded_on_what_an_object_hides(wrap: Any) -> None:
    device = FakeDevice()
    pipeline = Pipeline(device, [lambda _: wrap(torch.ones(100))])
    batch = sent(device, pipeline, X)
    pipeline.transform(batch, FIRST)
    device.log.clear()

    pipeline.hand_over(batch, FIRST)

    assert device.log == [("wait", "default", "stage 0"), ("uses", "default", 400)]
