"""Shipped shapes of ragged paged attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.ragged_paged_attention import reference, triton, tuning, xla

SLOTS = 16
GENERATIONS: tuple[Generation, ...] = ("ampere", "ada", "hopper")
KV_DTYPES = ("bfloat16", "float8_e4m3fn", "int8")
# A factor of int8 and fp8 caches that keeps standard normal values in range.
KV_SCALE = 0.03


@dataclass(frozen=True)
class Model:
    """Attention of a model: H query heads, K KV heads, head width h."""

    name: str
    H: int
    K: int
    h: int
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class Shape:
    """A step: for each row its tokens and the length of its context."""

    step: str
    model: Model
    rows: tuple[tuple[int, int], ...]
    kv_dtype: str = "bfloat16"
    tree: bool = False
    quick: bool = False


LLAMA = Model("llama3-8b", 32, 8, 128)
QWEN = Model("qwen3-0.6b", 16, 8, 128)
SMOLLM = Model("smollm2-135m", 9, 3, 64)
GEMMA = Model("gemma2-9b", 16, 8, 256, window=4096, soft_cap=50.0)
PHI2 = Model("phi2", 32, 32, 80)
PHI3 = Model("phi3-mini", 32, 32, 96)

STEPS = (
    Shape("decode-b64-c4096", LLAMA, ((1, 4096),) * 64, quick=True),
    Shape("decode-b64-c4096", QWEN, ((1, 4096),) * 64),
    Shape("decode-b1-c32768", LLAMA, ((1, 32768),)),
    Shape("decode-b64-c2048", SMOLLM, ((1, 2048),) * 64),
    Shape("decode-b16-c8192", GEMMA, ((1, 8192),) * 16),
    Shape("decode-b16-c2048", PHI2, ((1, 2048),) * 16),
    Shape("decode-b16-c4096", PHI3, ((1, 4096),) * 16),
    Shape("prefill-t2048-c4096", LLAMA, ((2048, 4096),), quick=True),
    Shape("mixed-t2048-b64", LLAMA, (*((1, 2048),) * 63, (1985, 1985))),
)
# Every step above runs with every cache dtype; these run with a bfloat16 cache.
MORE_STEPS = (
    Shape("prefill-t2048-c2048", SMOLLM, ((2048, 2048),)),
    Shape("prefill-t2048-c8192", GEMMA, ((2048, 8192),)),
    Shape("prefill-t2048-c2048", PHI2, ((2048, 2048),)),
    Shape("verify-b32-t5-c2048", LLAMA, ((5, 2048),) * 32),
    Shape("tree-b4-t64-c2048", LLAMA, ((64, 2048),) * 4, tree=True),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of the Triton backend."""
    quantized = (
        replace(shape, kv_dtype=dtype, quick=shape is STEPS[0] and dtype == "int8")
        for shape in STEPS
        for dtype in KV_DTYPES[1:]
    )
    return tuple(triton_case(shape) for shape in (*STEPS, *quantized, *MORE_STEPS))


def _inputs(shape: Shape, key: jax.Array) -> tuple[Any, ...]:
    """Arguments of the op, and last its array options."""
    model, keys = shape.model, jax.random.split(key, 4)
    tokens_R, context_R = np.array(shape.rows, np.int32).T
    blocks_R = -(-context_R // SLOTS)
    T, N = int(tokens_R.sum()), int(blocks_R.sum()) + 1
    q_THh = jax.random.normal(keys[0], (T, model.H, model.h), jnp.bfloat16)
    pools = [_pool(shape, (N, model.K, SLOTS, model.h), key) for key in keys[1:3]]
    place_RM = (np.cumsum(blocks_R) - blocks_R)[:, None] + np.arange(blocks_R.max())
    place_RM = np.where(np.arange(blocks_R.max()) < blocks_R[:, None], place_RM, 0)
    table_RM = (1 + jax.random.permutation(keys[3], N - 1).astype(jnp.int32))[place_RM]
    start_Q = jnp.asarray(np.concatenate([[0], np.cumsum(tokens_R)]).astype(np.int32))
    options = {}
    if jnp.dtype(shape.kv_dtype).itemsize == 1:
        options = {name: jnp.full(model.K, KV_SCALE, jnp.float32) for name in ("k_scale_K", "v_scale_K")}
    if shape.tree:
        options["ancestors_TU"] = jnp.asarray(np.concatenate([_binary_tree(n) for n, _ in shape.rows]))
    return q_THh, *pools, table_RM, start_Q, jnp.asarray(context_R), options


def _pool(shape: Shape, size: tuple[int, ...], key: jax.Array) -> jax.Array:
    x = jax.random.normal(key, size, jnp.bfloat16)
    if jnp.dtype(shape.kv_dtype).itemsize > 1:
        return x.astype(shape.kv_dtype)
    x = x / KV_SCALE
    return (jnp.clip(jnp.round(x), -127, 127) if shape.kv_dtype == "int8" else x).astype(shape.kv_dtype)


def _binary_tree(nodes: int) -> np.ndarray:
    """Tree masks: node i is a child of node (i - 1) // 2."""
    masks_TU = np.zeros((nodes, -(-nodes // 32)), np.uint32)
    for node in range(nodes):
        if node:
            masks_TU[node] = masks_TU[(node - 1) // 2]
        masks_TU[node, node // 32] |= np.uint32(1 << node % 32)
    return masks_TU.view(np.int32)


def _oracle(shape: Shape, *arrays: Any) -> jax.Array:
    """The reference, token by token (a tree: row by row), since it forms the keys and values of every token."""
    q_THh, k_NKSh, v_NKSh, table_RM, _, _, options = arrays
    tokens_R, context_R = np.array(shape.rows, np.int32).T
    if shape.tree:
        step, row_I, context_I = tokens_R[0], np.arange(len(tokens_R), dtype=np.int32), context_R
    else:
        step, row_I = 1, np.repeat(np.arange(len(tokens_R), dtype=np.int32), tokens_R)
        seen = [np.arange(c - n + 1, c + 1, dtype=np.int32) for n, c in shape.rows]
        context_I = np.concatenate(seen)

    def part(i: jax.Array) -> jax.Array:
        local = dict(options)
        if shape.tree:
            local["ancestors_TU"] = jax.lax.dynamic_slice_in_dim(options["ancestors_TU"], i * step, step)
        q = jax.lax.dynamic_slice_in_dim(q_THh, i * step, step)
        table, context = table_RM[jnp.asarray(row_I)[i]][None], jnp.asarray(context_I)[i][None]
        start = jnp.asarray([0, step], jnp.int32)
        return _call(
            reference.ragged_paged_attention, shape, (q, k_NKSh, v_NKSh, table, start, context, local)
        )

    return jax.lax.map(part, jnp.arange(len(row_I))).reshape(q_THh.shape)


def _call(op: Callable[..., Any], shape: Shape, arrays: tuple[Any, ...]) -> Any:
    model = shape.model
    *args, options = arrays
    return op(*args, scale=model.h**-0.5, window=model.window, soft_cap=model.soft_cap, **options)


def _work(shape: Shape) -> Work:
    model, size = shape.model, jnp.dtype(shape.kv_dtype).itemsize
    slots = seen = 0
    for tokens, context in shape.rows:
        reach = context if model.window is None else model.window
        seen += sum(min(position + 1, reach) for position in range(context - tokens, context))
        slots += min(context, reach + tokens - 1)
    T = sum(tokens for tokens, _ in shape.rows)
    return Work(
        bytes=2 * slots * model.K * model.h * size + 2 * T * model.H * model.h * 2,
        flops=4 * seen * model.H * model.h,
    )


def triton_case(shape: Shape) -> KernelCase:
    """The Triton backend on one shape."""
    model = shape.model
    inputs = partial(_inputs, shape)
    arrays = jax.eval_shape(inputs, jax.ShapeDtypeStruct((2,), jnp.uint32))

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        chosen = partial(triton.ragged_paged_attention, generation=generation, choice=choice)
        return lambda *a: _call(chosen, shape, a)

    def served(generation: Generation) -> bool:
        return _call(partial(triton.supports, generation=generation), shape, arrays)[0]

    facts = triton.facts(arrays[0], arrays[1], arrays[3], model.window)
    return KernelCase(
        op="ragged_paged_attention",
        name=f"{shape.step}-{model.name}-{shape.kv_dtype}",
        backend="triton",
        generations=tuple(filter(served, GENERATIONS)),
        build=build,
        oracle=partial(_oracle, shape),
        baseline=lambda *a: _call(xla.ragged_paged_attention, shape, a),
        inputs=inputs,
        work=_work(shape),
        tolerance=2e-2,
        limits=Limits(temp_bytes=64 << 20),
        candidates=tuning.candidates("hopper", facts),
        tuning_key=tuning.key(facts),
        quick=shape.quick,
    )
