"""Which products round their inputs: ``model.activations``."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from jaxinfer.checkpoints.stored_form import StoredForm
from pallas_kernels.linear.native import products_of_bfloat16
from pallas_kernels.ops import Ops

logger = logging.getLogger(__name__)


def with_rounded_activations(ops: Ops, stored: bool, activations: Literal["int8", "bfloat16"]) -> Ops:
    """The ops whose products round their inputs.

    Raises:
        ValueError: no kernels do that, or none of the weights is held as stored.
    """
    linear = ops.linear_int8 if activations == "int8" else ops.linear_bf16
    if linear is None or not stored:
        why = "model.weights is 'float'" if linear else "the kernels that were chosen do not round them"
        raise ValueError(f"model.activations is {activations!r}, but {why}; allowed is float")
    if activations == "bfloat16" and not products_of_bfloat16():
        logger.warning(
            "model.activations is 'bfloat16', but this processor has no such products: float is faster here"
        )
    return replace(ops, linear=linear)


def check_rounding(activations: str, forms: Mapping[str, StoredForm]) -> None:
    """Raises:
    ValueError: activations are to be rounded for a kind of weight that the checkpoint does not have.
    """
    if activations == "int8" and not any(form.quantized for form in forms.values()):
        what = "quantized"
    elif activations == "bfloat16" and not any("bf16" in form.formats for form in forms.values()):
        what = "in bfloat16"
    else:
        return
    raise ValueError(
        f"model.activations is {activations!r}, but no weight of this checkpoint is held {what}; allowed is float"
    )
