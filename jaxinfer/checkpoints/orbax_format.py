"""Our own checkpoints: the parameters of a model under their paths, written with Orbax.

A directory holds ``params/`` (Orbax), ``config.json``, ``generation_config.json`` if there is one, and the
tokenizer's files, and can be given as a model like any other. Parameters are stored as the model has them
(projections merged, experts stacked), so loading neither joins nor dequantizes.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.tensor_source import TensorInfo, rows_per_chunk
from jaxinfer.checkpoints.weight_map import WeightMap, tensor

PARAMS_DIR = "params"
_CONFIG, _GENERATION = "config.json", "generation_config.json"


def save_checkpoint(
    directory: Path,
    params: Mapping[str, jax.Array],
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_files: Iterable[Path] = (),
) -> None:
    """Writes a checkpoint that can be used as a model reference.

    Args:
        directory: created; must not exist, or be empty.
        params: arrays by path, sharded or not.
        config: Hugging Face style configuration, as ``ModelFiles.config`` has it.
        tokenizer_files: copied beside the weights (``ModelFiles.tokenizer_files``). A GGUF file cannot be
            among them, since the directory would then hold two sets of weights.

    Raises:
        CheckpointError: the directory is not empty, or a tokenizer file does not exist or is a GGUF file.
    """
    files = list(tokenizer_files)
    for file in files:
        if file.suffix == ".gguf" or not file.is_file():
            raise CheckpointError(f"{file}: not a tokenizer file that can be copied to {directory}")
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory}: not empty; a checkpoint is written to a new directory")
    import orbax.checkpoint as ocp  # 1 s, and only our own checkpoints need it

    directory.mkdir(parents=True, exist_ok=True)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((directory / PARAMS_DIR).absolute(), dict(params))
    (directory / _CONFIG).write_text(json.dumps(dict(config), indent=2))
    if generation_config:
        (directory / _GENERATION).write_text(json.dumps(dict(generation_config), indent=2))
    for file in files:
        shutil.copyfile(file, directory / file.name)


def identity_map(paths: Iterable[str]) -> WeightMap:
    """The weight map of our own checkpoints: every parameter is one tensor of the same name."""
    return {path: tensor(path) for path in paths}


class OrbaxSource:
    """``TensorSource`` over ``params/`` of our own checkpoint; names are parameter paths."""

    def __init__(self, directory: Path) -> None:
        import orbax.checkpoint as ocp

        self._path = (directory / PARAMS_DIR).absolute()
        self._checkpointer = ocp.PyTreeCheckpointer()
        self._restore_type = ocp.RestoreArgs(restore_type=np.ndarray)
        self._restore = ocp.args.PyTreeRestore
        try:
            tree = self._checkpointer.metadata(self._path).item_metadata
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{self._path}: not a complete Orbax checkpoint ({error})") from error
        if tree is None:
            raise CheckpointError(f"{self._path}: not a complete Orbax checkpoint (no metadata)")
        self._infos = {
            name: TensorInfo(tuple(array.shape), np.dtype(array.dtype), np.dtype(array.dtype).name)
            for name, array in dict(tree).items()
        }

    def names(self) -> tuple[str, ...]:
        return tuple(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str) -> np.ndarray:
        self.info(name)
        args = self._restore(item={name: 0}, restore_args={name: self._restore_type}, partial_restore=True)
        try:
            return np.asarray(self._checkpointer.restore(self._path, args=args)[name])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._path}: tensor {name!r} cannot be read ({error})") from error

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        # Orbax restores whole arrays: these hold one parameter twice for a moment.
        array = np.atleast_1d(self.read(name))
        rows = rows_per_chunk(array.shape)
        for index in range(math.ceil(array.shape[0] / rows)):
            yield array[index * rows : (index + 1) * rows]

    def blocks(self, name: str) -> np.ndarray:
        raise CheckpointError(f"{self.origin(name)}: tensor {name!r} is not quantized")

    def origin(self, name: str) -> str:
        self.info(name)
        return str(self._path)
