"""Configuration values on the command line."""

from typing import Any

import yaml

from jaxinfer.config_values import ConfigError


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """Configuration values from ``--scope.key value`` or ``--scope.key=value``; values are YAML scalars.

    Raises:
        ConfigError: an argument has another form.
    """
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or "." not in name or (not equals and not rest):
            raise ConfigError(f"argument {name!r} is not known; overrides look like --cache.num-blocks 512")
        text = value if equals else rest.pop(0)
        values[name.removeprefix("--").replace("-", "_")] = yaml.safe_load(text)
    return values
