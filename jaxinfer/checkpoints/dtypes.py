"""Which dtype the weights of a model are computed in."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.tensor_source import TensorSource

logger = logging.getLogger(__name__)

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
AUTO = "auto"
_QUANTIZED = "quantized"
_QUANTIZED_DEFAULT = "bfloat16"


def resolve_dtype(
    requested: str | None, hf: Mapping[str, Any], source: TensorSource
) -> tuple[jnp.dtype[Any], str]:
    """Chooses the dtype of the parameters.

    The first of these that says anything decides:

    1. ``requested`` (command line or configuration file), unless it is None or "auto";
    2. ``dtype``, then 3. ``torch_dtype`` of the model's configuration;
    4. the same two keys of its nested ``text_config``;
    5. the dtype most elements are stored in; bfloat16 if any tensor is stored quantized (4 to 8 bits with
       scales: float32 would hold no more information and take twice the memory).

    A null or absent key says nothing. The choice and the casts it implies are logged, at level warning if it
    changes the dtype that most weights are stored in (memory doubles, or range or precision is lost).

    Returns:
        The dtype (float32, float16 or bfloat16), and the reason, one sentence for a start-up log.

    Raises:
        CheckpointError: the deciding value is not one of the three; the message names where it was given.
    """
    stored = _stored_elements(source)
    name, where = _declared(requested, hf) or _default(stored)
    if name not in DTYPES:
        raise CheckpointError(f"{where} is {name!r}; allowed are {', '.join(DTYPES)}")
    casts = [other for other in stored if other not in (name, _QUANTIZED)]
    reason = f"{name}, from {where}" + (f"; tensors stored as {', '.join(casts)} are cast" if casts else "")
    changed = bool(stored) and stored.most_common(1)[0][0] in casts
    logger.log(logging.WARNING if changed else logging.INFO, "weights are %s", reason)
    return jnp.dtype(DTYPES[name]), reason


def _declared(requested: str | None, hf: Mapping[str, Any]) -> tuple[str, str] | None:
    if requested is not None and requested != AUTO:
        return requested, "the requested dtype"
    nested = hf.get("text_config") or {}
    for values, prefix in ((hf, ""), (nested, "text_config.")):
        for key in ("dtype", "torch_dtype"):
            value = values.get(key)
            if value is not None:
                return str(value).removeprefix("torch."), f"{prefix}{key} of the model's configuration"
    return None


def _stored_elements(source: TensorSource) -> Counter[str]:
    """Number of elements by stored dtype; all quantized types count as one."""
    elements: Counter[str] = Counter()
    for info in map(source.info, source.names()):
        dtype = _QUANTIZED if info.quantized else info.dtype.name
        elements[dtype] += int(np.prod(info.shape, dtype=np.int64))
    return elements


def _default(stored: Counter[str]) -> tuple[str, str]:
    if not stored:
        raise CheckpointError("no dtype is declared and the checkpoint has no tensors")
    if _QUANTIZED in stored:
        return _QUANTIZED_DEFAULT, "the default for quantized weights"
    return stored.most_common(1)[0][0], "the dtype most weights are stored in"
