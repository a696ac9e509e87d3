"""Opens a model on disk, whatever its format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.fp8_blocks import BlockScaledSource, fp8_block_size
from jaxinfer.checkpoints.gguf_config import gguf_config
from jaxinfer.checkpoints.gguf_metadata import GGUFHeader, read_gguf_header
from jaxinfer.checkpoints.gguf_source import GGUFSource, split_files
from jaxinfer.checkpoints.orbax_format import PARAMS_DIR, OrbaxSource, identity_map
from jaxinfer.checkpoints.safetensors_source import SafetensorsSource, find_safetensors, normalize_name
from jaxinfer.checkpoints.tensor_source import TensorSource
from jaxinfer.checkpoints.weight_map import WeightMap

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class ModelFiles:
    """An opened model; no weight has been read yet.

    Attributes:
        path: directory or file it was opened from.
        kind: format of the weights.
        config: Hugging Face style configuration; its ``eos_token_id`` (and that of a ``text_config``) lists
            the end tokens of both the model's and the generation configuration.
        generation_config: Hugging Face style; empty if there is none.
        tokenizer_path: the directory with the tokenizer's files, or the GGUF file that contains it.
    """

    path: Path
    kind: Literal["safetensors", "gguf", "orbax"]
    config: dict[str, Any]
    source: TensorSource
    generation_config: dict[str, Any]
    tokenizer_path: Path

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files of the tokenizer that can be copied; none for a GGUF model."""
        if self.tokenizer_path.is_file():
            return ()
        return tuple(file for name in _TOKENIZER_FILES if (file := self.tokenizer_path / name).is_file())

    def weight_map(self, hugging_face: WeightMap) -> WeightMap:
        """The map to load with: the family's map under the names of ``source``.

        These are a text model's names, also where ``hugging_face`` has those of a multimodal wrapper; in our
        own format every parameter has its path for a name.
        """
        if self.kind == "orbax":
            return identity_map(hugging_face)
        return {
            path: replace(origin, parts=tuple(tuple(map(normalize_name, part)) for part in origin.parts))
            for path, origin in hugging_face.items()
        }


def open_model(path: Path) -> ModelFiles:
    """Opens a model directory (safetensors, our own format, or one GGUF file) or a GGUF file.

    Reads headers and JSON files only.

    Raises:
        CheckpointError: nothing that can be read, or something malformed; the message names the file.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: a model is a directory or a .gguf file")
        return _open_gguf(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or directory")
    if (path / PARAMS_DIR).is_dir():
        return _open_directory(path, "orbax", OrbaxSource(path))
    weights = find_safetensors(path)
    if weights is not None:
        return _open_directory(path, "safetensors", SafetensorsSource(weights))
    return _open_gguf(_only_gguf(path))


def _only_gguf(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    first = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(first) == 1:
        return first[0]
    if first:
        raise CheckpointError(
            f"{directory}: {len(first)} GGUF models; name one: {[file.name for file in first]}"
        )
    other = (
        sorted(file.name for file in directory.glob("*.bin"))
        or sorted(p.name for p in directory.iterdir())[:10]
    )
    raise CheckpointError(
        f"{directory}: no weights: looked for *.safetensors, *.gguf, {PARAMS_DIR}/; it holds {other}"
    )


def _open_directory(path: Path, kind: Literal["safetensors", "orbax"], source: TensorSource) -> ModelFiles:
    config = read_json(path / "config.json")
    block = fp8_block_size(config) if kind == "safetensors" else None
    if block is not None:
        source = BlockScaledSource(source, block)
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return ModelFiles(path, kind, _with_end_tokens(config, generation, path), source, generation, path)


def _open_gguf(path: Path) -> ModelFiles:
    header = read_gguf_header(path)
    source = GGUFSource(path, header)
    config = gguf_config(path, header, _tensor_names(path, header))
    return ModelFiles(path, "gguf", config, source, {}, path)


def _tensor_names(path: Path, header: GGUFHeader) -> frozenset[str]:
    headers = [header if file == path else read_gguf_header(file) for file in split_files(path, header)]
    return frozenset(tensor.name for part in headers for tensor in part.tensors)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, which names the file, if there is none."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, not {type(value).__name__}")
    return value


def _with_end_tokens(config: dict[str, Any], generation: Mapping[str, Any], path: Path) -> dict[str, Any]:
    nested = config.get("text_config")
    nested = nested if isinstance(nested, dict) else {}
    ids: list[int] = []
    for values in (config, nested, generation):
        found = values.get("eos_token_id")
        listed = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(token_id) is int and token_id >= 0 for token_id in listed):
            raise CheckpointError(f"{path}: eos_token_id {found!r} is not a token id or a list of them")
        ids += listed
    merged = {"eos_token_id": list(dict.fromkeys(ids))}
    result = {**config, **merged}
    if nested:
        result["text_config"] = {**nested, **merged}
    return result
