"""Whole steps of the engine, compiled for an H200 that is not there: memory, launches, communication."""

from collections.abc import Mapping

import pytest

from pallas_kernels.aot.isolated import Job, Outcome, run_isolated
from pallas_kernels.aot.toolchain import missing
from tests.gpu_aot import step_programs
from tests.gpu_aot.step_programs import (
    BLOCKS,
    LAYERS,
    LLAMA_3_8B,
    POOL_BYTES,
    SEQUENCES,
    STEP_TOKENS,
)
from tests.pallas_kernels.hlo_checks import makers

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"cannot compile for GPUs here: {missing()}"),
    pytest.mark.timeout(900),
]

Key = tuple[str, int] | tuple[str, int, int]
"""A function of ``step_programs``, tokens, and devices if there are several."""

DECODE: dict[str, Key] = {
    "segment": ("segment", SEQUENCES),
    "whole": ("backbone", SEQUENCES),
    "segment on 2": ("sharded_segment", SEQUENCES, 2),
    "segment on 4": ("sharded_segment", SEQUENCES, 4),
    "whole on 2": ("sharded_backbone", SEQUENCES, 2),
    "whole on 4": ("sharded_backbone", SEQUENCES, 4),
}
PREFILL: dict[str, Key] = {
    "segment": ("segment", STEP_TOKENS),
    "whole": ("backbone", STEP_TOKENS),
    "segment on 2": ("sharded_segment", STEP_TOKENS, 2),
}
PROGRAMS = (*DECODE.values(), *PREFILL.values())
LAYERS_OF = {"segment": 1, "backbone": LAYERS, "sharded_segment": 1, "sharded_backbone": LAYERS}


@pytest.fixture(scope="module")
def compiled() -> Mapping[Key, Outcome]:
    jobs = {key: Job(f"{step_programs.__name__}:{key[0]}", ("triton", *key[1:]), "h200") for key in PROGRAMS}
    outcomes = {
        outcome.job: outcome
        for outcome in run_isolated(list(jobs.values()), preload=[step_programs.__name__])
    }
    return {key: outcomes[job] for key, job in jobs.items()}


def activation_bytes(tokens: int) -> int:
    """A generous count of what one layer holds at a time, in float32: gate, up and their product, and four streams."""
    return tokens * (3 * LLAMA_3_8B["intermediate_size"] + 4 * LLAMA_3_8B["hidden_size"]) * 4


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda key: "-".join(map(str, key)))
class TestEveryStep:
    def test_compiles(self, compiled: Mapping[Key, Outcome], program: Key) -> None:
        assert compiled[program].error == ""

    def test_pools_are_updated_in_place(self, compiled: Mapping[Key, Outcome], program: Key) -> None:
        outcome = compiled[program]
        share = program[2] if len(program) == 3 else 1
        assert outcome.donated_bytes >= LAYERS_OF[program[0]] * 2 * POOL_BYTES // share
        assert outcome.facts.alias_bytes == outcome.donated_bytes

    def test_no_array_of_pool_size_is_made(self, compiled: Mapping[Key, Outcome], program: Key) -> None:
        assert makers(compiled[program].facts.hlo, (BLOCKS,)) == []

    def test_temporaries_are_activations(self, compiled: Mapping[Key, Outcome], program: Key) -> None:
        assert compiled[program].facts.temp_bytes <= activation_bytes(program[1])

    def test_kernels_do_not_spill(self, compiled: Mapping[Key, Outcome], program: Key) -> None:
        spilling = {k.name: k.spill_bytes for k in compiled[program].facts.kernels if k.spill_bytes}
        assert spilling == {}

    def test_attention_and_write_are_kernels(self, compiled: Mapping[Key, Outcome], program: Key) -> None:
        names = {k.name for k in compiled[program].facts.kernels if k.pallas}
        assert any("attention" in name for name in names)
        assert any("kv_write" in name for name in names)


@pytest.mark.parametrize("name", DECODE)
def test_decode_is_one_cuda_graph(compiled: Mapping[Key, Outcome], name: str) -> None:
    assert compiled[DECODE[name]].facts.launches == {"kCommandBuffer": 1}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (DECODE["segment"], {}),
        (DECODE["whole"], {}),
        (DECODE["segment on 2"], {"all-reduce": 2}),
        (DECODE["segment on 4"], {"all-reduce": 2}),
        (PREFILL["segment on 2"], {"all-reduce": 2}),
        # Two per layer, and one for the embedding, which is sharded over the vocabulary. Logits stay where they are.
        (DECODE["whole on 2"], {"all-reduce": 2 * LAYERS + 1}),
        (DECODE["whole on 4"], {"all-reduce": 2 * LAYERS + 1}),
    ],
)
def test_collectives(compiled: Mapping[Key, Outcome], program: Key, expected: dict[str, int]) -> None:
    assert compiled[program].facts.collectives == expected
