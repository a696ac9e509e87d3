"""Products with packed weights on the CPU against XLA, oneDNN (through PyTorch) and the limits of the machine.

usage: python benchmarks/native_cpu.py [--formats Q4_1 bf16 ...] [--rows 1 16 256 ...] [--only NAME ...]
                                       [--repetitions 15] [--copies N] [--json FILE]

Few rows are a stream of weights, so they are given as a share of the fastest read of as many bytes; many rows as a
share of the best square product. The variants of a row alternate within one run and the shortest time of each counts,
since a machine with other work only ever adds time. Each call walks over several copies of the weight, as a model does;
``--copies 1`` makes calls short, which helps where the processors are shared. There are as many threads as processors
that the process may use (``taskset``).
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pallas_kernels.linear import native, xla_cpu
from pallas_kernels.linear.formats import FORMATS
from pallas_kernels.linear.packed import PackedWeight
from pallas_kernels.native.library import available

WEIGHTS = {
    "SmolLM2 qkv": (960, 576),
    "SmolLM2 gate and up": (3072, 576),
    "SmolLM2 down": (576, 1536),
    "SmolLM2 head": (49152, 576),
    "Qwen2.5 gate and up": (9728, 896),
    "Qwen2.5 head": (151936, 896),
}
MIN_BYTES = 48 << 20
"""Copies of a weight together: more than a third-level cache."""
SQUARE = 512
PAUSE = 0.05
"""Seconds."""
THREADS = len(os.sched_getaffinity(0))
Calls = dict[str, Callable[[], object]]


def shortest(calls: Calls, repetitions: int) -> dict[str, float]:
    """Seconds of each; they take turns, with a pause: threads of OpenMP go on looking for work after a call."""
    times = {name: float("inf") for name in calls}
    for call in calls.values():
        call()
    for _ in range(repetitions):
        for name, call in calls.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            call()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def packed(name: str, O: int, I: int) -> PackedWeight:
    """Any codes: the time does not depend on them."""
    fmt = FORMATS[name]
    tiles = np.full((-(-O // 32), fmt.units(I) * fmt.unit_bytes), 0x11, np.uint8)
    return PackedWeight((jnp.asarray(tiles),), (name,), (O,), I)


def reader(num_bytes: int) -> Callable[[], object]:
    """Reads as many bytes once, with threads: the dot product of an array with itself."""
    parts = np.ones((THREADS, num_bytes // 4 // THREADS), np.float32)
    pool = ThreadPoolExecutor(THREADS)
    return lambda: list(pool.map(lambda part: np.dot(part, part), parts))


def one_behind_another(linear: Callable[..., jax.Array], x: jax.Array, weights: list[Any]) -> jax.Array:
    """Each product waits for the last one, as in a model: XLA would run independent ones at the same time."""
    for w in weights:
        y = linear(x, w)
        x = x.at[0, 0].set(jnp.clip(y[0, 0], 0, 1))
    return y


def peers(O: int, I: int, T: int, layers: int) -> Calls:
    """The same product in float32 by XLA, and by oneDNN and PyTorch's own choice (MKL) if PyTorch is there."""
    weights = [jnp.full((O, I), 0.01, jnp.float32) for _ in range(layers)]
    x = jnp.full((T, I), 0.5, jnp.float32)
    program = jax.jit(lambda x, weights: one_behind_another(xla_cpu.linear, x, weights))
    calls: Calls = {"XLA f32": lambda: jax.block_until_ready(program(x, weights))}
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(THREADS)
        x_torch = torch.full((T, I), 0.5)
        plain = [torch.full((O, I), 0.01) for _ in range(layers)]
        blocked = [torch.ops.mkldnn._reorder_linear_weight(w, T) for w in plain]
        calls["MKL f32"] = lambda: [torch.nn.functional.linear(x_torch, w) for w in plain]
        calls["oneDNN f32"] = lambda: [
            torch.ops.mkldnn._linear_pointwise(x_torch, w, None, "none", [], "") for w in blocked
        ]
    return calls


def square_rate(repetitions: int) -> dict[str, float]:
    """Operations per second of square products."""
    calls = peers(SQUARE, SQUARE, SQUARE, 1)
    return {name: 2 * SQUARE**3 / seconds for name, seconds in shortest(calls, repetitions).items()}


def measure(
    shape: str, T: int, formats: list[str], repetitions: int, copies: int | None
) -> list[dict[str, object]]:
    """A record per variant."""
    O, I = WEIGHTS[shape]
    layers = copies or max(1, min(8, -(-MIN_BYTES // (O * I * 4))))
    sizes: dict[str, int] = {}
    calls = peers(O, I, T, layers)
    for name in formats:
        if I % FORMATS[name].unit and not FORMATS[name].dense:
            continue
        many_rows = T >= 32 or copies is not None
        count = layers if many_rows else max(1, -(-MIN_BYTES // packed(name, O, I).nbytes))
        weights = [packed(name, O, I) for _ in range(count)]
        x = jnp.full((T, I), 0.5, jnp.float32)
        program = jax.jit(lambda x, weights: one_behind_another(native.linear, x, weights))
        calls[name] = lambda f=program, x=x, w=weights: jax.block_until_ready(f(x, w))  # type: ignore[misc]
        sizes[name] = count
        if T < 32:
            calls[f"read {name}"] = reader(sum(w.nbytes for w in weights))
    records: list[dict[str, object]] = []
    times = shortest(calls, repetitions)
    for name, seconds in times.items():
        if name.startswith("read "):
            continue
        count = sizes.get(name, layers)
        num_bytes = packed(name, O, I).nbytes * count if name in sizes else O * I * 4 * count
        records.append(
            {
                "weight": shape,
                "rows": T,
                "variant": name,
                "microseconds": seconds / count * 1e6,
                "gigabytes_per_second": num_bytes / seconds / 1e9,
                "gigaflops": 2 * T * O * I * count / seconds / 1e9,
                "share_of_read": times[f"read {name}"] / seconds if f"read {name}" in times else None,
            }
        )
    return records


def show(records: list[dict[str, object]], square: dict[str, float]) -> None:
    """Prints one table."""
    best = max(square.values()) / 1e9
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in square.items())
    table = Table(title=f"{THREADS} threads; square product of {SQUARE}: {rates} GFLOP/s")
    for column in ("weight", "rows", "variant", "us", "GB/s", "of a read", "GFLOP/s", "of the square"):
        table.add_column(column, justify="right")
    for record in records:
        share, flops = record["share_of_read"], record["gigaflops"]
        assert isinstance(flops, float)
        table.add_row(
            str(record["weight"]),
            str(record["rows"]),
            str(record["variant"]),
            f"{record['microseconds']:.0f}",
            f"{record['gigabytes_per_second']:.1f}",
            f"{share:.0%}" if isinstance(share, float) else "",
            f"{flops:.1f}",
            f"{flops / best:.0%}",
        )
    Console(width=120).print(table)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=["Q4_1", "bf16"], choices=sorted(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 16, 256])
    parser.add_argument("--only", nargs="+", default=list(WEIGHTS), choices=list(WEIGHTS))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--copies", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ok, reason = available()
    if not ok:
        parser.error(reason)
    square = square_rate(args.repetitions)
    records = [
        record
        for shape in args.only
        for T in args.rows
        for record in measure(shape, T, args.formats, args.repetitions, args.copies)
    ]
    show(records, square)
    if args.json:
        args.json.write_text(json.dumps({"square": square, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
