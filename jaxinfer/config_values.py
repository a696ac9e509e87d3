"""Values of a configuration: from YAML, environment and dotted paths to validated scopes, with all problems at once."""

import difflib
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

ENVIRONMENT_PREFIX = "JAXINFER_"


class ConfigError(ValueError):
    """The configuration is wrong; the message lists every problem with its path."""


def parse_bytes(value: Any) -> Any:
    """Turns "512MiB", "2GB" or "1.5 GiB" into a number of bytes; other values pass through."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write for example 512MiB or 2GB")
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class Scope(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


ScopesT = TypeVar("ScopesT", bound=Scope)


def validated(cls: type[ScopesT], tree: Mapping[str, Any], source: Any, problems: Seq[str] = ()) -> ScopesT:
    """A configuration made of scopes.

    Args:
        tree: values by scope.
        source: named in the error.
        problems: found before; reported with the others.

    Raises:
        ConfigError: lists every problem; an unknown key names the nearest known one.
    """
    found = [*problems, *_unknown_keys(cls, tree)]
    try:
        config = cls.model_validate(tree)
    except ValidationError as error:
        found += [_describe(e) for e in error.errors() if e["type"] != "extra_forbidden"]
        raise ConfigError(_report(found, source)) from None
    if found:
        raise ConfigError(_report(found, source))
    return config


def _scopes(cls: type[Scope]) -> dict[str, type[Scope]]:
    return {
        name: field.annotation
        for name, field in cls.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Scope)
    }


def read_yaml(path: Path, cls: type[Scope]) -> dict[str, Any]:
    """The values in a file, by scope of ``cls``. Raises ConfigError if there is no such file, or no mapping in it."""
    return read_mapping(path, f" with the scopes {', '.join(_scopes(cls))}")


def read_mapping(path: Path, of: str = "") -> dict[str, Any]:
    """The mapping in a file; ``of`` says in the error what it should be."""
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration file {path} must hold a mapping{of}")
    return tree


def from_environment(environment: Mapping[str, str], cls: type[Scope], problems: list[str]) -> dict[str, Any]:
    """Values of variables like ``JAXINFER_CACHE__NUM_BLOCKS``, by scope."""
    tree: dict[str, Any] = {}
    for name, text in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                problems.append(f"{name}: {text[:80]!r} is not a YAML value")
                continue
            merge(tree, nest(key, value, cls, problems))
    return tree


def nest(key: str, value: Any, cls: type[Scope], problems: list[str]) -> dict[str, Any]:
    """A value by scope, from a dotted path, the name of a scope, or a bare field name."""
    if "." in key:
        scope, field = key.split(".", 1)
        return {scope: {field: value}}
    if key in _scopes(cls):
        return {key: {"reference": value} if key == "model" and isinstance(value, str) else value}
    for scope, model in _scopes(cls).items():
        if key in model.model_fields:
            return {scope: {key: value}}
    known = [field for model in _scopes(cls).values() for field in model.model_fields]
    problems.append(f"{key}: unknown key{_nearest(key, known)}")
    return {}


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Puts values by scope over those of a tree."""
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            tree[key] = {**tree[key], **value}
        else:
            tree[key] = value


def _unknown_keys(cls: type[Scope], tree: Mapping[str, Any], path: str = "") -> list[str]:
    problems = []
    for key, value in tree.items():
        if key not in cls.model_fields:
            kind, known = ("key", list(cls.model_fields)) if path else ("scope", list(_scopes(cls)))
            problems.append(f"{path}{key}: unknown {kind}{_nearest(str(key), known)}")
            continue
        for place, scope, below in _scopes_below(cls.model_fields[key].annotation, value):
            problems += _unknown_keys(scope, below, f"{path}{key}{place}.")
    return problems


def _scopes_below(annotation: Any, value: Any) -> Iterator[tuple[str, type[Scope], Mapping[str, Any]]]:
    """The mappings within a value that stand for scopes: itself, or the items of a list; with their place in it."""
    items = [("", annotation, value)]
    if get_origin(annotation) is tuple and isinstance(value, list | tuple):
        items = [(f".{i}", get_args(annotation)[0], item) for i, item in enumerate(value)]
    for place, kind, item in items:
        if isinstance(kind, type) and issubclass(kind, Scope) and isinstance(item, Mapping):
            yield place, kind, item


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _describe(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    given = "" if error["type"] == "missing" else f" (given: {str(error['input'])[:80]})"
    return f"{path}: {error['msg'].removeprefix('Value error, ')}{given}"


def _report(problems: list[str], source: Any) -> str:
    name = "configuration" if isinstance(source, Scope) else f"configuration {source}"
    return f"{name} is wrong:\n" + "\n".join(f"  {p}" for p in problems)
