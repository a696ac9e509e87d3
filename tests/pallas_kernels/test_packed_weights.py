"""Packed weights: nothing is rounded on the way in or out."""

import jax
import numpy as np
import pytest

from pallas_kernels.linear.formats import FORMATS
from pallas_kernels.linear.packed import pack_dense, pack_gguf, stack, unpack
from tests.pallas_kernels.packed_cases import random_rows, random_weight


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("O", [1, 45, 64])
def test_unpacking_gives_the_bits_of_gguf(name: str, O: int) -> None:
    w, want_OI = random_weight(np.random.default_rng(O), name, O, 512)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(unpack)(w)).view(np.uint32), want_OI.view(np.uint32), strict=True
    )


@pytest.mark.parametrize("name", ["f32", "bf16", "f16"])
def test_dense_inputs_need_not_fill_a_unit(name: str) -> None:
    w, want_OI = random_weight(np.random.default_rng(0), name, 33, 77)
    np.testing.assert_array_equal(np.asarray(unpack(w)), want_OI, strict=True)
    assert w.shape == (33, 77)


@pytest.mark.parametrize("name", FORMATS)
def test_packing_costs_few_bytes(name: str) -> None:
    """Tiles are as large as the file's blocks, but for the factors of Q4_K, whose six bits take a byte."""
    fmt = FORMATS[name]
    plain = fmt.file_bytes * 32 if fmt.file_bytes else fmt.code_bytes
    assert plain <= fmt.unit_bytes <= 1.03 * plain
    assert fmt.unit_bytes % 64 == 0


def test_parts_are_stacked_in_order() -> None:
    rng = np.random.default_rng(0)
    parts = [random_weight(rng, name, O, 256) for name, O in (("Q4_K", 40), ("Q6_K", 7), ("f16", 33))]
    w = stack([stack([parts[0][0], parts[1][0]]), parts[2][0]])
    assert w.shape == (80, 256)
    np.testing.assert_array_equal(np.asarray(unpack(w)), np.concatenate([part[1] for part in parts]))


def test_what_cannot_be_packed_is_refused() -> None:
    rows = random_rows(np.random.default_rng(0), "Q4_1", 4, 64)
    with pytest.raises(ValueError, match="'Q3_K' is unknown; allowed: Q4_0"):
        pack_gguf("Q3_K", rows, (4, 64))
    with pytest.raises(ValueError, match=r"is not \[O, I\] = \(4, 96\)"):
        pack_gguf("Q4_1", rows, (4, 96))
    with pytest.raises(ValueError, match="int32"):
        pack_dense(np.zeros((2, 2), np.int32))
    a, b = (pack_dense(np.zeros((2, I), np.float32)) for I in (3, 4))
    with pytest.raises(ValueError, match="equal inputs"):
        stack([a, b])
