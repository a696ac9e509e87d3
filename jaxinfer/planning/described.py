"""Which model is planned for: one of the known ones, or any whose configuration can be read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.fp8_blocks import fp8_block_size
from jaxinfer.checkpoints.model_files import open_model, read_json
from jaxinfer.checkpoints.references import resolve_reference
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.registry import parse_config

WeightFormat = Literal["bf16", "fp8", "int4"]
_HUB = "hf:"


@dataclass(frozen=True)
class Described:
    """A model without its weights.

    Attributes:
        source: where its numbers come from.
        published: how its weights are published.
    """

    name: str
    source: str
    config: TransformerConfig
    published: WeightFormat


def known_models() -> Mapping[str, Mapping[str, Any]]:
    """``models.json``: configurations with their sources, by name."""
    return json.loads((Path(__file__).parent / "models.json").read_text())


def describe(reference: str) -> Described:
    """The model of a name in ``models.json``, or of a reference as in ``model.reference``.

    Of a directory only ``config.json`` is read, so it needs no weights; of ``hf:ORG/NAME`` only that is downloaded.

    Raises:
        CheckpointError: the configuration cannot be found or read.
        ValueError: it is not supported.
    """
    known = known_models()
    if reference in known:
        entry = known[reference]
        return Described(reference, entry["source"], parse_config(entry["config"]), entry["weights"])
    try:
        hf, source = _read(reference)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Known without a file: {', '.join(known)}") from error
    published: WeightFormat = "bf16" if fp8_block_size(hf) is None else "fp8"
    return Described(reference, source, parse_config(hf), published)


def _read(reference: str) -> tuple[dict[str, Any], str]:
    if reference.startswith(_HUB) and not reference.endswith(".gguf"):
        path = _hub_config(reference)
    else:
        found = resolve_reference(reference)
        path = found / "config.json"
        if not path.is_file():
            return open_model(found).config, str(found)
    return read_json(path), str(path)


def _hub_config(reference: str) -> Path:
    name, _, revision = reference.removeprefix(_HUB).partition("@")
    # Imported here: slow, and most calls do not need it.
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json", revision=revision or None))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{reference!r}: config.json cannot be downloaded: {error}") from error
