"""As much of msgspec as the engine's outputs need inside one process, and the declarations of what goes out of it."""

import dataclasses
from typing import Any

PROVIDES = ("Meta", "Raw", "Struct", "msgpack")


class Struct:
    """Annotated attributes are fields of a data class."""

    __struct_fields__: tuple[str, ...]

    def __init_subclass__(cls, **options: Any) -> None:
        del options
        dataclasses.dataclass(cls)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]


def Meta(**constraints: Any) -> object:
    return constraints


class Raw:
    """Never made here."""


class _Codec:
    def __init__(self, *types: Any) -> None:
        del types

    def encode(self, value: object) -> bytes:
        raise NotImplementedError(f"nothing leaves this process: {value!r}")

    def decode(self, message: bytes) -> Any:
        raise NotImplementedError(f"nothing comes into this process: {message!r}")


class msgpack:  # noqa: N801 - the name of the module that it stands for
    Encoder = Decoder = _Codec
    decode = _Codec().decode
