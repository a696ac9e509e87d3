"""Quantized weights in the layout that the kernels read.

Letters: O outputs, I inputs, J tiles of 128 inputs, P stored bytes of a tile (128, or 64 for int4), G scale groups.

Layout. ``values_JOP`` holds the weight by tiles of 128 inputs, so that what a program reads at a time (some outputs of
one tile) is one contiguous piece of memory whatever its number of outputs. An int4 tile is two planes: byte p holds
input p in its low bits and input 64 + p in its high ones, since a kernel cannot interleave registers but can multiply
two contiguous planes separately. The last tile is padded; inputs of padding count as 0, whatever it holds.

Value of an element: ``scale * (stored - zero)``. ``stored`` is a signed byte, an unsigned 4-bit number or a
float8_e4m3fn.

What a loader does:

* Makes the arrays with ``packing.from_awq``, ``from_gptq``, ``from_int8`` or ``from_fp8`` (numpy; layer by layer, so
  that no more than one layer is unpacked at a time), merges q/k/v and gate/up with ``packing.concatenate``, and puts
  them on the device. Merged parts need one ``order_I`` (GPTQ with ``desc_act`` has one per matrix; q, k and v of a
  layer usually share it, since they see the same activations) and one ``x_scale``; ``concatenate`` refuses others:
  keep such matrices apart.
* Reads ``quantization_config``: ``quant_method``; ``bits``; ``group_size`` (-1: one scale per output); ``desc_act``;
  ``checkpoint_format`` ("gptq": zero points are stored minus one; "gptq_v2": as they are); ``version`` of AWQ (only
  "gemm" is packed as ``from_awq`` expects); ``activation_scheme`` of fp8 ("dynamic": no ``x_scale``; "static": the
  checkpoint's ``input_scale``). Modules that the configuration excludes (``lm_head``, embeddings) stay unquantized.
* Shards outputs along axis 1 of the values, scales and zero points. Shards inputs along axis 0 of the three, at
  multiples of both 128 and the group, and only without ``order_I``; a scale per output is replicated. With dynamic
  activation scales each shard of inputs has scales of its own, so results differ a little from unsharded ones.
* Keeps scales in the dtype of the checkpoint, and refuses scales that are not finite.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax

Format = Literal["int8", "int4", "fp8"]
Activation = Literal["int8", "fp8"]

TILE = 128
"""Inputs in a tile."""
PLANE = 64
"""Inputs in each of the two planes of an int4 tile."""
INT4_MIDDLE = 8
"""Zero point of int4 weights that store none."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix ``[O, I]`` in few bits. See the module for the layout; ``packing`` makes and reads it.

    Attributes:
        values_JOP: int8 (for int4: the bits of two 4-bit numbers), or float8_e4m3fn.
        scale_GO: float16, bfloat16 or float32. One row without groups.
        zero_GO: int8, what ``stored`` is for the value 0. None: 8 for int4, 0 for the others.
        order_I: int32; input i of the stored matrix is input ``order_I[i]`` of the layer (GPTQ's activation order).
        x_scale: float32 scalar, scale of quantized activations; None: one per row, from its largest magnitude.
        format: of the stored values.
        group: inputs per scale; None: one scale per output.
        activation: in what the activations are quantized before the product; None: not at all.
    """

    values_JOP: jax.Array
    scale_GO: jax.Array
    zero_GO: jax.Array | None = None
    order_I: jax.Array | None = None
    x_scale: jax.Array | None = None
    format: Format = field(default="int8", metadata={"static": True})
    group: int | None = field(default=None, metadata={"static": True})
    activation: Activation | None = field(default=None, metadata={"static": True})


def problem(x_TI: jax.Array, w: QuantizedWeight, bias_O: jax.Array | None) -> str:
    """Why the arguments of the op do not fit together; empty if they do. Looks at shapes and dtypes only."""
    if w.values_JOP.ndim != 3 or x_TI.ndim != 2:
        return f"x has shape {x_TI.shape}, values {w.values_JOP.shape}; expected 2 and 3 axes"
    (J, O, P), I = w.values_JOP.shape, x_TI.shape[1]
    if (PLANE if w.format == "int4" else TILE) != P:
        return f"a tile of {w.format} weights has {P} bytes"
    if J != -(-I // TILE):
        return f"x has shape {x_TI.shape}, the weight {J} tiles of {TILE} inputs"
    if w.group is not None and not group_fits(w.group):
        return f"group {w.group}; allowed: 32, 64 and multiples of {TILE}"
    G = 1 if w.group is None else -(-J * TILE // w.group)
    if w.scale_GO.shape != (G, O):
        return f"scales have shape {w.scale_GO.shape}, expected {(G, O)}"
    if w.zero_GO is not None and w.zero_GO.shape != (G, O):
        return f"zero points have shape {w.zero_GO.shape}, expected {(G, O)}"
    if w.order_I is not None and w.order_I.shape != (I,):
        return f"order has shape {w.order_I.shape}, expected {(I,)}"
    if bias_O is not None and bias_O.shape != (O,):
        return f"bias has shape {bias_O.shape}, expected {(O,)}"
    if w.activation is not None and (
        w.activation != w.format or w.zero_GO is not None or w.group is not None
    ):
        return f"{w.activation} activations need {w.activation} weights without zero points and groups"
    return ""


def group_fits(group: int) -> bool:
    """Whether scales of so many inputs each fit the layout."""
    return group in (32, 64) or (group > 0 and group % TILE == 0)
