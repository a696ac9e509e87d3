"""Checks of user-given values that collect every problem before anything is raised."""

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_SHOWN = 60
"""Characters of a bad value that an error message quotes."""
MAX_SHOWN_ITEMS = 8


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: which field, its value as text, and what is allowed."""

    field: str
    value: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.field} is {self.value}; allowed: {self.allowed}"


class InvalidParamsError(ValueError):
    """Parameters that cannot be served; lists all problems.

    Attributes:
        problems: at least one.
        param: the field of the first problem.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)
        self.param = problems[0].field


class Checks:
    """Collects problems. Each check returns the value in its normal form, or the default where it is
    wrong.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def fail(self, field: str, value: Any, allowed: str) -> None:
        self.problems.append(Problem(field, _show(value), allowed))

    def raise_if_any(self) -> None:
        if self.problems:
            raise InvalidParamsError(self.problems)

    def integer(self, field: str, value: Any, low: int, high: int, extra: str = "") -> int:
        """An integer from ``low`` to ``high``; ``extra`` names what else the caller accepts."""
        number = as_integer(value)
        if number is None or not low <= number <= high:
            self.fail(field, value, f"an integer from {low} to {high}{extra}")
            return low
        return number

    def optional_integer(self, field: str, value: Any, low: int, high: int) -> int | None:
        return None if value is None else self.integer(field, value, low, high, ", or None")

    def number(self, field: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
        """A finite number from ``low`` to ``high``; with ``above_low`` without ``low`` itself."""
        number = as_number(value)
        if number is None or not low <= number <= high or (above_low and number == low):
            most = "" if math.isinf(high) else f" and at most {high:g}"
            least = "above" if above_low else "of at least"
            self.fail(field, value, f"a finite number {least} {low:g}{most}")
            return low
        return number

    def flag(self, field: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self.fail(field, value, "True or False")
            return False
        return value

    def sized(self, field: str, value: Any, kind: str, least: int, most: int) -> Sequence[Any]:
        """A list or tuple of ``least`` to ``most`` items; the length is checked before their content."""
        if not isinstance(value, list | tuple | set | frozenset | range):
            self.fail(field, value, f"a list of {kind}")
            return ()
        if not least <= len(value) <= most:
            self.fail(field, value, f"{least} to {most} {kind}")
            return ()
        return tuple(value)

    def token_ids(self, field: str, value: Any, least: int, most: int, low: int = 0) -> tuple[int, ...]:
        """Token ids that fit int32, in order, without repetitions unless ``low`` admits padding."""
        ids: list[int] = []
        for i, item in enumerate(self.sized(field, value, "token ids", least, most)):
            number = as_integer(item)
            if number is None or not low <= number < 2**31:
                self.fail(f"{field}[{i}]", item, f"an integer token id of at least {low}")
                return ()
            ids.append(number)
        return tuple(ids) if low < 0 else tuple(dict.fromkeys(ids))

    def strings(self, field: str, value: Any, most: int, most_chars: int) -> tuple[str, ...]:
        """Non-empty strings of bounded length; one string stands for a list of one, None for none."""
        given = () if value is None else (value,) if isinstance(value, str) else value
        items = self.sized(field, given, "strings", 0, most)
        for i, item in enumerate(items):
            if not isinstance(item, str) or not 0 < len(item) <= most_chars:
                self.fail(f"{field}[{i}]", item, f"a string of 1 to {most_chars} characters")
                return ()
        return tuple(dict.fromkeys(items))


def as_integer(value: Any) -> int | None:
    """The int that a value stands for (NumPy integers included), or None; True and 1.0 are not integers."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> float | None:
    """The finite float that a value stands for, or None; neither True nor text is a number."""
    if isinstance(value, bool | str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _show(value: Any) -> str:
    """A bounded description of a value, without work in proportion to its size."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f"a string of {len(value)} characters"
    if isinstance(value, list | tuple | Mapping | set | frozenset | range) and len(value) > MAX_SHOWN_ITEMS:
        return f"a {type(value).__name__} of {len(value)} items"
    text = reprlib.repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
