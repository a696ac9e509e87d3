"""Shared by the sampler tests: device inputs from a few overrides, a float64 oracle, and a decode loop."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.device import sample
from jaxinfer.sampling.inputs import SamplerOutputs, SamplerState, SamplingInputs
from jaxinfer.sampling.limits import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS
from tests.support.compiling import OPTIMIZED

SLOTS = 32
"""Batch slots of every state, so that tests share compiled programs."""

sample_jit = jax.jit(sample)
sample_optimized = jax.jit(sample, compiler_options=OPTIMIZED)
"""For comparisons of the bits of two programs."""


@dataclass(frozen=True)
class Row:
    """Sampling parameters of one row, as the device sees them (temperature 0 is greedy)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    key: tuple[int, int] = (0, 0)
    position: int = 0
    allowed: tuple[int, ...] | None = None
    bias: tuple[tuple[int, float], ...] = ()
    named: tuple[int, ...] = ()
    logprobs: bool = False
    processed: bool = False


def make_inputs(rows: list[Row], vocab: int, bucket: int | None = None) -> SamplingInputs:
    """Device inputs, one slot per row, padded with neutral rows in the spare slot ``len(rows)``."""
    size = bucket or len(rows)
    padded = rows + [Row()] * (size - len(rows))
    bits = np.zeros((size, -(-vocab // 32) * 32), np.uint8)
    bias_ids = np.zeros((size, MAX_LOGIT_BIAS), np.int32)
    bias_values = np.zeros((size, MAX_LOGIT_BIAS), np.float32)
    named = np.zeros((size, MAX_LOGPROB_TOKEN_IDS), np.int32)
    for r, row in enumerate(padded):
        bits[r, list(row.allowed) if row.allowed is not None else slice(None)] = 1
        for b, (token, value) in enumerate(row.bias):
            bias_ids[r, b], bias_values[r, b] = token, value
        named[r, : len(row.named)] = row.named

    def column(name: str, dtype: type) -> jax.Array:
        return jnp.asarray(np.array([getattr(row, name) for row in padded], dtype))

    return SamplingInputs(
        temperature_P=column("temperature", np.float32),
        top_k_P=jnp.asarray(np.array([row.top_k or vocab for row in padded], np.int32)),
        top_p_P=column("top_p", np.float32),
        min_p_P=column("min_p", np.float32),
        repetition_penalty_P=column("repetition", np.float32),
        presence_penalty_P=column("presence", np.float32),
        frequency_penalty_P=column("frequency", np.float32),
        key_P2=column("key", np.uint32),
        position_P=column("position", np.int32),
        slot_P=jnp.asarray(np.minimum(np.arange(size), len(rows)).astype(np.int32)),
        allowed_PX=jnp.asarray(np.packbits(bits, axis=1, bitorder="little").view(np.uint32)),
        bias_ids_PB=jnp.asarray(bias_ids),
        bias_values_PB=jnp.asarray(bias_values),
        named_ids_PX=jnp.asarray(named),
        processed_logprobs_P=column("processed", np.bool_),
        draft_P=jnp.full(size, -1, jnp.int32),
        before_P=jnp.full(size, -1, jnp.int32),
        history_PK=jnp.zeros((size, 0), jnp.int32),
        any_draft=jnp.asarray(False),
        any_penalty=jnp.asarray(any((r.repetition, r.presence, r.frequency) != (1, 0, 0) for r in rows)),
        any_mask=jnp.asarray(any(r.allowed is not None for r in rows)),
        any_bias=jnp.asarray(any(r.bias for r in rows)),
        any_random=jnp.asarray(any(r.temperature > 0 for r in rows)),
        any_truncation=jnp.asarray(any((r.top_k, r.top_p, r.min_p) != (0, 1, 0) for r in rows)),
        any_logprobs=jnp.asarray(any(r.logprobs for r in rows)),
        any_named=jnp.asarray(any(r.named for r in rows)),
    )


def log_law(
    logits_V: np.ndarray, row: Row, counts_V: np.ndarray, seen_V: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Log of the law of one row by a full sort in float64, and its edited logits.

    A greedy row gets the law at temperature 1.
    """
    x_V = logits_V.astype(np.float64)
    for token, value in row.bias:
        x_V[token] += value
    if row.allowed is not None:
        banned_V = np.ones(x_V.size, bool)
        banned_V[list(row.allowed)] = False
        x_V[banned_V] = -np.inf
    touched_V = (counts_V > 0) | seen_V
    x_V = np.where(touched_V, np.where(x_V > 0, x_V / row.repetition, x_V * row.repetition), x_V)
    x_V = x_V - row.frequency * counts_V - row.presence * (counts_V > 0)
    temperature = row.temperature or 1.0
    kept_V = np.ones(x_V.size, bool)
    if row.temperature > 0:
        if 0 < row.top_k < x_V.size:
            kept_V &= x_V >= np.sort(x_V)[-row.top_k]
        weight_V = np.where(kept_V, np.exp((x_V - x_V.max()) / temperature), 0)
        if row.top_p < 1:
            order_V = np.argsort(-weight_V, kind="stable")
            cumulative_V = np.cumsum(weight_V[order_V])
            last = np.argmax(cumulative_V >= row.top_p * cumulative_V[-1])
            kept_V &= x_V >= x_V[order_V[last]]
        if row.min_p > 0:
            kept_V &= weight_V >= row.min_p
    scaled_V = np.where(kept_V, (x_V - x_V.max()) / temperature, -np.inf)
    return scaled_V - np.log(np.exp(scaled_V).sum()), x_V


def decode(
    logits_PV: np.ndarray, rows: list[Row], state: SamplerState, steps: int, bucket: int | None = None
) -> tuple[list[list[int]], SamplerState, list[SamplerOutputs]]:
    """Samples ``steps`` tokens for each row from the same logits; the position advances."""
    vocab = logits_PV.shape[1]
    size = bucket or len(rows)
    padded_PV = np.zeros((size, vocab), np.float32)
    padded_PV[: len(rows)] = logits_PV
    inputs = make_inputs(rows, vocab, bucket)
    outputs = []
    for _ in range(steps):
        output, state = sample_jit(jnp.asarray(padded_PV), inputs, state)
        outputs.append(output)
        inputs = jax.tree.map(lambda x: x, inputs)
        inputs = SamplingInputs(**{**vars(inputs), "position_P": inputs.position_P + 1})
    tokens = np.stack([np.asarray(o.token_P) for o in outputs])
    return tokens[:, : len(rows)].T.tolist(), state, outputs
