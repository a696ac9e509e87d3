"""How long a mask takes, at the vocabulary of the default model."""

import json
import time

import numpy as np
import pytest

from jaxinfer.config import EngineConfig, StructuredConfig
from jaxinfer.engine.model_setup import set_up_model
from jaxinfer.sampling.masks import unpack
from jaxinfer.structured.compiler import GrammarCompiler
from jaxinfer.structured.spec import StructuredOutputs
from jaxinfer.tokenization.loading import load_tokenizer
from tests.engine.test_real_model_smollm2 import find_model
from tests.structured.schemas import SCHEMAS

PEOPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "emails": {"type": "array", "items": {"type": "string", "format": "email"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "number"}},
        },
    },
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def smollm2_compiler() -> tuple[GrammarCompiler, int]:
    """The default model's vocabulary, 49,152 tokens."""
    setup = set_up_model(EngineConfig.load(find_model()))
    tokenizer = load_tokenizer(setup.files.tokenizer_path).tokenizer
    vocab = setup.model.vocab_size
    return GrammarCompiler(tokenizer, vocab, setup.model.eos_token_ids, StructuredConfig()), vocab


@pytest.mark.feature("structured output")
def test_the_median_mask_takes_less_than_100_us(
    smollm2_compiler: tuple[GrammarCompiler, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Mask and acceptance of one token, over random answers to every schema. It is the median that counts,
    since a busy machine delays single tokens."""
    compiler, vocab = smollm2_compiler
    rng = np.random.default_rng(0)
    masks, compilations = [], []
    for schema in (*SCHEMAS.values(), PEOPLE, PEOPLE):
        start = time.perf_counter()
        grammar = compiler.compile(StructuredOutputs(json=json.dumps(schema)))
        compilations.append(time.perf_counter() - start)
        state = grammar.start()
        for _ in range(200):
            start = time.perf_counter()
            mask = state.next_mask()
            masked = time.perf_counter() - start
            token = int(rng.choice(np.flatnonzero(unpack(mask, vocab))))
            start = time.perf_counter()
            assert state.accept(token)
            complete = state.complete
            masks.append(masked + time.perf_counter() - start)
            if complete:
                break
    times = np.array(masks[1:]) * 1e6
    with capsys.disabled():
        print(
            f"\nmask and acceptance of {len(times)} tokens: median {np.median(times):.0f} us, 99 % below "
            f"{np.percentile(times, 99):.0f} us; compilation: median {np.median(compilations) * 1e3:.1f} ms"
        )
    assert np.median(times) < 100
