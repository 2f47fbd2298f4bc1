"""Nested batches: visit every tensor, rebuild any container.

`replace(visit, batch)` calls `visit` on each leaf, in order, and rebuilds only the containers in
which a leaf changed. What a node is, in the order in which it is asked:

    a tensor                      leaf
    an object with its own .to    leaf (PackedSequence, BatchEncoding, TensorDict, ...), but `Parts`
    a tuple, a namedtuple         its class, over new items
    a dataclass instance          a shallow copy, fields set
    a mapping                     its class, its key order, over new values
    a list                        its class, over new items
    anything else                 untouched
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Parts",
    "copied",
    "describe",
    "emptied",
    "leaves",
    "part",
    "reachable",
    "replace",
    "with_part",
]

Visit: TypeAlias = Callable[[Any], Any]


class Parts:
    """The base of dataclasses that have a `.to` and yet are containers.

    Their tensors travel as those of any container do, several batches ahead; a leaf with a `.to`
    of its own would be moved by it, at hand-over, and transforms would wait for that.
    """


def replace(visit: Visit, batch: Any, whole: type | tuple[()] = ()) -> Any:
    """`batch` with `visit(leaf)` for each leaf, in a fixed order.

    Containers whose leaves all stay the same objects stay the same objects themselves; no container
    of the source's is ever written to. Those of the class `whole` count as leaves.
    """
    if isinstance(batch, whole):
        return visit(batch)
    return _walk(lambda child: replace(visit, child, whole), visit, batch)


def emptied(visit: Visit, batch: Any) -> Any:
    """As `replace`, for placeholders that a container of the user's need not accept.

    Containers of Python's own classes get what `visit` returns. Others, which may check what they
    are given, are visited and stay as they are. The leaves' order is that of `replace`.
    """
    kind: Any = type(batch)
    if not _may_refuse(kind):
        return _walk(functools.partial(emptied, visit), visit, batch)
    for leaf in leaves(batch):
        visit(leaf)
    return batch


def copied(batch: Any) -> Any:
    """`batch` in containers of its own, with the same leaves; NumPy arrays are copied too."""
    kind: Any = type(batch)
    form = _form(kind)
    if form is not None:
        return form.build(batch, [copied(child) for child in form.children(batch)])
    return batch.copy() if kind.__module__ == "numpy" and hasattr(batch, "copy") else batch


def leaves(batch: Any, whole: type | tuple[()] = ()) -> list[Any]:
    """Tensors and objects with their own `.to` in `batch`, in the order of `replace`."""
    kind: Any = type(batch)
    if isinstance(batch, whole) or _is_leaf(kind):
        return [batch]
    form = _form(kind)
    children = [] if form is None else form.children(batch)
    if _PLAIN.issuperset(map(type, children)):  # thousands of token ids, say
        return []
    return [leaf for child in children for leaf in leaves(child, whole)]


def _walk(walk: Visit, visit: Visit, node: Any) -> Any:
    kind: Any = type(node)
    if _is_leaf(kind):
        return visit(node)
    form = _form(kind)
    if form is None:
        return node
    old = form.children(node)
    if _PLAIN.issuperset(map(type, old)):  # thousands of token ids, say
        return node
    new = [walk(child) for child in old]
    if all(child is same for child, same in zip(new, old, strict=True)):
        return node
    return form.build(node, new)


_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None)})
"""Classes of objects in which no tensor can be."""


class _Form(NamedTuple):
    """How a class of containers is taken apart and put together."""

    children: Callable[[Any], list[Any]]
    build: Callable[[Any, list[Any]], Any]


@functools.cache
def _is_leaf(kind: Any) -> bool:
    if issubclass(kind, Tensor):
        return True
    return callable(getattr(kind, "to", None)) and not issubclass(kind, Parts)


@functools.cache
def _form(kind: Any) -> _Form | None:
    """None for what is no container."""
    if _is_leaf(kind):
        return None
    if issubclass(kind, tuple):
        return _Form(list, _tuple)
    if dataclasses.is_dataclass(kind):
        return _Form(lambda old: list(_fields(old).values()), _dataclass)
    if issubclass(kind, Mapping):
        return _Form(lambda old: list(old.values()), _mapping)
    return _Form(list, _list) if issubclass(kind, list) else None


@functools.cache
def _may_refuse(kind: Any) -> bool:
    """Whether a container's own code sees what is put into it."""
    if _is_leaf(kind) or kind in (dict, OrderedDict, defaultdict, list):
        return False
    return issubclass(kind, (Mapping, list))


def _tuple(old: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if isinstance(old, torch.Size) or hasattr(old, "n_sequence_fields"):  # torch's, written in C
        made: Any = type(old)
        return made(items)  # type: ignore[no-any-return]
    new = tuple.__new__(type(old), items)  # whatever arguments its class takes
    if hasattr(old, "__dict__"):
        vars(new).update(vars(old))
    return new


def _list(old: list[Any], items: list[Any]) -> list[Any]:
    if type(old) is list:
        return items
    new = copy.copy(old)  # keeps what a subclass keeps beside its items
    new[:] = items
    return new


def _mapping(old: Mapping[Any, Any], items: list[Any]) -> Mapping[Any, Any]:
    return _with_values(old, dict(zip(old, items, strict=True)))


def _with_values(old: Mapping[Any, Any], values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    if type(old) is dict:
        return values
    if not isinstance(old, MutableMapping):
        made: Any = type(old)  # MappingProxyType, frozendict, ...
        return made(values)  # type: ignore[no-any-return]
    new = _copy_of(old)
    for key, value in values.items():
        new[key] = value
    return new


def _copy_of(old: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """A copy with the same values that shares no store with `old`.

    It keeps default factories, attributes, unusual constructors.
    """
    if isinstance(old, dict) or hasattr(old, "__copy__"):
        return copy.copy(old)
    # A plain copy would share the dict within it. A deep one does not, and leaves alone what it is
    # told that it has copied already.
    return copy.deepcopy(old, {id(value): value for value in old.values()})


def _fields(old: Any) -> dict[str, Any]:
    """A dataclass's fields, and its items if it is a mapping too, as some models' outputs are."""
    # A field with init=False may never have been set.
    names = [field.name for field in dataclasses.fields(old) if hasattr(old, field.name)]
    items = dict(old.items()) if isinstance(old, Mapping) else {}
    return items | {name: getattr(old, name) for name in names}


def _dataclass(old: Any, items: list[Any]) -> Any:
    return _with_fields(old, dict(zip(_fields(old), items, strict=True)))


def _with_fields(old: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(old, MutableMapping):
        new: Any = _with_values(old, {key: values[key] for key in old if key in values})
    else:
        kind: Any = type(old)
        new = kind.__new__(kind)
        for name in _attributes(old):
            object.__setattr__(new, name, getattr(old, name))
    for name, value in values.items():
        if hasattr(old, name):
            object.__setattr__(new, name, value)  # frozen ones too
    return new


def _attributes(thing: Any) -> list[str]:
    """What is set on an object, in its `__dict__` or its slots."""
    slots = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ())]
    names = [*getattr(thing, "__dict__", ()), *slots]
    hidden = ("__dict__", "__weakref__")
    return [name for name in names if name not in hidden and hasattr(thing, name)]


def reachable(thing: Any) -> list[Tensor]:
    """Every tensor within `thing`, in containers and objects of whatever kind.

    Found as the garbage collector finds what an object refers to, so nothing is copied, and no
    class has to help. What keeps its references to itself is not seen (a NumPy array of objects, a
    class written in C that does not take part in collection), nor what the methods of a class hold.
    """
    found: list[Tensor] = []
    seen: set[int] = set()
    rest = [thing]
    while rest:
        node = rest.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Tensor):
            found.append(node)
        rest += [other for other in _referents(node) if type(other) not in _PLAIN]
    return found


def _referents(node: Any) -> list[Any]:
    """What an object refers to; of code only what it holds, since it leads to everything."""
    if isinstance(node, Tensor):
        return [*vars(node).values(), node.grad if node.is_leaf else None]
    if isinstance(node, (type, types.ModuleType)):
        return []
    if isinstance(node, types.FunctionType):
        return [node.__closure__, node.__defaults__, node.__kwdefaults__, vars(node)]
    return gc.get_referents(node)


def part(batch: Any, key: Any) -> Any:
    """What `key` picks from `batch`: a mapping's key, a field's name, or an index.

    Raises:
        KeyError: A mapping has no such key. (A field or an index that is missing raises its own.)
    """
    if isinstance(batch, tuple):
        return batch[_place(batch, key)]
    if isinstance(batch, Mapping):
        if key not in batch:  # a defaultdict would make one
            raise KeyError(key)
        return batch[key]
    return getattr(batch, key) if dataclasses.is_dataclass(batch) else batch[key]


def with_part(batch: Any, key: Any, value: Any) -> Any:
    """`batch` with another value under `key`; the given batch is not written to."""
    if isinstance(batch, tuple):
        items = list(batch)
        items[_place(batch, key)] = value
        return _tuple(batch, items)
    if dataclasses.is_dataclass(batch):
        return _with_fields(batch, {key: value})
    if isinstance(batch, Mapping):
        return _with_values(batch, {**batch, key: value})
    new = batch.clone() if isinstance(batch, Tensor) else copy.copy(batch)
    new[key] = value
    return new


def _place(batch: tuple[Any, ...], key: Any) -> Any:
    """The index of a namedtuple's field; any other key is one already.

    Raises:
        AttributeError: It has no such field.
    """
    if not isinstance(key, str):
        return key
    names: Any = getattr(batch, "_fields", None) or getattr(batch, "__match_args__", ())
    if key not in names:
        raise AttributeError(f"{type(batch).__name__} has no field {key!r}")
    return tuple(names).index(key)


def describe(batch: Any) -> str:
    """A batch's structure in a line: `tuple(uint8[256, 3, 224, 224], int64[256])`."""
    if isinstance(batch, Tensor):
        name = "" if type(batch) is Tensor else f"{type(batch).__name__} "
        shape = "[nested]" if batch.is_nested else list(batch.shape)
        return f"{name}{str(batch.dtype).removeprefix('torch.')}{shape}"
    name = type(batch).__name__
    if isinstance(batch, Mapping):
        parts = [f"{key!r}: {describe(value)}" for key, value in batch.items()]
    elif dataclasses.is_dataclass(batch):
        fields = dataclasses.fields(batch)
        parts = [f"{f.name}={describe(getattr(batch, f.name, None))}" for f in fields]
    elif isinstance(batch, (list, tuple)):
        parts = [describe(item) for item in batch]
    else:
        return name
    shown = parts if len(parts) <= 8 else [*parts[:8], f"... {len(parts) - 8} more"]
    return f"{name}({', '.join(shown)})"
