"""As much of msgspec as the engine's outputs need inside one process."""

import dataclasses
from typing import Any

PROVIDES = ("Struct",)


class Struct:
    """Annotated attributes are fields of a data class."""

    def __init_subclass__(cls, **options: Any) -> None:
        del options
        dataclasses.dataclass(cls)
