"""``jaxinfer convert``: any checkpoint that can be loaded, as one of our own."""

from pathlib import Path

import jax

from jaxinfer.checkpoints.orbax_format import save_checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.engine.model_setup import load_weights, set_up_model
from jaxinfer.progress import startup_bar
from jaxinfer.tokenization.loading import load_tokenizer, save_tokenizer


def convert(config: EngineConfig, target: Path) -> None:
    """Writes the model of a configuration, in the dtype that it is computed in, to a new directory.

    The result is a model reference like any other, and loads without joining or dequantizing.

    Raises:
        CheckpointError: the model cannot be read, or the directory is not empty.
    """
    # Our own checkpoints hold arrays, whatever form the engine would compute with.
    model = config.model.model_copy(update={"weights": "float"})
    setup = set_up_model(config.model_copy(update={"model": model}))
    with startup_bar() as report:
        weights = load_weights(setup, report)
    params = {path: weight for path, weight in weights.items() if isinstance(weight, jax.Array)}
    assert len(params) == len(weights)
    files = setup.files
    saved_config = {**files.config, "dtype": setup.dtype.name}
    save_checkpoint(target, params, saved_config, files.generation_config, files.tokenizer_files)
    if files.kind == "gguf":
        save_tokenizer(load_tokenizer(files.tokenizer_path), target)
