"""What ``jaxinfer serve`` makes of the arguments of a container."""

from typing import Any

import typer
from click.core import Command

from serve.cli import app
from serve.overrides import parse_overrides


def serve_options(arguments: list[str]) -> dict[str, Any]:
    """Options by name. Fails if an argument is neither an option nor a configuration value."""
    group = typer.main.get_command(app)
    command: Command = group.commands[arguments[0]]  # type: ignore[attr-defined]
    assert command.name == "serve"
    context = command.make_context("serve", list(arguments[1:]))
    parse_overrides(context.args)
    return context.params
