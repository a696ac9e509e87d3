"""As much of pydantic as a configuration made in code needs: fields with defaults. Nothing is validated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

PROVIDES = (
    "AfterValidator",
    "BaseModel",
    "BeforeValidator",
    "ConfigDict",
    "Field",
    "ValidationError",
    "field_validator",
    "model_validator",
)

_REQUIRED = object()
ConfigDict = dict


class ValidationError(ValueError):
    """Never raised here."""


@dataclass(frozen=True)
class _FieldInfo:
    default: Any


def Field(*, default: Any = _REQUIRED, **constraints: Any) -> Any:
    del constraints
    return _FieldInfo(default)


def AfterValidator(function: Callable[[Any], Any]) -> Any:
    return function


def BeforeValidator(function: Callable[[Any], Any]) -> Any:
    return function


def field_validator(*fields: str, **options: Any) -> Callable[[Any], Any]:
    del fields, options
    return lambda method: method


def model_validator(**options: Any) -> Callable[[Any], Any]:
    del options
    return lambda method: method


class BaseModel:
    """Annotated attributes are fields."""

    def __init__(self, **values: Any) -> None:
        for name in self._fields():
            value = values.pop(name, getattr(type(self), name, _REQUIRED))
            value = value.default if isinstance(value, _FieldInfo) else value
            if value is _REQUIRED:
                raise TypeError(f"{type(self).__name__} needs {name}")
            self.__dict__[name] = value
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    @classmethod
    def _fields(cls) -> list[str]:
        return [
            name
            for part in reversed(cls.__mro__)
            for name in vars(part).get("__annotations__", {})
            if name != "model_config"
        ]

    def model_copy(self, *, update: dict[str, Any]) -> Self:
        return type(self)(**{**self.__dict__, **update})
