"""What a transform is: `on` a part, those that plan, and what is said of one that raises."""

import copy
import dataclasses
import functools
import itertools
import pickle
import re
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from streamloader import Planned, StreamLoader
from streamloader.checker import CheckedDevice
from streamloader.context import Context
from streamloader.device.streamless import Streamless
from streamloader.stages import Pipeline
from streamloader.testing import FakeDevice
from streamloader.transforms import Stage, listed, on, planned, seeds, staged
from tests.loaders import DEPTHS
from tests.test_stages import X, doubled, through

# -- on ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: Any


@pytest.mark.parametrize(
    ("key", "batch"),
    [
        (0, [X, 3]),
        (0, (X, 3)),
        (0, Pair(X, 3)),
        ("image", Pair(X, 3)),
        ("image", Sample(X, 3)),
        ("image", {"image": X, "label": 3}),
        ("image", types.MappingProxyType({"image": X, "label": 3})),
    ],
)
def test_a_transform_of_one_part_leaves_the_others_and_the_given_batch(
    key: Any, batch: Any
) -> None:
    new = on(key, doubled)(batch)
    values = list(new.values()) if hasattr(new, "values") else new
    image, label = (new.image, new.label) if isinstance(new, Sample) else values

    assert type(new) is type(batch)
    assert torch.equal(image, X * 2)
    assert label == 3
    assert torch.equal(X, torch.ones(2, 3))


def test_a_part_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"^'image'$"):
        on("image", doubled)({"img": X})


def test_it_shows_what_it_does_and_can_be_pickled() -> None:
    stage = on("image", abs)

    assert repr(stage) == "on(key='image', function=<built-in function abs>)"
    assert pickle.loads(pickle.dumps(stage)) == stage


@pytest.mark.parametrize("function", [3, Stage(abs)], ids=["3", "Stage"])
def test_a_part_is_given_to_a_callable_and_a_stage_goes_around_it(function: Any) -> None:
    text = r"^function must be a callable \(part -> part\), got (3|Stage\(fn=.*\))$"
    with pytest.raises(TypeError, match=text):
        on("image", function)


# -- Stage -------------------------------------------------------------------------------------


def test_a_stage_says_nothing_but_its_function_if_nothing_is_said() -> None:
    stage = Stage(abs)

    assert (stage.fn, stage.name, stage.priority) == (abs, None, 0)
    assert (stage.autocast, stage.after_step) == (None, False)
    assert pickle.loads(pickle.dumps(stage)) == stage
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"^cannot assign to field 'name'$"):
        stage.name = "flip"  # type: ignore[misc]


def test_a_callable_is_a_stage_of_which_nothing_is_said() -> None:
    named = Stage(abs, name="flip")

    assert staged([abs, named]) == [Stage(abs), named]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"fn": 3}, TypeError, "fn must be a callable (batch -> batch), got 3"),
        ({"name": 3}, TypeError, "name must be a text, got 3"),
        ({"priority": 1.5}, TypeError, "priority must be a whole number, got 1.5"),
        ({"priority": True}, TypeError, "priority must be a whole number, got True"),
        ({"priority": 1}, ValueError, "priority must be at most 0, the default, got 1"),
        (
            {"autocast": torch.float32},
            ValueError,
            "autocast must be torch.bfloat16, torch.float16 or None, got torch.float32",
        ),
        (
            {"autocast": True},
            ValueError,
            "autocast must be torch.bfloat16, torch.float16 or None, got True",
        ),
    ],
    ids=str,
)
def test_what_a_stage_cannot_be_is_refused(options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        Stage(**{"fn": abs, **options})


class Encoder(torch.nn.Module):
    """Has a name by its class."""


@pytest.mark.parametrize(
    ("fn", "label"),
    [
        (doubled, "doubled"),
        (abs, "abs"),
        (Tensor.float, "float"),
        (Encoder(), "Encoder"),
        (functools.partial(doubled), "doubled"),
        (on("image", Encoder()), "on('image', Encoder)"),
        (lambda batch: batch, "<lambda>"),
    ],
    ids=str,
)
def test_a_stage_is_called_as_its_function_or_its_class_unless_it_has_a_name(
    fn: Any, label: str
) -> None:
    assert Stage(fn).label == label
    assert Stage(fn, name="flip").label == "flip"


# -- listed ------------------------------------------------------------------------------------


def test_no_transform_is_no_stage() -> None:
    assert listed(None) == listed([]) == ()


@pytest.mark.parametrize(
    "transform", [abs, functools.partial(max, 3), str, torch.nn.ReLU(), Stage(abs)]
)
def test_a_callable_is_one_stage(transform: Any) -> None:
    assert listed(transform) == (transform,)


def test_a_callable_container_is_one_stage() -> None:
    whole = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())

    assert listed(whole) == (whole,)


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_are_stages_in_order(kind: type) -> None:
    assert listed(kind([abs, Stage(str), str])) == (abs, Stage(str), str)


@pytest.mark.parametrize("transform", [3, "flip", [abs, 3], {abs}, {"a": abs}, iter([abs]), False])
def test_what_cannot_be_called_is_refused(transform: Any) -> None:
    shown = re.escape(repr(transform))
    with pytest.raises(
        TypeError,
        match=rf"^transform must be a callable \(batch -> batch\), a Stage, or a list of them, "
        rf"got {shown}$",
    ):
        listed(transform)


def test_a_list_changed_later_changes_nothing() -> None:
    given = [abs]
    stages = listed(given)

    given.clear()

    assert stages == (abs,)


# -- planned -----------------------------------------------------------------------------------


class Noise(Planned):
    """Adds to each row a number that was drawn on the host; remembers what it was asked."""

    def __init__(self, width: int = 1) -> None:
        self.width = width
        self.contexts: list[Context] = []
        self.shapes: list[tuple[int, ...]] = []
        self.tables: list[Tensor] = []

    def plan(self, batch: Tensor, context: Context) -> Tensor:
        self.contexts.append(context)
        self.shapes.append(tuple(batch.shape))
        drawn = torch.Generator().manual_seed(context.key())
        return torch.rand(len(batch), self.width, generator=drawn)

    def run(self, batch: Tensor, table: Tensor) -> Tensor:
        self.tables.append(table)
        return batch + table[:, :1]


def drawn(context: Context, rows: int = 2) -> Tensor:
    return Noise().plan(torch.empty(rows, 3), context)


def test_who_plans_is_known_by_its_class() -> None:
    class Coincidence(torch.nn.Module):
        plan, run = "cosine", print

    noise = Noise()
    assert planned(Coincidence()) is None
    assert planned(noise) is noise
    assert planned(doubled) is None
    assert planned(on(0, doubled)) is None
    assert planned(on(0, on("image", noise))) is not None
    assert not seeds([noise, on(0, noise)])
    assert seeds([noise, doubled])


def test_a_plan_sees_the_batch_on_the_host_and_its_context() -> None:
    noise, context = Noise(), Context(5, 1, 2, 3)
    assert torch.equal(through([noise], X, context), X + drawn(context))
    assert noise.shapes == [(2, 3)]
    assert noise.contexts == [context]


def test_called_by_itself_it_draws_by_how_often_it_was_called() -> None:
    one, other, seed = Noise(), Noise(), torch.initial_seed()
    made = [one(X), other(X), one(X), other(X)]
    first = one.contexts[0].stage
    assert [batch.tolist() for batch in made] == [
        (X + drawn(Context(seed, -1, number, 0, first + place))).tolist()
        for number, place in itertools.product(range(2), range(2))
    ]


def test_a_copy_draws_for_itself() -> None:
    noise = Noise()
    noise(X)
    copied = copy.deepcopy(noise)
    assert not torch.equal(copied(X), Noise.run(noise, X, noise.tables[0]))
    assert not torch.equal(copied(X), noise(X))


@pytest.mark.slow  # it imports the compiler
def test_torch_compile_leaves_a_call_as_it_is() -> None:
    class Constant(Noise):
        @override
        def plan(self, batch: Tensor, context: Context) -> Tensor:
            assert not torch.compiler.is_compiling()
            return torch.ones(len(batch), 1)

    transform = Constant()

    def step(x: Tensor) -> Tensor:
        return transform(x * 1)  # type: ignore[no-any-return]

    compiled: Any = torch.compile(step, backend="eager")
    assert torch.equal(compiled(X), X + 1)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("stages", [1, 2])
def test_modes_and_devices_of_the_caller_do_not_reach_a_plan(depth: int, stages: int) -> None:
    class Curious(Noise):
        @override
        def plan(self, batch: Tensor, context: Context) -> Tensor:
            assert context.apart
            assert not torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
            assert torch.empty(1).device.type == "cpu"
            return super().plan(batch, context)

    loader = StreamLoader(
        [X] * 3, FakeDevice(), transform=[Curious()] * stages, prefetch_batches=depth
    )
    with torch.autocast("cpu"), torch.device("meta"):
        assert len(list(loader)) == 3


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("made", [None, [1.0], torch.empty(1, device="meta")])
def test_what_a_plan_returns_is_a_tensor_on_the_cpu(depth: int, made: Any) -> None:
    class Wrong(Noise):
        @override
        def plan(self, batch: Tensor, context: Context) -> Any:
            return made

    loader = StreamLoader([X], FakeDevice(), transform=Wrong(), prefetch_batches=depth)
    with pytest.raises(TypeError, match=r"^plan must return a tensor on the CPU, got "):
        list(loader)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_transposed_table_arrives_and_is_not_counted_among_the_batchs_bytes(depth: int) -> None:
    class Transposed(Noise):
        @override
        def plan(self, batch: Tensor, context: Context) -> Tensor:
            return super().plan(batch, context).repeat(1, 2).T.contiguous().T

    device = FakeDevice()
    loader = StreamLoader(
        [X] * 2, device, transform=[Transposed(), Transposed()], prefetch_batches=depth, seed=1
    )
    for number, batch in enumerate(loader):
        one, two = (drawn(Context(1, 0, number, 0, stage)) for stage in (0, 1))
        assert torch.equal(batch, X + one + two)
    assert loader.stats.epoch.nbytes == 2 * X.nbytes
    assert len(device.verbs("copy")) in (0, 2 * 2)


def test_without_look_ahead_a_raw_batch_is_let_go_of_by_the_first_transform() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def copied(batch: Tensor) -> Tensor:
        alive.append(weakref.ref(batch))
        return batch * 1

    def look(batch: Tensor) -> Tensor:
        assert alive[-1]() is None
        return batch

    def source() -> Iterator[Tensor]:
        yield torch.ones(3)

    list(StreamLoader(source(), "cpu", transform=[copied, look], prefetch_batches=0))
    assert alive


def test_a_table_travels_with_the_small_tensors_up_to_a_mebibyte() -> None:
    device, noise = FakeDevice(), Noise(width=5000)
    source = [(torch.ones(2, 200_000), torch.ones(2)) for _ in range(3)]
    got = list(StreamLoader(source, device, transform=on(0, noise), prefetch_batches=1))
    assert len(device.verbs("copy")) == 2 * 3
    assert [labels.tolist() for _, labels in got] == [[1, 1]] * 3
    assert noise.tables[0].nbytes == 40_000
    wide = Noise(width=200_000)
    ((_, label),) = StreamLoader(source[:1], FakeDevice(), transform=on(0, wide))
    assert label.untyped_storage().nbytes() < 100


def test_a_later_transform_plans_when_its_input_is_known() -> None:
    first, second, context = Noise(), Noise(), Context(5, 0, 0, 0)

    def wider(batch: Tensor) -> Tensor:
        return torch.cat([batch, batch])

    got = through([first, wider, second], X, context)
    wide = wider(X + drawn(context))
    assert torch.equal(got, wide + drawn(context._replace(stage=2), rows=4))
    assert second.shapes == [(4, 3)]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make_device", [lambda: "cpu", FakeDevice, CheckedDevice])
@pytest.mark.parametrize("depth", DEPTHS)
def test_planned_batches_are_the_same_whatever_the_depth_and_the_workers(
    depth: int, make_device: Callable[[], Any], workers: int
) -> None:
    rows: Any = list(torch.arange(12.0).view(12, 1))
    source: Any = DataLoader(rows, batch_size=2, num_workers=workers)
    loader: Any = StreamLoader(
        source,
        make_device(),
        transform=[Noise(), Noise()],
        prefetch_batches=depth,
        seed=7,
    )
    for epoch in range(2):
        for number, batch in enumerate(iter(loader)):
            one, two = (drawn(Context(7, epoch, number, 0, stage)) for stage in (0, 1))
            expected = torch.arange(2.0 * number, 2 * number + 2).view(2, 1) + one + two
            assert torch.equal(batch, expected)
        assert number == 5


@pytest.mark.parametrize("depth", DEPTHS)
def test_one_part_is_planned_and_run(depth: int) -> None:
    source: list[dict[str, Any]] = [{"image": X, "label": n} for n in range(3)]
    noise = Noise()
    loader = StreamLoader(
        source, FakeDevice(), transform=on("image", noise), prefetch_batches=depth, seed=1
    )
    for number, batch in enumerate(loader):
        assert batch["label"] == number
        assert torch.equal(batch["image"], X + drawn(Context(1, 0, number, 0)))
    assert noise.shapes == [(2, 3)] * 3


class Moves:
    """Has a `.to` of its own, so the batch is moved at hand-over."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Moves":
        return Moves(self.x.to(device))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_batch_that_is_moved_at_hand_over_is_planned_too(depth: int) -> None:
    source = [(X, Moves(X)) for _ in range(3)]
    transform = on(0, Noise())
    loader = StreamLoader(source, FakeDevice(), transform=transform, prefetch_batches=depth, seed=1)
    for number, (x, moved) in enumerate(loader):
        assert torch.equal(moved.x, X)
        assert torch.equal(x, X + drawn(Context(1, 0, number, 0)))


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_in_a_plan_comes_after_the_batches_before_it_and_says_whose_it_is(
    depth: int,
) -> None:
    class Picky(Noise):
        @override
        def plan(self, batch: Tensor, context: Context) -> Tensor:
            if context.number == 2:
                raise ValueError("wrong size")
            return super().plan(batch, context)

    loader = StreamLoader([X] * 4, FakeDevice(), transform=Picky(), prefetch_batches=depth)
    batches = iter(loader)
    assert len(list(itertools.islice(batches, 2))) == 2
    with pytest.raises(ValueError, match="wrong size") as caught:
        next(batches)
    notes = getattr(caught.value, "__notes__", [str(caught.value)])
    assert notes[0].startswith("raised by transform Picky on batch 2, float32[2, 3]")


@pytest.mark.filterwarnings("error")
def test_a_seed_reaches_what_is_planned_also_where_generators_cannot_be_seeded() -> None:
    rows: Any = [torch.ones(1)] * 4
    source: Any = DataLoader(rows)
    (first, *_) = StreamLoader(source, FakeDevice(), transform=Noise(), seed=3)
    assert torch.equal(first, torch.ones(1, 1) + drawn(Context(3, 0, 0, 0), rows=1))


# -- errors ------------------------------------------------------------------------------------


def fails(_: Any) -> Any:
    raise ValueError("wrong size")


class Fails(torch.nn.Module):
    @override
    def forward(self, batch: Any) -> Any:
        raise ValueError("wrong size")


def explanation(transform: Callable[[Any], Any] | Stage, value: Any) -> str:
    with pytest.raises(ValueError, match=r"^wrong size") as caught:
        through([transform], value)
    notes: list[str] = getattr(caught.value, "__notes__", [])  # from Python 3.11
    return "\n".join(notes) or str(caught.value).removeprefix("wrong size\n")


def test_an_error_says_which_transform_on_what() -> None:
    assert explanation(fails, X) == "raised by transform fails on batch 0, float32[2, 3]"


def test_an_error_on_a_whole_batch_says_how_to_get_a_part() -> None:
    assert explanation(fails, (X, X)) == (
        "raised by transform fails on batch 0, tuple(float32[2, 3], float32[2, 3]); a transform "
        "gets the whole batch: to give it one part, wrap it, as in transform=on(0, fails)"
    )
    assert explanation(fails, {"img": X}).endswith("as in transform=on('img', fails)")
    assert explanation(fails, {}).endswith("as in transform=on(0, fails)")


def test_an_error_on_a_part_says_nothing_of_parts() -> None:
    text = explanation(on(0, fails), (X, X))

    assert text == (
        "raised by transform on(0, fails) on batch 0, tuple(float32[2, 3], float32[2, 3])"
    )


def test_a_transform_without_a_name_is_shown_by_its_class() -> None:
    assert explanation(Fails(), X) == "raised by transform Fails on batch 0, float32[2, 3]"


def test_an_error_in_a_stage_names_the_stage() -> None:
    text = explanation(Stage(on(0, fails), name="augment"), (X, X))

    assert text == ("raised by transform augment on batch 0, tuple(float32[2, 3], float32[2, 3])")


def test_an_error_without_notes_says_so_in_its_message() -> None:
    class OldError(ValueError):  # as in Python 3.10, which has no notes
        add_note = property()

    def fails_so(_: Any) -> Any:
        raise OldError("wrong size", 3)

    with pytest.raises(
        OldError, match=r"wrong size\\nraised by transform .*fails_so on "
    ) as caught:
        through([fails_so], X)

    assert caught.value.args[1:] == (3,)


@pytest.mark.parametrize("arguments", [(), (3,)])
def test_a_message_that_is_no_text_is_left_alone(arguments: tuple[Any, ...]) -> None:
    class OldError(ValueError):
        add_note = property()

    def fails_so(_: Any) -> Any:
        raise OldError(*arguments)

    with pytest.raises(OldError, match=r"^3?$") as caught:
        through([fails_so], X)

    assert caught.value.args == arguments


def test_an_interrupt_is_not_explained() -> None:
    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        through([interrupted], X)

    assert not hasattr(caught.value, "__notes__")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_error_on_a_batch_that_cannot_be_described_is_still_the_error() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)

    with pytest.raises(ValueError, match=r"^wrong size"):
        Pipeline(Streamless(torch.device("cpu")), [fails]).finish([nested], Context(0, 0, 0, 0))


def test_the_advice_on_a_dataclass_names_a_field() -> None:
    assert explanation(fails, Sample(X, 3)).endswith("as in transform=on('image', fails)")
