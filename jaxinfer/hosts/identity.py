"""What has to be equal in all processes of an engine, as named facts, so that an error can name what differs."""

import hashlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.checkpoints.tensor_source import TensorSource
from jaxinfer.config import EngineConfig
from jaxinfer.models.config import TransformerConfig

_OWN = {"server", "hosts.rank", "hosts.launcher", "compile.cache_dir", "model.reference", "model.tokenizer"}
"""Values that each process may have of its own."""
_PACKAGES = ("jaxinfer", "sharding", "pallas_kernels")
_READ_TENSORS = 64
_SHOWN = 3


def process_facts(config: EngineConfig) -> dict[str, str]:
    """What a process knows before it opens the model: versions, its own code, and the configuration."""
    facts = {f"version of {name}": version(name) for name in ("jax", "jaxlib", "flax")}
    return facts | {"code": _code_digest()} | dict(_values(config.model_dump(mode="json")))


def weights_digest(source: TensorSource) -> str:
    """Tells checkpoints apart without reading them: names, shapes and types of all tensors, and the values of the first
    vectors, such as norms."""
    digest = hashlib.sha256()
    names = sorted(source.names())
    for name in names:
        info = source.info(name)
        digest.update(f"{name} {info.shape} {info.stored}\n".encode())
    for name in [name for name in names if len(source.info(name).shape) == 1][:_READ_TENSORS]:
        digest.update(np.ascontiguousarray(source.read(name)).tobytes())
    return digest.hexdigest()[:16]


def model_facts(
    model: TransformerConfig, source: TensorSource, plan: CompilePlan, dtypes: str
) -> dict[str, str]:
    """What a process knows before it reads weights.

    Args:
        plan: every shape that will be compiled.
        dtypes: of weights and cache.
    """
    return {
        "model": str(model),
        "digest of the weights": weights_digest(source),
        "compile plan": str(plan),
        "dtypes": dtypes,
        "device": jax.local_devices()[0].device_kind,
    }


def differences(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What others have that differs from our own; empty if nothing does."""
    found = [
        f"{name} is {other.get(name, 'absent')}, not {own.get(name, 'absent')}"
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _values(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path in _OWN:
            continue
        if isinstance(value, Mapping):
            yield from _values(value, f"{path}.")
        else:
            yield path, str(value)


def _code_digest() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
