"""Shipped shapes of the truncated draw."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.sampling import reference, triton, tuning, xla
from pallas_kernels.sampling.reference import Draws


@dataclass(frozen=True)
class Shape:
    """P rows of a model's vocabulary; ``truncated`` rows have top-k, top-p or min-p, or all of them."""

    model: str
    V: int
    P: int
    truncated: bool = True
    quick: bool = False


SHAPES = (
    Shape("llama2", 32000, 16),
    Shape("llama2", 32000, 256),
    Shape("llama3", 128256, 1, quick=True),
    Shape("llama3", 128256, 1, truncated=False),
    Shape("llama3", 128256, 64),
    Shape("llama3", 128256, 256, truncated=False),
    Shape("llama3", 128256, 256),
    Shape("qwen3", 151936, 1),
    Shape("qwen3", 151936, 16),
    Shape("qwen3", 151936, 64, quick=True),
    Shape("qwen3", 151936, 256),
    Shape("gemma3", 262144, 1),
    Shape("gemma3", 262144, 64),
    Shape("gemma3", 262144, 256),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of this op."""
    return tuple(_case(shape) for shape in SHAPES)


def _case(shape: Shape) -> KernelCase:
    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        return lambda *args: _comparable(
            triton.truncated_draw(*args, generation=generation, choice=choice), shape.V
        )

    return KernelCase(
        op="sampling",
        name=f"{shape.model}-v{shape.V}-p{shape.P}-{'truncated' if shape.truncated else 'plain'}",
        backend="triton",
        generations=("ampere", "ada", "hopper"),
        build=build,
        oracle=lambda *args: _comparable(reference.truncated_draw(*args), shape.V),
        baseline=lambda *args: _comparable(xla.truncated_draw(*args), shape.V),
        inputs=lambda key: _inputs(key, shape),
        work=Work(bytes=4 * shape.P * shape.V, flops=4 * shape.P * shape.V, dtype="fp32"),
        # Rounding moves a draw to a neighbouring token now and then: about V / mass of them lie at one uniform number.
        tolerance=1e-3,
        limits=Limits(registers=128, tensor_core=None, temp_bytes=16 * shape.P * shape.V // 64 + (1 << 20)),
        candidates=tuning.candidates("hopper", shape.P, shape.V),
        tuning_key=tuning.key(shape.P, shape.V),
        quick=shape.quick,
    )


def _comparable(draws: Draws, V: int) -> tuple[jax.Array, ...]:
    """Finite float32 arrays: the token as a share of the vocabulary, threshold, mass."""
    cut_P = jnp.where(jnp.isfinite(draws.threshold_P), draws.threshold_P, 0.0)
    return draws.token_P.astype(jnp.float32) / V, cut_P, draws.mass_P


def _inputs(key: jax.Array, shape: Shape) -> tuple[jax.Array, ...]:
    """Logits as peaked as those of a language model, and a mix of greedy and random rows."""
    keys = jax.random.split(key, 3)
    logits_PV = 4 * jax.random.normal(keys[0], (shape.P, shape.V), jnp.float32)
    uniform_P = jax.random.uniform(keys[1], (shape.P,), minval=0.01, maxval=0.99)
    kind_P = jnp.arange(shape.P) % 4
    on_P = (kind_P < 3) & shape.truncated
    temperature_P = jnp.where((kind_P == 3) & (shape.P > 1), 0.0, 0.8)
    top_k_P = jnp.where(on_P & (kind_P != 1), 50, shape.V).astype(jnp.int32)
    top_p_P = jnp.where(on_P & (kind_P != 2), 0.95, 1.0)
    min_p_P = jnp.where(on_P & (kind_P == 2), 0.02, 0.0)
    return logits_PV, uniform_P, temperature_P, top_k_P, top_p_P, min_p_P
