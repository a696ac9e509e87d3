"""The weight formats of the native CPU products: sizes, and how their numbers lie in memory.

A weight ``[O, I]`` is cut into *tiles* of ``LANES`` outputs, the last one padded with zeros. A tile is a sequence of
*units* of ``unit`` inputs each; in a unit every quantity is stored for all lanes side by side, so that a vector
register holds the same quantity of several outputs, and a sum over inputs never crosses lanes. A unit holds, in order:

* the codes, as ``[words, LANES]`` little-endian 32-bit words (see ``word_fields``; codes of eight bits are the bytes of
  a word), or for dense formats as ``[unit, LANES]`` numbers (bf16: two to a word);
* the factors: ``scale`` then ``minimum`` as float16 ``[LANES]`` each; for K formats then the scale of each block as a
  byte ``[unit / block, LANES]``, and for Q4_K the minimum of each block likewise.

A code c of block b stands for ``scale * block_scale[b] * (c - offset) - minimum * block_minimum[b]`` (Q4_1 adds its
minimum). GGUF's formats are described in the file ggml-quants.c of ggml; files are read by the package ``gguf``.
"""

from dataclasses import dataclass
from types import MappingProxyType

LANES = 32


@dataclass(frozen=True)
class Format:
    """One weight format.

    Attributes:
        index: the number that the C++ side knows it by.
        unit: inputs of a unit; a quantized row is a whole number of units, a dense one is padded to it.
        block: inputs that share a factor.
        bits: of a code.
        file_bytes: of a unit of one row in a GGUF file; 0 for dense formats.
        offset: subtracted from codes that stand for signed numbers.
        minimum: whether the unit has a minimum.
        block_factors: whether blocks have factors of their own (K formats).
    """

    index: int
    unit: int
    block: int
    bits: int
    file_bytes: int = 0
    offset: int = 0
    minimum: bool = False
    block_factors: bool = False

    @property
    def dense(self) -> bool:
        """Whether the codes are floating point numbers."""
        return self.file_bytes == 0

    @property
    def code_bytes(self) -> int:
        """Of the codes of a unit, all lanes."""
        return self.unit * LANES * self.bits // 8

    @property
    def unit_bytes(self) -> int:
        """Of a unit, all lanes: always a multiple of 64."""
        factors = 0 if self.dense else 2 + 2 * self.minimum
        blocks = self.unit // self.block * (1 + self.minimum) if self.block_factors else 0
        return self.code_bytes + LANES * (factors + blocks)

    def units(self, inputs: int) -> int:
        """Units of a row of that many inputs, rounded up."""
        return -(-inputs // self.unit)


FORMATS = MappingProxyType(
    {
        "f32": Format(0, unit=64, block=64, bits=32),
        "bf16": Format(1, unit=64, block=64, bits=16),
        "f16": Format(2, unit=64, block=64, bits=16),
        "Q4_0": Format(3, unit=32, block=32, bits=4, file_bytes=18, offset=8),
        "Q4_1": Format(4, unit=32, block=32, bits=4, file_bytes=20, minimum=True),
        "Q5_0": Format(5, unit=32, block=32, bits=5, file_bytes=22, offset=16),
        "Q8_0": Format(6, unit=32, block=32, bits=8, file_bytes=34),
        "Q4_K": Format(7, unit=256, block=32, bits=4, file_bytes=144, minimum=True, block_factors=True),
        "Q6_K": Format(8, unit=256, block=16, bits=6, file_bytes=210, offset=32, block_factors=True),
    }
)


def word_fields(bits: int) -> tuple[int, tuple[tuple[tuple[int, int, int], ...], ...]]:
    """How codes of 4, 5 or 6 bits lie in words: (inputs of a period, per input the pieces of its code).

    A piece is (word, shift in the word, bits), least significant first. Most codes are one piece, at a shift that is a
    multiple of ``bits``: the kernels mask it where it lies, because conversion to float32 is exact there too, and undo
    the shift in the activation. Five-bit and six-bit codes leave two bits of each word, which hold the last codes.
    """
    if bits == 4:
        return 8, tuple(((0, 4 * k, 4),) for k in range(8))
    per_word = 30 // bits
    whole = {5: 5, 6: 3}[bits]
    fields: list[tuple[tuple[int, int, int], ...]] = [
        ((word, bits * k, bits),) for word in range(whole) for k in range(per_word)
    ]
    if bits == 6:
        fields.append(tuple((word, 30, 2) for word in range(3)))
    else:
        fields.append(((0, 30, 2), (1, 30, 2), (4, 30, 1)))
        fields.append(((2, 30, 2), (3, 30, 2), (4, 31, 1)))
    return len(fields), tuple(fields)
