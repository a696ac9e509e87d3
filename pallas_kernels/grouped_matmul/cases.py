"""Shipped shapes of the grouped matrix product: the two products of sparse MLPs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.grouped_matmul import reference, triton, tuning, xla_gpu
from pallas_kernels.kernel_case import KernelCase, Limits, Work

ALL: tuple[Generation, ...] = ("ampere", "ada", "hopper")
LARGE: tuple[Generation, ...] = ("ampere", "hopper")
ORACLE_BYTES = 1 << 30
"""Most bytes of float32 weights that the oracle gathers at a time."""
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}


@dataclass(frozen=True)
class Model:
    """E experts of ``[F, D]`` and back, X of which see each token."""

    name: str
    E: int
    D: int
    F: int
    X: int


QWEN3 = Model("qwen3-30b-a3b", E=128, D=2048, F=768, X=8)
MIXTRAL = Model("mixtral-8x7b", E=8, D=4096, F=14336, X=2)
OLMOE = Model("olmoe-1b-7b", E=64, D=2048, F=1024, X=8)


@dataclass(frozen=True)
class Shape:
    """One product of one step: ``tokens`` before each of them is repeated for its experts."""

    model: Model
    product: str
    tokens: int
    dtype: str = "bfloat16"
    generations: tuple[Generation, ...] = ALL
    quick: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T, E, O, I of the product."""
        m = self.model
        O, I = (2 * m.F, m.D) if self.product == "gate_up" else (m.D, m.F)
        return self.tokens * m.X, m.E, O, I


SHAPES = (
    Shape(QWEN3, "gate_up", 16, quick=True),
    Shape(QWEN3, "down", 16),
    Shape(QWEN3, "gate_up", 64),
    Shape(QWEN3, "down", 64),
    Shape(QWEN3, "gate_up", 2048, generations=LARGE, quick=True),
    Shape(QWEN3, "down", 2048, generations=LARGE),
    Shape(MIXTRAL, "gate_up", 16),
    Shape(MIXTRAL, "down", 16),
    Shape(MIXTRAL, "gate_up", 64),
    Shape(MIXTRAL, "down", 64),
    Shape(MIXTRAL, "gate_up", 2048, generations=LARGE),
    Shape(MIXTRAL, "down", 2048, generations=LARGE),
    # The one of these models that an L4 can hold.
    Shape(OLMOE, "gate_up", 2048, generations=("ada",), quick=True),
    Shape(OLMOE, "down", 2048, generations=("ada",)),
    Shape(OLMOE, "down", 16, "float16"),
    Shape(OLMOE, "gate_up", 16, "float32"),
    Shape(OLMOE, "gate_up", 256, "float32"),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of this op."""
    return tuple(_case(shape) for shape in SHAPES)


def routed_rows(key: jax.Array, model: Model, tokens: int) -> jax.Array:
    """int32 rows per expert, if each token goes to X random experts."""
    _, expert_TX = jax.lax.top_k(jax.random.uniform(key, (tokens, model.E)), model.X)
    return jnp.zeros(model.E, jnp.int32).at[expert_TX].add(1)


def oracle(x_TI: jax.Array, w_EOI: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """The reference for a few rows at a time: it gathers a float32 weight for each of them."""
    T, I = x_TI.shape
    rows = min(T, max(1, ORACLE_BYTES // (4 * w_EOI.shape[1] * I)))
    chunks = -(-T // rows)
    end_E = jnp.cumsum(group_sizes_E)

    def chunk(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_rI, first = args
        end_in_chunk_E = jnp.clip(end_E - first, 0, rows)
        return reference.grouped_matmul(x_rI, w_EOI, jnp.diff(end_in_chunk_E, prepend=0))

    x_crI = jnp.pad(x_TI, ((0, chunks * rows - T), (0, 0))).reshape(chunks, rows, I)
    y_crO = jax.lax.map(chunk, (x_crI, rows * jnp.arange(chunks)))
    return y_crO.reshape(chunks * rows, -1)[:T]


def least_work(shape: Shape) -> Work:
    """Weights of the experts that are hit on average by random routing, rows in and out, and their products."""
    T, E, O, I = shape.sizes
    hit = E * (1 - (1 - shape.model.X / E) ** shape.tokens)
    size = jnp.dtype(shape.dtype).itemsize
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return Work(
        bytes=round(hit * O * I * size) + T * (O + I) * size,
        flops=2 * T * O * I,
        dtype=names[shape.dtype],  # type: ignore[arg-type]
    )


def _case(shape: Shape) -> KernelCase:
    T, E, O, I = shape.sizes
    dtype = jnp.dtype(shape.dtype)

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        return lambda *args: triton.grouped_matmul(*args, generation=generation, choice=choice)

    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        x_TI = jax.random.normal(keys[0], (T, I), dtype)
        w_EOI = jax.random.normal(keys[1], (E, O, I), dtype) * jnp.asarray(I**-0.5, dtype)
        return x_TI, w_EOI, routed_rows(keys[2], shape.model, shape.tokens)

    return KernelCase(
        op="grouped_matmul",
        name=f"{shape.model.name}-{shape.product}-{shape.dtype}-t{shape.tokens}",
        backend="triton",
        generations=shape.generations,
        build=build,
        oracle=oracle,
        baseline=xla_gpu.grouped_matmul,
        inputs=inputs,
        work=least_work(shape),
        tolerance=TOLERANCE[shape.dtype],
        limits=Limits(tensor_core=None if dtype.itemsize == 4 else "mma", temp_bytes=1 << 20),
        # Of the generation that can do the least, so that all of them compile for each.
        candidates=tuning.candidates("ada" if "ada" in shape.generations else "ampere", T, E, O, I, dtype),
        tuning_key=tuning.key(T, E, O, I, dtype),
        quick=shape.quick,
    )
