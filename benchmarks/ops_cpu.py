"""Time of each op per layer on the CPU, at the loads of small models: a table per op.

usage: python benchmarks/ops_cpu.py [--only attention rope_kv_write linear kv_write grouped_matmul] [--repetitions 15]

Variants alternate within one run, so that their ratios hold on a machine with other work; "processor" is the time of
all cores. Every call walks over several layers with their own pools or weights, as a model does, so that nothing
stays in the cache from the call before.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pallas_kernels.grouped_matmul import xla as grouped_xla
from pallas_kernels.kv_storage import as_stored, storage_dtype
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.linear import xla as linear_xla
from pallas_kernels.linear import xla_cpu as linear_xla_cpu
from pallas_kernels.native import library
from pallas_kernels.ragged_paged_attention import native as attention_native
from pallas_kernels.ragged_paged_attention import xla as attention_xla
from pallas_kernels.rope_kv_write import native as rope_native
from pallas_kernels.rope_kv_write import xla as rope_xla

S = 16
LAYERS = 4
HEADS = {"SmolLM2": (9, 3, 64), "Qwen2.5-0.5B": (14, 2, 64), "Gemma3-270M": (4, 1, 256)}
LOADS = {
    "1 decode, 384 tokens": ([1], [384], 1),
    "8 decodes, 64-384 tokens": ([1] * 8, list(range(64, 385, 45)), 8),
    "32 decodes, 64-384 tokens": ([1] * 32, list(range(64, 384, 10)), 32),
    "1 decode, 4096 tokens": ([1], [4096], 1),
    "8 decodes, 1024 tokens": ([1] * 8, [1024] * 8, 8),
    "64 decodes, 256 tokens": ([1] * 64, [256] * 64, 64),
    "1 prompt of 512": ([512], [512], 512),
    "1 prompt of 1024": ([1024], [1024], 1024),
    "4 prompts of 128": ([128] * 4, [128] * 4, 512),
    "31 decodes and a prompt of 225": ([1] * 31 + [225], [*range(64, 374, 10), 225], 256),
    "32 drafts of 5": ([5] * 32, list(range(64, 384, 10)), 256),
}
WEIGHTS = {
    "qkv": (960, 576),
    "output": (576, 576),
    "gate and up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
ATTENTION = {"xla": attention_xla.ragged_paged_attention, "native": attention_native.ragged_paged_attention}
ROPE = {"xla": rope_xla.rope_kv_write, "native": rope_native.rope_kv_write}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Variant:
    """A jitted call over ``layers`` layers."""

    label: tuple[str, ...]
    call: Callable[[], jax.Array]
    layers: int


def measure(title: str, columns: tuple[str, ...], variants: list[Variant], repetitions: int) -> None:
    """Runs the variants in turn and prints milliseconds per layer."""
    for variant in variants:
        jax.block_until_ready(variant.call())
    wall: list[list[float]] = [[] for _ in variants]
    processor: list[list[float]] = [[] for _ in variants]
    for _ in range(repetitions):
        for variant, walls, processors in zip(variants, wall, processor):
            start, start_processor = time.perf_counter(), time.process_time()
            jax.block_until_ready(variant.call())
            walls.append((time.perf_counter() - start) * 1e3 / variant.layers)
            processors.append((time.process_time() - start_processor) * 1e3 / variant.layers)
    table = Table(*columns, "median ms", "best ms", "processor ms", title=f"{title}: per layer")
    for variant, walls, processors in zip(variants, wall, processor):
        times = (statistics.median(walls), min(walls), statistics.median(processors))
        table.add_row(*variant.label, *(f"{x:.3f}" for x in times))
    Console().print(table)


def built(backends: dict[str, Callable]) -> dict[str, Callable]:
    """The backends that this installation has."""
    return {name: op for name, op in backends.items() if name != "native" or library.available()[0]}


def attention(repetitions: int) -> None:
    """Models x loads x cache dtypes x backends."""
    for model, heads in HEADS.items():
        variants = []
        for load, (lengths, contexts, T) in LOADS.items():
            for cache in (jnp.float32, jnp.bfloat16):
                for backend, op in built(ATTENTION).items():
                    call = attention_call(op, lengths, contexts, T, heads, cache)
                    variants.append(Variant((load, jnp.dtype(cache).name, backend), call, LAYERS))
        measure(f"attention, {model}", ("load", "KV cache", "backend"), variants, repetitions)


def attention_call(
    op: Callable[..., jax.Array],
    lengths: list[int],
    contexts: list[int],
    T: int,
    heads: tuple[int, int, int],
    cache: jnp.dtype,
) -> Callable[[], jax.Array]:
    """Attention of ``LAYERS`` layers on a batch; blocks of the pool are in random order."""
    H, K, h = heads
    blocks = [-(-c // S) for c in contexts]
    ids = iter(np.random.default_rng(0).permutation(np.arange(1, sum(blocks) + 1)))
    table_RM = np.zeros((len(lengths), 512), np.int32)
    for row, n in enumerate(blocks):
        table_RM[row, :n] = [next(ids) for _ in range(n)]
    shape = (sum(blocks) + 1, K, S, h)
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    stored = storage_dtype(cache, jax.default_backend())
    pools = [as_stored(jax.random.normal(key, shape).astype(cache), stored) for key in keys]
    start_Q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch = [jnp.asarray(x) for x in (table_RM, start_Q, np.array(contexts, np.int32))]
    q_THh = jax.random.normal(jax.random.key(1), (T, H, h))

    @jax.jit
    def layers(q_THh: jax.Array, pools: list[jax.Array], batch: list[jax.Array]) -> jax.Array:
        for k_NKSh, v_NKSh in zip(pools[::2], pools[1::2]):
            q_THh = op(q_THh, k_NKSh, v_NKSh, *batch, scale=h**-0.5)
        return q_THh

    return lambda: layers(q_THh, pools, batch)


def linear(repetitions: int) -> None:
    """Shapes x rows x dtypes, for the generic and the CPU formulation."""
    for dtype in (jnp.float32, jnp.bfloat16):
        variants = []
        for name, (O, I) in WEIGHTS.items():
            n = 1 if O > 10_000 else 8
            w = [jax.random.normal(key, (O, I), dtype) for key in jax.random.split(jax.random.key(0), n)]
            for T in ROWS:
                if T * O > 10_000_000:
                    continue
                for backend, op in (("xla", linear_xla.linear), ("xla_cpu", linear_xla_cpu.linear)):
                    call = linear_call(op, jnp.ones((T, I), dtype), w)
                    variants.append(Variant((name, f"{O} x {I}", str(T), backend), call, n))
        columns = ("weight", "shape", "rows", "backend")
        measure(f"linear in {jnp.dtype(dtype).name}", columns, variants, repetitions)


def linear_call(op: Callable[..., jax.Array], x_TI: jax.Array, w: list[jax.Array]) -> Callable[[], jax.Array]:
    """A chain of products with the weights ``w``, each of which depends on the one before."""

    @jax.jit
    def chain(x_TI: jax.Array, w: list[jax.Array]) -> jax.Array:
        total = jnp.float32(0)
        for w_OI in w:
            y_TO = op(x_TI + (total * 1e-30).astype(x_TI.dtype), w_OI)
            total = total + jnp.sum(y_TO.astype(jnp.float32))
        return total

    return lambda: chain(x_TI, w)


def rope_kv_write(repetitions: int) -> None:
    """Cache dtypes x tokens x backends at the heads of SmolLM2, with donated pools."""
    variants = []
    H, K, h = HEADS["SmolLM2"]
    for cache in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
        for T in (1, 32, 512):
            for backend, op in built(ROPE).items():
                call = rope_call(op, T, (H, K, h), storage_dtype(cache, jax.default_backend()))
                variants.append(Variant((jnp.dtype(cache).name, str(T), backend), call, 1))
    measure("rope_kv_write", ("KV cache", "tokens", "backend"), variants, repetitions)


def rope_call(
    op: Callable[..., tuple[jax.Array, ...]], T: int, heads: tuple[int, int, int], stored: jnp.dtype
) -> Callable[[], jax.Array]:
    """One layer's rotation and write, into pools that the next call gets."""
    H, K, h = heads
    pools = [jnp.zeros((2000, K, S, h), stored) for _ in range(2)]
    qkv_TAh, angle_Ti = jnp.ones((T, H + 2 * K, h)), jnp.ones((T, h // 2))
    one_K, slot_T = jnp.ones(K), S + jnp.arange(T, dtype=jnp.int32)
    jitted = jax.jit(op, donate_argnums=(3, 4))

    def call() -> jax.Array:
        q_THh, *pools[:] = jitted(
            qkv_TAh, angle_Ti, angle_Ti, *pools, slot_T, k_scale_K=one_K, v_scale_K=one_K
        )
        return q_THh

    return call


def kv_write(repetitions: int) -> None:
    """Cache dtypes x tokens, with donated pools."""
    variants = []
    K, h, N = 3, 64, 2000
    for cache in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
        stored = storage_dtype(cache, jax.default_backend())
        for T in (1, 32, 512, 2048):
            pools = [jnp.zeros((N, K, S, h), stored) for _ in range(2)]
            x_TKh, one_K, slot_T = jnp.ones((T, K, h)), jnp.ones(K), S + jnp.arange(T, dtype=jnp.int32)
            op = jax.jit(kv_write_xla.kv_write, donate_argnums=(0, 1))

            def call(pools: list[jax.Array] = pools, args: tuple = (op, x_TKh, one_K, slot_T)) -> jax.Array:
                op, x_TKh, one_K, slot_T = args
                pools[:] = op(*pools, x_TKh, x_TKh, slot_T, k_scale_K=one_K, v_scale_K=one_K)
                return pools[1]

            variants.append(Variant((jnp.dtype(cache).name, str(T)), call, 1))
    measure("kv_write", ("KV cache", "tokens"), variants, repetitions)


def grouped_matmul(repetitions: int) -> None:
    """16 experts of 1536 x 576 with rows spread at random."""
    variants = []
    for dtype in (jnp.float32, jnp.bfloat16):
        w_EOI = jax.random.normal(jax.random.key(0), (16, 1536, 576), dtype)
        for T in (2, 16, 64, 256):
            sizes = np.bincount(np.random.default_rng(T).integers(0, 16, T), minlength=16)
            args = (jnp.ones((T, 576), dtype), w_EOI, jnp.asarray(sizes, jnp.int32))
            op = jax.jit(grouped_xla.grouped_matmul)
            variants.append(Variant((jnp.dtype(dtype).name, str(T)), lambda op=op, args=args: op(*args), 1))
    measure("grouped_matmul", ("dtype", "rows"), variants, repetitions)


def main() -> None:
    """Measures the ops that were asked for."""
    ops = {
        "attention": attention,
        "rope_kv_write": rope_kv_write,
        "linear": linear,
        "kv_write": kv_write,
        "grouped_matmul": grouped_matmul,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ops, default=list(ops))
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    for name in arguments.only:
        ops[name](arguments.repetitions)


if __name__ == "__main__":
    main()
