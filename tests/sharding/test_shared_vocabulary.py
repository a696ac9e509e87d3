"""The sampler over a shared vocabulary gives the same bits as over a whole one."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxinfer.layers.linear import vocab_axis
from jaxinfer.runner.sampler_programs import SamplerPrograms, sampler_programs
from jaxinfer.sampling.inputs import SamplerState, SamplingInputs
from jaxinfer.sampling.state import history_chunks
from jaxinfer.sampling.typical import Typical
from sharding.layout import ONE_DEVICE, Layout
from sharding.mesh import make_layout
from tests.sampling.sampling_cases import Row, make_inputs

V = 320
"""Two and a half groups of 128: of four devices the third has half a group, and the fourth nothing."""
STEPS = 3

ROWS = {
    "greedy": [Row(), Row(logprobs=True, named=(0, 319)), Row(), Row()],
    "top-k": [Row(1.0, top_k=k, key=(k, 1)) for k in (1, 20, 64, 3)],
    "searches": [
        Row(1.0, top_k=200),
        Row(1.3, top_k=100, min_p=0.01),
        Row(9.0, top_p=0.99, logprobs=True),
        Row(0.7),
    ],
    "edits": [
        Row(1.0, repetition=1.3, presence=0.5, frequency=0.2, logprobs=True, processed=True),
        Row(allowed=(3, 127, 128, 319), logprobs=True, processed=True),
        Row(0.8, allowed=(300,)),
        Row(0.9, top_p=0.8, bias=((5, 2.5), (200, -100.0), (318, 4.0)), logprobs=True),
    ],
    "typical": [Row(0.9, top_k=200, key=(k, 5), logprobs=True) for k in range(4)],
}
RULE = Typical(0.09, 0.3)


@pytest.fixture(scope="module")
def shared() -> Layout:
    return make_layout(jax.devices(), tensor=2, expert=2)


def logits(name: str) -> np.ndarray:
    """Random, with ties within a group, between groups and between devices."""
    rng = np.random.default_rng(len(name))
    values_PV = np.round(rng.normal(size=(4, V)) * 8).astype(np.float32) / 4
    if name == "greedy":
        values_PV[2] = -np.inf
        values_PV[3, 300] = np.nan
    return values_PV


def placed(layout: Layout, logits_PV: np.ndarray) -> jax.Array:
    """Logits as the head of a model leaves them: what fills the shares up is -inf."""
    rows, columns = layout.placed_shape(logits_PV.shape, (None, vocab_axis(V)))
    filled_PV = np.full((rows, columns), -np.inf, np.float32)
    filled_PV[:, :V] = logits_PV
    if layout.mesh is None:
        return jax.device_put(filled_PV)
    return jax.device_put(filled_PV, NamedSharding(layout.mesh, layout.rules.spec((None, "vocab"))))


def with_drafts(inputs: SamplingInputs, logits_PV: np.ndarray) -> SamplingInputs:
    """Each row is behind the second most likely token of the row before."""
    second_P = np.argsort(logits_PV, axis=1)[:, -2]
    return replace(
        inputs,
        draft_P=np.array([-1, *second_P[:-1]], np.int32),
        before_P=np.arange(-1, 3, dtype=np.int32),
        history_PK=np.zeros((4, 3), np.int32),
        any_draft=np.bool_(True),
    )


def run(layout: Layout, name: str) -> Iterator[dict[str, np.ndarray]]:
    """Outputs of a few steps, with histories that are loaded first."""
    programs: SamplerPrograms = sampler_programs(V, None, layout, RULE if name == "typical" else None)
    state = programs.init(len(ROWS[name]))
    for chunk in history_chunks([7, 130, 131, 319], [5, 200, 200]):
        state = programs.reset(state, np.int32(0), *chunk)
    placed_PV = placed(layout, logits(name))
    inputs: SamplingInputs = make_inputs(ROWS[name], V)
    if name == "typical":
        inputs = with_drafts(inputs, logits(name))
    for _ in range(STEPS):
        outputs, state = programs.sample(placed_PV, inputs, state)
        yield {
            "token": np.asarray(outputs.token_P),
            "healthy": np.asarray(outputs.healthy_P),
            **{field: np.asarray(value) for field, value in vars(outputs.logprobs).items()},
        }
        inputs = replace(inputs, position_P=inputs.position_P + 1)
    yield counts(state)


def counts(state: SamplerState) -> dict[str, np.ndarray]:
    return {
        "counts": np.asarray(state.output_counts_WV)[:-1, :V],
        "seen": np.asarray(state.prompt_seen_WV)[:-1, :V],
        "newest": np.asarray(state.newest_W)[:-1],
    }


@pytest.mark.feature("tensor parallel", "typical acceptance", "sampling")
def test_typical_drafts_count(shared: Layout) -> None:
    """What the next test compares are not plain draws."""
    first = next(run(shared, "typical"))["token"]
    np.testing.assert_array_equal(first[:3], np.argsort(logits("typical"), axis=1)[:3, -2])


@pytest.mark.feature("tensor parallel", "sampling", "logprobs")
@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_as_on_one_device(shared: Layout, name: str) -> None:
    for step, (alone, together) in enumerate(zip(run(ONE_DEVICE, name), run(shared, name), strict=True)):
        for field, value in alone.items():
            np.testing.assert_array_equal(together[field], value, err_msg=f"{field} of step {step}")


def test_prompt_scores_are_the_same_bits(shared: Layout) -> None:
    found = []
    for layout in (ONE_DEVICE, shared):
        named_PX = np.tile(np.array([[0, 128, 319]], np.int32), (4, 1))
        target_P = np.array([1, 127, 256, 319], np.int32)
        scores = sampler_programs(V, None, layout).score(placed(layout, logits("top-k")), target_P, named_PX)
        found.append({name: np.asarray(value) for name, value in vars(scores).items()})
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)
