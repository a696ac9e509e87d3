"""The shapes that the quantized matrix product is shipped for: projections of Llama-3-8B and Qwen3-0.6B."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.quantized_matmul import mosaic, reference, triton, tuning, xla
from pallas_kernels.quantized_matmul.tuning import Facts
from pallas_kernels.quantized_matmul.weights import PLANE, TILE, Activation, Format, QuantizedWeight

_ALL: tuple[Generation, ...] = ("ampere", "ada", "hopper")
_FP8: tuple[Generation, ...] = ("ada", "hopper")

PROJECTIONS = {
    "llama8b-o": (4096, 4096),
    "llama8b-gate_up": (28672, 4096),
    "llama8b-down": (4096, 14336),
    "qwen0.6b-o": (1024, 2048),
    "qwen0.6b-gate_up": (6144, 1024),
}
"""Outputs and inputs."""
TOKENS = (1, 16, 64, 2048)


@dataclass(frozen=True)
class Kind:
    """A format as checkpoints use it."""

    name: str
    format: Format
    group: int | None = None
    zero_point: bool = False
    activation: Activation | None = None
    scale_dtype: str = "float32"


KINDS = (
    Kind("int8", "int8"),
    Kind("int8-g128", "int8", 128, scale_dtype="float16"),
    Kind("int4-g128", "int4", 128, scale_dtype="float16"),
    Kind("awq-g128", "int4", 128, True, scale_dtype="float16"),
    Kind("int4-g64", "int4", 64, scale_dtype="float16"),
    Kind("int4-g32", "int4", 32, scale_dtype="bfloat16"),
    Kind("fp8", "fp8"),
    Kind("w8a8-fp8", "fp8", activation="fp8"),
    Kind("w8a8-int8", "int8", activation="int8"),
)
_COMMON = ("int8", "awq-g128", "w8a8-fp8")
_EVERYTHING = "llama8b-o"
"""The projection with every kind and number of tokens; on the others the common kinds at both ends are enough."""
_QUICK = (("int4-g128", "llama8b-o", 1), ("awq-g128", "llama8b-o", 64), ("int8", "qwen0.6b-o", 2048))


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every kind on one projection of Llama-3-8B; the common ones on others, and on those of Qwen3-0.6B."""
    cases = []
    for kind in KINDS:
        for projection in PROJECTIONS:
            everything = projection == _EVERYTHING
            if not everything and kind.name not in _COMMON:
                continue
            tokens = TOKENS if everything else (TOKENS[0], TOKENS[-1])
            cases += [_case(kind, projection, T, "triton") for T in tokens]
            if kind.activation is not None:
                cases.append(_case(kind, projection, TOKENS[-1], "mosaic"))
    return tuple(cases)


def _case(kind: Kind, projection: str, T: int, backend: Literal["triton", "mosaic"]) -> KernelCase:
    O, I = PROJECTIONS[projection]
    of = Facts(T, O, I, kind.format, kind.group, kind.activation, 2)
    generations = ("hopper",) if backend == "mosaic" else _FP8 if kind.format == "fp8" else _ALL
    return KernelCase(
        op="quantized_matmul",
        name=f"{kind.name}-{projection}-m{T}",
        backend=backend,
        generations=generations,
        build=_build(backend),
        oracle=reference.quantized_matmul,
        baseline=xla.quantized_matmul,
        inputs=lambda seed: inputs(seed, kind, T, O, I),
        work=_work(kind, T, O, I),
        tolerance=1e-2,
        limits=Limits(tensor_core="wgmma" if backend == "mosaic" else "mma"),
        candidates=tuning.candidates("hopper", of) if backend == "triton" else tuning.MOSAIC_CANDIDATES,
        tuning_key=tuning.key(of, backend),
        quick=(backend == "triton" and (kind.name, projection, T) in _QUICK)
        or (backend == "mosaic" and (kind.name, projection) == ("w8a8-fp8", "llama8b-o")),
    )


def _build(
    backend: Literal["triton", "mosaic"],
) -> Callable[[Generation, Any | None], Callable[..., jax.Array]]:
    def build(generation: Generation, choice: Any | None) -> Callable[..., jax.Array]:
        op = mosaic.quantized_matmul if backend == "mosaic" else triton.quantized_matmul
        return lambda x_TI, w: op(x_TI, w, generation=generation, choice=choice)

    return build


def inputs(seed: jax.Array, kind: Kind, T: int, O: int, I: int) -> tuple[jax.Array, QuantizedWeight]:
    """Random stored numbers, with scales that make products about 1."""
    keys = jax.random.split(seed, 4)
    J, G = -(-I // TILE), 1 if kind.group is None else I // kind.group
    shape_JOP = (J, O, PLANE if kind.format == "int4" else TILE)
    deviation = {"int4": 4.6, "int8": 73.0, "fp8": 100.0}[kind.format]
    if kind.format == "fp8":
        values_JOP = (jax.random.normal(keys[0], shape_JOP) * deviation).astype(jnp.float8_e4m3fn)
    else:
        values_JOP = jax.random.randint(keys[0], shape_JOP, -127, 128, jnp.int8)
    scale_GO = jax.random.uniform(keys[1], (G, O), minval=0.5, maxval=1.5) / (deviation * I**0.5)
    zero_GO = jax.random.randint(keys[2], (G, O), 0, 16, jnp.int8) if kind.zero_point else None
    w = QuantizedWeight(
        values_JOP,
        scale_GO.astype(kind.scale_dtype),
        zero_GO,
        format=kind.format,
        group=kind.group,
        activation=kind.activation,
    )
    return jax.random.normal(keys[3], (T, I), jnp.bfloat16), w


def _work(kind: Kind, T: int, O: int, I: int) -> Work:
    """Weights, scales and zero points once; activations in and out in 2 bytes."""
    groups = 1 if kind.group is None else I // kind.group
    per_scale = (4 if kind.scale_dtype == "float32" else 2) + kind.zero_point
    size = O * I // (2 if kind.format == "int4" else 1) + groups * O * per_scale + 2 * T * (I + O)
    return Work(bytes=size, flops=2 * T * O * I, dtype=kind.activation or "bf16")
