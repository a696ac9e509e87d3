"""What blocks of K and V look like between engines: whole logical heads, however many devices hold them."""

import math

import ml_dtypes
import msgspec
import numpy as np

MAX_PIECE_BLOCKS = 32
"""Most blocks of a message."""

_ML_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
}


def dtype_of(name: str) -> np.dtype:
    """Raises:
    TypeError: there is no such dtype.
    """
    return _ML_DTYPES.get(name) or np.dtype(name)


class BlockLayout(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of all layers.

    Attributes:
        heads, widths, groups: K, widths of a head in the two arrays, and KV group, of each layer.
        windows: of each group; None: no window.
        block_size: S.
        dtype: of the cache as it is stored.
    """

    heads: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]
    windows: tuple[int | None, ...]
    block_size: int
    dtype: str

    def layers_of(self, group: int) -> tuple[int, ...]:
        return tuple(layer for layer, of in enumerate(self.groups) if of == group)

    def shapes(self, layer: int, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes ``[C, K, S, h]`` of both arrays of a layer."""
        first, second = self.widths[layer]
        lead = (num_blocks, self.heads[layer], self.block_size)
        return (*lead, first), (*lead, second)

    def num_bytes(self, layers: tuple[int, ...], num_blocks: int) -> int:
        """Bytes of so many blocks of these layers, not quantized."""
        items = sum(math.prod(shape) for layer in layers for shape in self.shapes(layer, num_blocks))
        return items * dtype_of(self.dtype).itemsize


class EngineCard(msgspec.Struct, frozen=True, array_like=True):
    """What two engines must have in common to exchange blocks.

    Attributes:
        model: name of the model, for messages.
        fingerprint: digest of the model's configuration and of a sample of its weights, hexadecimal.
        transport, quantization: how blocks travel.
        version: of the messages.
    """

    model: str
    fingerprint: str
    layout: BlockLayout
    transport: str
    quantization: str
    version: int = 2


def mismatch(ours: EngineCard, theirs: EngineCard) -> str | None:
    """What differs between two engines, with both values; None if they can exchange blocks."""
    pairs = [
        (name, getattr(ours, name), getattr(theirs, name))
        for name in ("version", "fingerprint", "transport", "quantization")
    ]
    pairs += [(name, getattr(ours.layout, name), getattr(theirs.layout, name)) for name in _LAYOUT_FIELDS]
    parts = [f"{name} is {mine} here and {other} there" for name, mine, other in pairs if mine != other]
    if not parts:
        return None
    return f"this engine has {ours.model}, the other one {theirs.model}: {'; '.join(parts)}"


_LAYOUT_FIELDS = BlockLayout.__struct_fields__
