"""As much of ``flax.nnx`` as the decoder models use: modules are trees whose leaves are parameters."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax

PROVIDES = ("nnx",)

_Key = tuple[str | int, ...]


class Param:
    """A parameter: an array, or its shape."""

    def __init__(self, value: Any, **metadata: Any) -> None:
        self._value = value
        self._metadata = metadata

    def get_value(self) -> Any:
        return self._value

    def set_value(self, value: Any) -> None:
        self._value = value

    def get_metadata(self) -> dict[str, Any]:
        return self._metadata

    def __getitem__(self, index: Any) -> Any:
        return self._value[index]


class Module:
    """Its attributes are modules, parameters, or static data."""


class List(Module):
    """A list of modules."""

    def __init__(self, items: Iterable[Any]) -> None:
        for index, item in enumerate(items):
            setattr(self, str(index), item)

    def __getitem__(self, index: int) -> Any:
        return vars(self)[str(index)]

    def __len__(self) -> int:
        return len(vars(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).values())


@dataclass(frozen=True)
class GraphDef:
    """A module without its parameters; hashable.

    Attributes:
        attributes: name, and a ``GraphDef``, ``Param`` for a parameter's place, or static data.
    """

    kind: type
    attributes: tuple[tuple[str, Any], ...]


def _described(module: Module, path: _Key, state: dict[_Key, Param]) -> GraphDef:
    attributes: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if isinstance(value, Param):
            state[(*path, name)] = value
            attributes.append((name, Param))
        elif isinstance(value, Module):
            attributes.append((name, _described(value, (*path, name), state)))
        else:
            attributes.append((name, value))
    return GraphDef(type(module), tuple(attributes))


def split(module: Module) -> tuple[GraphDef, dict[_Key, Param]]:
    """The structure, and the parameters by path."""
    state: dict[_Key, Param] = {}
    return _described(module, (), state), state


def merge(graphdef: GraphDef, state: dict[_Key, Any]) -> Any:
    """A module of this structure; values of ``state`` are arrays."""
    return _made(graphdef, (), state)


def _made(graphdef: GraphDef, path: _Key, state: dict[_Key, Any]) -> Any:
    module: Any = object.__new__(graphdef.kind)
    for name, value in graphdef.attributes:
        if value is Param:
            value = Param(state[(*path, name)])
        elif isinstance(value, GraphDef):
            value = _made(value, (*path, name), state)
        setattr(module, name, value)
    return module


def to_flat_state(state: dict[_Key, Param]) -> list[tuple[_Key, Param]]:
    return list(state.items())


def from_flat_state(flat: Iterable[tuple[_Key, Any]]) -> dict[_Key, Any]:
    return dict(flat)


def eval_shape(build: Callable[[], Module]) -> Module:
    """The module that ``build`` makes, with shapes for parameters; nothing is allocated."""
    made: list[Module] = []

    def values() -> list[jax.Array]:
        made.append(build())
        return [param.get_value() for param in split(made[0])[1].values()]

    shapes = jax.eval_shape(values)
    for param, shape in zip(split(made[0])[1].values(), shapes):
        param.set_value(shape)
    return made[0]


nnx = SimpleNamespace(
    GraphDef=GraphDef,
    List=List,
    Module=Module,
    Param=Param,
    eval_shape=eval_shape,
    from_flat_state=from_flat_state,
    merge=merge,
    split=split,
    to_flat_state=to_flat_state,
)
