"""The sandboxed Jinja environment in which chat templates run.

Models' templates rely on a few helpers that ``transformers`` defined first: ``raise_exception``,
``strftime_now``, a ``tojson`` that keeps characters as they are, loop controls, and a ``generation`` block.
Templates come with the model, so they are untrusted code: the sandbox keeps them from everything but the data
they are given.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the assistant said, for training; here it is its
    body.
    """

    tags = {"generation"}  # noqa: RUF012 (the declaration that Jinja asks for)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def template_environment(now: Callable[[], datetime] = datetime.now) -> ImmutableSandboxedEnvironment:
    """An environment for chat templates. ``now`` is the clock behind ``strftime_now``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment
