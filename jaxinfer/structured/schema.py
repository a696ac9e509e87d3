"""What llguidance's reading of JSON schemas needs to be helped with."""

import json
from typing import Any

LARGEST = 2**63 - 1024
"""The largest integer below 2**63 that a double holds."""

MAX_PROPERTIES = 1000
"""Of one object; the time to compile grows with its square."""


class SchemaError(ValueError):
    """A schema that cannot be served."""


def prepare_schema(text: str) -> str:
    """The schema that is compiled. llguidance holds numbers as doubles and integer bounds in 64 bits; what would be
    rounded is refused, and a range that is open above a large bound is closed.

    Raises:
        SchemaError: says why.
    """
    schema = json.loads(text)
    if schema is False:
        raise SchemaError("no text satisfies it")
    if schema is True:
        return "{}"
    return json.dumps(_prepare(schema), ensure_ascii=False)


def _prepare(value: Any) -> Any:
    if isinstance(value, list):
        return [_prepare(item) for item in value]
    if isinstance(value, dict):
        properties = value.get("properties")
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            raise SchemaError(
                f"an object has {len(properties)} properties; allowed: at most {MAX_PROPERTIES}"
            )
        return _close_range({key: _prepare(item) for key, item in value.items()})
    if isinstance(value, int) and not _is_exact(value):
        raise SchemaError(f"the number {value} has more digits than a double holds")
    return value


def _close_range(schema: dict[str, Any]) -> dict[str, Any]:
    low = [schema[key] for key in ("minimum", "exclusiveMinimum") if _is_integer(schema.get(key))]
    high = [schema[key] for key in ("maximum", "exclusiveMaximum") if _is_integer(schema.get(key))]
    if (low and max(low) > LARGEST) or (high and min(high) < -LARGEST):
        raise SchemaError("integer bounds beyond 64 bits are not supported")
    if schema.get("type") == "integer" and low and max(low) >= 10**18 and not high:
        return {**schema, "maximum": LARGEST}
    if schema.get("type") == "integer" and high and min(high) <= -(10**18) and not low:
        return {**schema, "minimum": -LARGEST}
    return schema


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_exact(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False
