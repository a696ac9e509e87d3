"""Shipped shapes of verification."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.sampling import xla as sampling
from pallas_kernels.sampling.reference import Draws
from pallas_kernels.speculative_verify import reference, triton, tuning, xla
from pallas_kernels.speculative_verify.reference import Verified


@dataclass(frozen=True)
class Shape:
    """R rows of trees, from a vocabulary of V; drafts that were ``sampled`` come with their laws."""

    model: str
    V: int
    R: int
    tree: str
    sampled: bool
    quick: bool = False

    @property
    def parents(self) -> tuple[int, ...]:
        """Of one row: 5 drafts in a chain, or a tree of 60 with 4 children per node."""
        return tuple(range(-1, 5)) if self.tree == "chain" else (-1, *(i // 4 for i in range(60)))


SHAPES = (
    Shape("llama3", 128256, 16, "chain", sampled=True, quick=True),
    Shape("llama3", 128256, 16, "chain", sampled=False),
    Shape("llama3", 128256, 8, "tree", sampled=False, quick=True),
    Shape("llama3", 128256, 8, "tree", sampled=True),
    Shape("llama3", 128256, 1, "tree", sampled=False),
    Shape("qwen3", 151936, 64, "chain", sampled=False),
    Shape("qwen3", 151936, 16, "chain", sampled=True),
    Shape("gemma3", 262144, 16, "chain", sampled=True),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of this op."""
    return tuple(_case(shape) for shape in SHAPES)


def _case(shape: Shape) -> KernelCase:
    max_nodes = len(shape.parents)

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        return lambda *args: _comparable(
            triton.speculative_verify(*args, max_nodes=max_nodes, generation=generation, choice=choice),
            shape.V,
        )

    laws = 2 if shape.sampled else 1
    return KernelCase(
        op="speculative_verify",
        name=f"{shape.model}-{shape.tree}-v{shape.V}-r{shape.R}-{'sampled' if shape.sampled else 'given'}",
        backend="triton",
        generations=("ampere", "ada", "hopper"),
        build=build,
        oracle=lambda *args: _comparable(reference.speculative_verify(*args, max_nodes=max_nodes), shape.V),
        baseline=lambda *args: _comparable(xla.speculative_verify(*args, max_nodes=max_nodes), shape.V),
        inputs=lambda key: _inputs(key, shape),
        # Each row reads the laws of the node at which its path ends.
        work=Work(bytes=4 * shape.R * shape.V * laws, flops=8 * shape.R * shape.V * laws, dtype="fp32"),
        # Rounding moves a draw to a neighbouring token now and then.
        tolerance=1e-3,
        limits=Limits(registers=192, tensor_core=None, temp_bytes=1 << 20),
        candidates=tuning.candidates("hopper", shape.R, shape.V),
        tuning_key=tuning.key(shape.R, shape.V),
        quick=shape.quick,
    )


def _comparable(result: Verified, V: int) -> tuple[jax.Array, ...]:
    """Integers as they are, and the token as a share of the vocabulary."""
    return result.accepted_count_R, result.path_RD, result.next_token_R.astype(jnp.float32) / V


def _inputs(key: jax.Array, shape: Shape) -> tuple[Any, ...]:
    """A draft whose logits are close to the target's, so that paths of all lengths occur; every fourth row is greedy.

    The trials' numbers keep away from 1, where laws that differ in their last bits could decide differently.
    """
    keys = jax.random.split(key, 5)
    nodes = len(shape.parents)
    N = shape.R * nodes
    logits_NV = 3 * jax.random.normal(keys[0], (N, shape.V), jnp.float32)
    draft_NV = logits_NV + 0.3 * jax.random.normal(keys[1], (N, shape.V), jnp.float32)
    parent_N = jnp.tile(jnp.asarray(shape.parents, jnp.int32), shape.R)
    temperature_N = jnp.where(jnp.arange(N) // nodes % 4 == 3, 0.0, 0.7)
    # Deterministic drafts, or the same ones given out as if they had been drawn.
    _, best_N4 = jax.lax.top_k(draft_NV, 4)
    start_N = jnp.arange(N) // nodes * nodes
    sibling_N = jnp.where(parent_N < 0, 0, (jnp.arange(N) - start_N - 1) % 4 if shape.tree == "tree" else 0)
    token_N = best_N4[jnp.clip(start_N + parent_N, 0, N - 1), sibling_N].astype(jnp.int32)
    node_start_Q = jnp.arange(shape.R + 1, dtype=jnp.int32) * nodes
    accept_N = jax.random.uniform(keys[2], (N,), minval=0.01, maxval=0.95)
    residual_R = jax.random.uniform(keys[3], (shape.R,), minval=0.01, maxval=0.99)
    laws = _laws(logits_NV, temperature_N, keys[4])
    args = (logits_NV, laws, token_N, parent_N, node_start_Q, accept_N, residual_R)
    return (*args, draft_NV, _laws(draft_NV, jnp.full(N, 0.9), keys[4])) if shape.sampled else args


def _laws(logits_NV: jax.Array, temperature_N: jax.Array, key: jax.Array) -> Draws:
    N, V = logits_NV.shape
    uniform_N = jax.random.uniform(key, (N,), minval=0.01, maxval=0.99)
    return sampling.truncated_draw(
        logits_NV, uniform_N, temperature_N, jnp.full(N, V), jnp.full(N, 0.95), jnp.full(N, 0.01)
    )
