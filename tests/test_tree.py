"""Any nesting of containers is gone through, and rebuilt only where a leaf changed."""

import dataclasses
import functools
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from streamloader import tree


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    label: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    image: Any
    label: Any


@dataclasses.dataclass
class Derived:
    """A `__post_init__` that would undo a change of `image` if it ran again."""

    image: Any
    size: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.image = torch.zeros(1) if self.image is None else self.image
        self.size = "from __post_init__"


class Listed(list[Any]):
    note = ""


class Tupled(tuple[Any, ...]):
    __slots__ = ()


class Odd(dict[str, Any]):
    """A dict whose constructor takes something else than items."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note


class Moves:
    """Has a `.to` of its own."""

    def to(self, device: Any) -> "Moves":
        del device
        return self


class Store(MutableMapping[str, Any]):
    """A mapping that keeps its items in a dict of its own, and does not say how to copy it."""

    def __init__(self, **items: Any) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


X, Y = torch.arange(6.0).reshape(2, 3), torch.arange(2)


def negated(leaf: Any) -> Any:
    return -leaf if isinstance(leaf, Tensor) else leaf


def same(left: Any, right: Any) -> bool:
    """Whether two batches have one structure and the same objects as leaves."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (Tensor, Moves)):
        return left is right
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        names = [field.name for field in dataclasses.fields(left)]
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left is right


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inside, max_size=3)
    named = st.dictionaries(st.sampled_from("abc"), inside, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        items.map(Listed),
        items.map(Tupled),
        named,
        named.map(OrderedDict),
        named.map(UserDict),
        named.map(types.MappingProxyType),
        named.map(lambda values: defaultdict(list, values)),
        st.builds(Pair, inside, inside),
        st.builds(Sample, inside, inside),
        st.builds(Frozen, inside, inside),
        st.builds(Slotted, inside, inside),
    )


batches = st.recursive(
    st.one_of(
        st.builds(torch.zeros, st.integers(0, 2)),
        st.builds(Moves),
        st.none(),
        st.text(max_size=2),
        st.integers(),
        st.just(Path("image.jpg")),
    ),
    containers,
    max_leaves=8,
)


# -- replace -----------------------------------------------------------------------------------


@given(batches)
def test_an_unchanged_batch_is_the_same_object(batch: Any) -> None:
    assert tree.replace(lambda leaf: leaf, batch) is batch


@given(batches)
def test_leaves_that_are_replaced_and_put_back_give_the_batch_again(batch: Any) -> None:
    leaves = tree.leaves(batch)
    stand_ins = [torch.empty(0) for _ in leaves]
    away, back = iter(stand_ins), iter(leaves)

    replaced = tree.replace(lambda _: next(away), batch)

    assert all(map(lambda a, b: a is b, tree.leaves(replaced), stand_ins))
    assert same(tree.replace(lambda _: next(back), replaced), batch)


@given(batches)
def test_the_given_batch_is_not_written_to(batch: Any) -> None:
    leaves = tree.leaves(batch)
    back = iter(leaves)
    before = tree.replace(lambda _: next(back), tree.replace(lambda _: torch.empty(0), batch))

    tree.replace(lambda _: torch.empty(0), batch)

    assert same(before, batch)
    assert all(map(lambda a, b: a is b, tree.leaves(batch), leaves))


@pytest.mark.parametrize(
    ("batch", "get"),
    [
        ([X, 1], lambda batch: batch[0]),
        ((X, 1), lambda batch: batch[0]),
        (Tupled([X, 1]), lambda batch: batch[0]),
        (Pair(X, 1), lambda batch: batch.image),
        (Sample(X, 1), lambda batch: batch.image),
        (Frozen(X, 1), lambda batch: batch.image),
        (Slotted(X, 1), lambda batch: batch.image),
        ({"image": X, 1: 1}, lambda batch: batch["image"]),
        (OrderedDict(image=X), lambda batch: batch["image"]),
        (UserDict(image=X), lambda batch: batch["image"]),
        (types.MappingProxyType({"image": X}), lambda batch: batch["image"]),
        (torch.max(X, 0), lambda batch: batch.values),
        ([[[{"a": (X,)}]]], lambda batch: batch[0][0][0]["a"][0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_is_rebuilt_as_its_own_class(batch: Any, get: Callable[[Any], Tensor]) -> None:
    expected = -get(batch)

    new = tree.replace(negated, batch)

    assert type(new) is type(batch)
    assert new is not batch
    assert torch.equal(get(new), expected)
    assert torch.equal(get(batch), -expected)


def test_only_containers_on_the_way_to_a_changed_leaf_are_new() -> None:
    untouched = {"label": Y, "names": ["a", "b"]}

    new = tree.replace(lambda leaf: -leaf if leaf is X else leaf, [untouched, [X]])

    assert new[0] is untouched


def test_a_list_subclass_keeps_its_attributes() -> None:
    batch = Listed([X])
    batch.note = "kept"

    new = tree.replace(negated, batch)

    assert (type(new), new.note) == (Listed, "kept")
    assert batch[0] is X


def test_a_defaultdict_keeps_its_factory() -> None:
    assert tree.replace(negated, defaultdict(list, a=X)).default_factory is list


def test_a_mapping_keeps_its_key_order() -> None:
    batch = OrderedDict([("z", 1), ("a", X), ("m", Y)])

    assert list(tree.replace(negated, batch)) == ["z", "a", "m"]


def test_a_dict_with_an_unusual_constructor_is_rebuilt() -> None:
    batch = Odd("kept")
    batch["a"] = X

    new = tree.replace(negated, batch)

    assert (type(new), new.note) == (Odd, "kept")
    assert torch.equal(new["a"], -X)


def test_post_init_does_not_run_again() -> None:
    batch = Derived(X)
    batch.size = Y

    new = tree.replace(negated, batch)

    assert torch.equal(new.image, -X)
    assert torch.equal(new.size, -Y)


def test_a_field_that_was_never_set_stays_unset() -> None:
    @dataclasses.dataclass(slots=True)
    class Late:
        image: Any
        size: Any = dataclasses.field(init=False)

    new = tree.replace(negated, Late(X))

    assert torch.equal(new.image, -X)
    assert not hasattr(new, "size")


@pytest.mark.parametrize(
    "other",
    [
        "text",
        b"bytes",
        None,
        3,
        2.5,
        1j,
        Path("image.jpg"),
        {1, 2},
        deque([X]),
        types.SimpleNamespace(image=X),
        Tensor,
        torch.nn.Linear,
        Sample,
        Pair,
        torch.float32,
        torch.Size([2, 3]),
        range(3),
    ],
    ids=repr,
)
def test_anything_else_is_untouched(other: Any) -> None:
    def refused(leaf: Any) -> Any:
        raise AssertionError(leaf)

    assert tree.replace(refused, [other])[0] is other


def test_a_generator_in_a_batch_is_not_used_up() -> None:
    generator = (n for n in range(3))

    tree.replace(negated, [generator, X])

    assert list(generator) == [0, 1, 2]


def test_an_object_with_its_own_to_is_a_leaf_before_it_is_a_tuple() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])

    assert isinstance(packed, tuple)
    assert tree.leaves([packed]) == [packed]


def test_an_object_whose_to_is_no_method_is_no_leaf() -> None:
    @dataclasses.dataclass
    class Transfer:
        to: str
        amount: Any

    batch = Transfer("somebody", X)

    assert tree.leaves(batch) == [X]


@dataclasses.dataclass
class Destination:
    amount: Any
    to: str = "nobody"


def test_a_field_named_to_with_a_default_is_no_method() -> None:
    assert tree.leaves(Destination(X)) == [X]


def test_a_tensor_that_is_there_twice_is_visited_twice() -> None:
    assert len(tree.leaves({"a": X, "b": [X]})) == 2


def test_leaves_come_in_the_order_of_the_containers() -> None:
    moves = Moves()

    assert tree.leaves({"z": (X, moves), "a": [1, Y]})[1] is moves
    assert tree.leaves({"z": (X, moves), "a": [1, Y]})[2] is Y


def test_a_mapping_that_does_not_say_how_to_copy_itself_is_not_written_to() -> None:
    batch = Store(image=X)

    new = tree.replace(negated, batch)

    assert torch.equal(new["image"], -X)
    assert batch["image"] is X


def test_a_tuple_with_an_unusual_constructor_is_rebuilt() -> None:
    class Point(tuple[Any, ...]):
        __slots__ = ()

        def __new__(cls, x: Any, y: Any) -> "Point":
            return super().__new__(cls, (x, y))

    new = tree.replace(negated, Point(X, Y))

    assert type(new) is Point
    assert torch.equal(new[1], -Y)


def test_a_mapping_that_is_a_dataclass_is_replaced_in_both() -> None:
    @dataclasses.dataclass
    class Output(OrderedDict[str, Any]):  # as transformers' ModelOutput
        logits: Any = None

        def __post_init__(self) -> None:
            self["logits"] = self.logits

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self:
                super().__setitem__(name, value)
            super().__setattr__(name, value)

    new = tree.replace(negated, Output(X))

    assert torch.equal(new.logits, -X)
    assert torch.equal(new["logits"], -X)


def test_an_item_of_such_a_mapping_that_is_no_field_is_replaced_and_no_attribute() -> None:
    @dataclasses.dataclass
    class Open(OrderedDict[str, Any]):
        logits: Any = None

    batch = Open(X)
    batch["more"] = Y

    new = tree.replace(negated, batch)

    assert torch.equal(new.logits, -X)
    assert torch.equal(new["more"], -Y)
    assert not hasattr(new, "more")
    assert batch["more"] is Y


def test_a_frozen_slotted_dataclass_may_have_a_field_that_was_never_set() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Late:
        image: Any
        size: Any = dataclasses.field(init=False)

    assert torch.equal(tree.replace(negated, Late(X)).image, -X)


def test_a_tuple_keeps_its_attributes() -> None:
    class Noted(tuple[Any, ...]):  # it is to have a __dict__
        note = ""

    batch = Noted([X])
    batch.note = "kept"

    new = tree.replace(negated, batch)

    assert (type(new), new.note) == (Noted, "kept")
    assert torch.equal(new[0], -X)


# -- emptied -----------------------------------------------------------------------------------


@given(batches)
def test_emptying_visits_the_leaves_in_the_order_of_replace(batch: Any) -> None:
    visited: list[Any] = []

    def visit(leaf: Any) -> Any:
        visited.append(leaf)
        return leaf

    assert tree.emptied(visit, batch) is batch
    assert all(map(lambda a, b: a is b, visited, tree.leaves(batch)))
    assert len(visited) == len(tree.leaves(batch))


@given(batches)
def test_what_was_emptied_can_be_filled_again(batch: Any) -> None:
    leaves = tree.leaves(batch)
    away = tree.emptied(lambda _: Y, batch)
    back = iter(leaves)

    assert same(tree.replace(lambda _: next(back), away), batch)


@pytest.mark.parametrize(
    ("batch", "get"),
    [
        ([X], lambda batch: batch[0]),
        ((X,), lambda batch: batch[0]),
        (Pair(X, 1), lambda batch: batch.image),
        (Sample(X, 1), lambda batch: batch.image),
        ({"image": X}, lambda batch: batch["image"]),
        (OrderedDict(image=X), lambda batch: batch["image"]),
        (defaultdict(None, image=X), lambda batch: batch["image"]),
        ([({"image": X},)], lambda batch: batch[0][0]["image"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pythons_own_containers_are_emptied(batch: Any, get: Callable[[Any], Any]) -> None:
    new = tree.emptied(lambda _: Y, batch)

    assert get(new) is Y
    assert get(batch) is X
    assert type(new) is type(batch)


@pytest.mark.parametrize(
    "batch",
    [Listed([X]), UserDict(image=X), types.MappingProxyType({"image": X}), Store(image=X)],
    ids=lambda value: type(value).__name__,
)
def test_a_container_that_may_check_its_values_is_visited_and_left(batch: Any) -> None:
    visited: list[Any] = []

    new = tree.emptied(visited.append, [batch, Y])

    assert new == [batch, None]
    assert new[0] is batch
    assert visited[0] is X
    assert visited[1] is Y


# -- copied ------------------------------------------------------------------------------------


@given(batches)
def test_a_copy_has_the_same_leaves_in_containers_of_its_own(batch: Any) -> None:
    new = tree.copied(batch)

    assert same(new, batch)
    assert new is not batch or not isinstance(batch, (list, dict)) or not batch


@pytest.mark.parametrize(
    "batch",
    [[1], Listed([1]), {"a": 1}, OrderedDict(a=1), UserDict(a=1), Store(a=1), Sample(1)],
    ids=lambda value: type(value).__name__,
)
def test_a_container_that_is_changed_leaves_its_copy(batch: Any) -> None:
    whole = [(batch,)]
    new = tree.copied(whole)[0][0]

    if isinstance(batch, Sample):
        batch.image = 2
        assert new.image == 1
    else:
        key = next(iter(batch)) if isinstance(batch, Mapping) else 0
        batch[key] = 2
        assert new[key] == 1


def test_an_array_is_copied_and_other_objects_are_not() -> None:
    array, path = np.ones(2), Path("a")

    copied, same_path, dtype = tree.copied([array, path, np.dtype("int8")])
    array[0] = 7

    assert copied.tolist() == [1, 1]
    assert same_path is path
    assert dtype == np.dtype("int8")


def test_a_size_can_be_copied() -> None:
    assert tree.copied([torch.Size([1, 2])]) == [torch.Size([1, 2])]


# -- reachable ---------------------------------------------------------------------------------


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content

    def get(self) -> Any:
        return self.content


class SlottedBox:
    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


def with_loop(content: Any) -> list[Any]:
    loop = [content]
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: [x],
        lambda x: {"a": (x,)},
        lambda x: {x},
        lambda x: frozenset([x]),
        lambda x: deque([x]),
        lambda x: UserDict(a=x),
        lambda x: types.MappingProxyType({"a": x}),
        lambda x: types.SimpleNamespace(a=x),
        lambda x: (item for item in [x]),
        lambda x: iter([x]),
        Box,
        SlottedBox,
        Sample,
        lambda x: lambda: x,
        lambda x: lambda y=x: y,
        lambda x: Box(x).get,  # a method, which has its object
        lambda x: functools.partial(max, x),
        lambda x: Slotted(x, None),
        lambda x: Box(SlottedBox([Box(x)])),
        with_loop,
    ],
)
def test_a_tensor_is_found_wherever_it_hides(wrap: Callable[[Tensor], Any]) -> None:
    found = tree.reachable(wrap(X))

    assert len(found) == 1
    assert found[0] is X


def with_gradient(content: Tensor) -> Tensor:
    leaf = torch.zeros_like(content).requires_grad_()
    leaf.grad = content
    return leaf


def test_a_gradient_is_found() -> None:
    assert any(tensor is X for tensor in tree.reachable(with_gradient(X)))


def test_a_tensor_that_another_one_holds_is_found() -> None:
    outer = torch.ones(1)
    outer.mask = X  # type: ignore[attr-defined]

    assert [id(tensor) for tensor in tree.reachable([outer])] == [id(outer), id(X)]


def test_what_hangs_on_a_function_is_found() -> None:
    def function(*, keyword: Any = X) -> Any:
        return keyword

    function.tensor = Y  # type: ignore[attr-defined]

    assert {id(tensor) for tensor in tree.reachable(function)} == {id(X), id(Y)}


def test_a_tensor_that_is_there_twice_is_found_once() -> None:
    assert len(tree.reachable([X, Box(X), {"a": X}])) == 1


@given(batches)
def test_the_tensors_among_the_leaves_are_found(batch: Any) -> None:
    found = {id(tensor) for tensor in tree.reachable(batch)}

    assert {id(leaf) for leaf in tree.leaves(batch) if isinstance(leaf, Tensor)} <= found


@pytest.mark.parametrize(
    "thing", [None, 3, "text", b"bytes", torch, torch.nn.Linear, Box, len, Box(3), negated]
)
def test_code_is_not_searched(thing: Any) -> None:
    assert tree.reachable([thing, Box(thing)]) == []


# -- part, with_part ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ([X, Y], 0),
        ((X, Y), 0),
        ((Y, X), -1),
        (Pair(X, Y), "image"),
        (Pair(X, Y), 0),
        (Sample(X, Y), "image"),
        (Frozen(X, Y), "image"),
        (Slotted(X, Y), "image"),
        ({"image": X, "label": Y}, "image"),
        ({0: X, 1: Y}, 0),
        ({("a", 1): X}, ("a", 1)),
        (OrderedDict(image=X, label=Y), "image"),
        (UserDict(image=X, label=Y), "image"),
        (types.MappingProxyType({"image": X}), "image"),
        (Listed([X, Y]), 0),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, int)) else repr(value),
)
def test_a_part_is_picked_and_put_into_a_new_container(batch: Any, key: Any) -> None:
    new = tree.with_part(batch, key, "other")

    assert tree.part(batch, key) is X
    assert tree.part(new, key) == "other"
    assert type(new) is type(batch)


def test_other_parts_and_the_key_order_stay() -> None:
    new = tree.with_part({"z": X, "a": Y}, "z", 0)

    assert list(new) == ["z", "a"]
    assert new["a"] is Y


@pytest.mark.parametrize(
    ("batch", "key", "error", "message"),
    [
        ({"image": X}, "label", KeyError, "^'label'$"),
        ([X], 3, IndexError, "^list index out of range$"),
        ((X,), 3, IndexError, "^tuple index out of range$"),
        (Pair(X, Y), "size", AttributeError, "^Pair has no field 'size'$"),
        (Sample(X), "size", AttributeError, "^'Sample' object has no attribute 'size'"),
        ((X,), "image", AttributeError, "^tuple has no field 'image'$"),
    ],
    ids=repr,
)
def test_a_part_that_is_not_there_is_an_error(
    batch: Any, key: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tree.part(batch, key)


def test_a_result_of_torch_has_named_parts() -> None:
    batch = torch.max(X, 0)

    new = tree.with_part(batch, "values", tree.part(batch, "values") * 2)

    assert torch.equal(new.values, X.max(0).values * 2)


def test_a_row_of_a_tensor_is_replaced_in_a_new_tensor() -> None:
    batch = torch.ones(2, 3)

    new = tree.with_part(batch, 0, torch.zeros(3))

    assert torch.equal(new[0], torch.zeros(3))
    assert torch.equal(batch, torch.ones(2, 3))


def test_a_part_of_a_mapping_that_does_not_say_how_to_copy_itself_is_not_written_to() -> None:
    batch = Store(image=X)

    tree.with_part(batch, "image", Y)

    assert batch["image"] is X


# -- describe ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(2, 3, dtype=torch.uint8), "uint8[2, 3]"),
        (torch.tensor(1.0, dtype=torch.bfloat16), "bfloat16[]"),
        (torch.nn.Parameter(torch.zeros(2)), "Parameter float32[2]"),
        ((X, Y), "tuple(float32[2, 3], int64[2])"),
        ([], "list()"),
        (Pair(X, "a"), "Pair(float32[2, 3], str)"),
        (Sample(X), "Sample(image=float32[2, 3], label=NoneType)"),
        ({"image": X, 1: [Y]}, "dict('image': float32[2, 3], 1: list(int64[2]))"),
        (UserDict(a=3), "UserDict('a': int)"),
        (Moves(), "Moves"),
        (None, "NoneType"),
        ([0] * 8, "list(int, int, int, int, int, int, int, int)"),
        ([0] * 10, "list(int, int, int, int, int, int, int, int, ... 2 more)"),
        (PackedSequence(X, Y), "PackedSequence(float32[2, 3], int64[2], NoneType, NoneType)"),
    ],
)
def test_a_batch_is_described_in_a_line(batch: Any, text: str) -> None:
    assert tree.describe(batch) == text


def test_a_field_that_was_never_set_is_described_as_none() -> None:
    @dataclasses.dataclass
    class Late:
        size: Any = dataclasses.field(init=False)

    assert tree.describe(Late()) == "Late(size=NoneType)"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_can_be_described() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)

    assert tree.describe([nested]).startswith("list(")


@dataclasses.dataclass
class Travelling(tree.Parts):
    first: Tensor
    second: Any

    def to(self, _: Any) -> Any:
        raise AssertionError


def test_parts_are_a_container_although_they_have_a_to() -> None:
    pair = Travelling(torch.zeros(1), {"more": torch.ones(1)})
    assert tree.leaves([pair]) == [pair.first, pair.second["more"]]
    out = tree.replace(torch.neg, pair)
    assert isinstance(out, Travelling)
    assert out.second["more"].item() == -1


def test_what_counts_as_whole_is_not_gone_into() -> None:
    pair, other = Travelling(torch.zeros(1), 0), torch.ones(1)
    assert tree.leaves({"pair": [pair], "other": other}, Travelling) == [pair, other]
    assert tree.replace(lambda _: other, pair, Travelling) is other
