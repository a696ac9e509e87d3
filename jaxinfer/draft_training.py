"""Trains draft heads for the models that the engine serves."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import jax

from jaxinfer.checkpoints.loader import Param
from jaxinfer.config import EngineConfig
from jaxinfer.engine.model_setup import load_weights, set_up_model
from jaxinfer.llm import LLM
from jaxinfer.observability.compilation import use_compilation_cache
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.heads.head import Method
from jaxinfer.speculative.training.config import DataOptions, TrainConfig
from jaxinfer.speculative.training.run import Report, Target, TrainedHead, train_head
from jaxinfer.speculative.training.text import Answer, TextSequence
from jaxinfer.tokenization.loading import load_text
from pallas_kernels.linear.packed import PackedWeight


def train_draft(method: Method, recipe: TrainConfig, report: Report) -> TrainedHead:
    """Trains a draft head for the model of a recipe; see ``train_head``.

    Args:
        report: called with (part of the run, done, total, what is new).

    Raises:
        ConfigError, CheckpointError: the recipe or the model is wrong.
    """
    use_compilation_cache(recipe.compile.cache_dir)
    config = _engine_config(recipe, layers_per_segment=1)
    # Heads are trained through the target's output matrix, which has to be an array for that.
    arrays = config.model.model_copy(update={"weights": "float"})
    setup = set_up_model(config.model_copy(update={"model": arrays}))
    tokenizer, _ = load_text(setup.files.tokenizer_path)
    target = Target(
        config=setup.model,
        parts=setup.parts,
        max_model_len=setup.max_model_len,
        load=lambda: _arrays(load_weights(setup)),
        tokenizer=tokenizer,
        answer=lambda: _answers(recipe),
    )
    return train_head(method, recipe, target, report)


def _arrays(params: dict[str, Param]) -> dict[str, jax.Array]:
    assert not any(isinstance(param, PackedWeight) for param in params.values()), (
        "weights are asked for as arrays"
    )
    return cast(dict[str, jax.Array], params)


@contextmanager
def _answers(recipe: TrainConfig) -> Iterator[Answer]:
    yield partial(_answer, recipe.data, LLM(_engine_config(recipe)))
    gc.collect()  # the engine holds weights and a KV cache that the rest of the run has no use for


def _answer(data: DataOptions, llm: LLM, prompts: list[str]) -> list[TextSequence]:
    params = SamplingParams(temperature=data.temperature, max_tokens=data.max_tokens, seed=0)
    if data.chat:
        messages = [[{"role": "user", "content": text}] for text in prompts]
        outputs = llm.chat(messages, params, progress=False)
    else:
        outputs = llm.generate(prompts, params, progress=False)
    return [
        TextSequence(
            (*output.prompt_token_ids, *output.outputs[0].token_ids)[: data.sequence_length],
            len(output.prompt_token_ids),
        )
        for output in outputs
    ]


def _engine_config(recipe: TrainConfig, **compiling: Any) -> EngineConfig:
    model = recipe.model
    if model.max_model_len is None:
        model = model.model_copy(update={"max_model_len": recipe.data.sequence_length})
    return EngineConfig(
        model=model,
        cache=recipe.cache,
        scheduler=recipe.scheduler,
        compile=recipe.compile.model_copy(update=compiling),
    )
