"""Techniques from text, and the tables of what each of them is worth."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

from jaxinfer.planning.load import Techniques

_FIELDS = tuple(field.name for field in fields(Techniques))
_EXAMPLE = "'weights=fp8, cache=fp8, prefix_hits=0.5, drafts=3, accepted=2.2, disaggregated=yes'"
_TOGETHER = {"accepted": "drafts"}
"""Fields that are one technique with another one."""


def parse_techniques(text: str) -> Techniques:
    """Techniques from text like "weights=fp8, prefix_hits=0.5"; what is not named is as in ``Techniques``.

    Raises:
        ValueError: names what is wrong and what is allowed.
    """
    hints, values = get_type_hints(Techniques), {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in _FIELDS:
            raise ValueError(f"unknown technique {name!r}; allowed: {', '.join(_FIELDS)}, as in {_EXAMPLE}")
        values[name] = _value(name, value.lower(), hints[name])
    return Techniques(**values)


def _value(name: str, text: str, kind: Any) -> Any:
    allowed = ("yes", "no") if kind is bool else get_args(kind)
    if allowed and text not in allowed:
        raise ValueError(f"technique {name}: {text!r} is not allowed; allowed: {', '.join(allowed)}")
    if kind is bool:
        return text == "yes"
    try:
        return text if allowed else kind(text)
    except ValueError:
        raise ValueError(f"technique {name}: {text!r} is not a number; it looks like {_EXAMPLE}") from None


def variations(techniques: Techniques, without: Techniques) -> Iterator[tuple[str, Techniques]]:
    """What to compare: nothing, each technique alone, all together, and all but each.

    Args:
        without: what "nothing" is.
    """
    different = [
        name
        for name in _FIELDS
        if getattr(techniques, name) != getattr(without, name) and name not in _TOGETHER
    ]

    def change(base: Techniques, origin: Techniques, name: str) -> Techniques:
        names = [name, *(other for other, main in _TOGETHER.items() if main == name)]
        return replace(base, **{n: getattr(origin, n) for n in names})

    yield "none", without
    for name in different:
        # Pools of their own go with continuous batching only, here and below.
        base = replace(without, batching="continuous") if name == "disaggregated" else without
        yield _label(name, techniques), change(base, techniques, name)
    yield "all", techniques
    for name in different:
        base = replace(techniques, disaggregated=False) if name == "batching" else techniques
        yield f"all but {_label(name, techniques)}", change(base, without, name)


def _label(name: str, techniques: Techniques) -> str:
    match name:
        case "weights":
            return f"{techniques.weights} weights"
        case "cache":
            return f"{techniques.cache} KV cache"
        case "batching":
            return f"{techniques.batching} batching"
        case "prefix_hits":
            return f"prefix sharing, {techniques.prefix_hits:.0%} hits"
        case "drafts":
            return f"speculation, {techniques.accepted:g} tokens a step of {techniques.drafts} drafts"
    return "disaggregation"
