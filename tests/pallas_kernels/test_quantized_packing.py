"""Packings of checkpoints against plain unpacking, bit by bit, from the description of their formats."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import nibbles, packing

O, I, GROUP = 24, 256, 64
G = I // GROUP


def _pack(numbers: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Along the last axis: bits j of a word hold number ``order[j]`` of the word's numbers."""
    n = 32 // bits
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // n), np.uint32)
    for word in range(words.shape[-1]):
        for j in range(n):
            words[..., word] |= numbers[..., word * n + order[j]].astype(np.uint32) << np.uint32(bits * j)
    return words.view(np.int32)


def _numbers(bits: int, least_zero: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(bits)
    q_IO = rng.integers(0, 2**bits, (I, O))
    zero_GO = rng.integers(least_zero, 2**bits, (G, O))
    return q_IO, zero_GO, rng.uniform(0.01, 0.1, (G, O)).astype(np.float16)


def _plain(q_IO: np.ndarray, zero_GO: np.ndarray, scale_GO: np.ndarray, group_I: np.ndarray) -> np.ndarray:
    """``[O, I]``, one element at a time."""
    w_OI = np.zeros((O, I), np.float32)
    for i in range(I):
        for o in range(O):
            g = group_I[i]
            w_OI[o, i] = np.float32(scale_GO[g, o]) * (int(q_IO[i, o]) - int(zero_GO[g, o]))
    return w_OI


def test_awq() -> None:
    q_IO, zero_GO, scale_GO = _numbers(4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    w = packing.from_awq(_pack(q_IO, 4, order), _pack(zero_GO, 4, order), scale_GO)
    assert w.group == GROUP
    np.testing.assert_array_equal(
        packing.dequantize(w), _plain(q_IO, zero_GO, scale_GO, np.arange(I) // GROUP)
    )


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(bits: int, v2: bool, act_order: bool) -> None:
    q_IO, zero_GO, scale_GO = _numbers(bits, least_zero=0 if v2 else 1)
    group_I = np.arange(I) // GROUP
    if act_order:
        group_I = np.random.default_rng(0).permutation(group_I)
    order = tuple(range(32 // bits))
    qweight = np.ascontiguousarray(_pack(q_IO.T, bits, order).T)
    qzeros = _pack(zero_GO - (0 if v2 else 1), bits, order)
    w = packing.from_gptq(qweight, qzeros, scale_GO, group_I.astype(np.int32), bits=bits, v2=v2)
    assert (w.order_I is not None) == act_order
    order_I = np.arange(I) if w.order_I is None else np.asarray(w.order_I)
    np.testing.assert_array_equal(packing.dequantize(w), _plain(q_IO, zero_GO, scale_GO, group_I)[:, order_I])


def test_gptq_without_g_idx_and_with_the_usual_zero_point() -> None:
    q_IO, _, scale_GO = _numbers(4)
    qweight = np.ascontiguousarray(_pack(q_IO.T, 4, tuple(range(8))).T)
    w = packing.from_gptq(qweight, np.full((G, O // 8), 0x77777777, np.int32), scale_GO)
    assert w.zero_GO is None
    assert w.order_I is None
    want = _plain(q_IO, np.full((G, O), 8), scale_GO, np.arange(I) // GROUP)
    np.testing.assert_array_equal(packing.dequantize(w), want)


def test_gptq_zero_point_16_of_version_1() -> None:
    q_IO, _, scale_GO = _numbers(4)
    qweight = np.ascontiguousarray(_pack(q_IO.T, 4, tuple(range(8))).T)
    w = packing.from_gptq(qweight, np.full((G, O // 8), -1, np.int32), scale_GO)
    assert (np.asarray(w.zero_GO) == 16).all()


def test_gptq_refuses_what_the_layout_cannot_hold() -> None:
    q_IO, zero_GO, scale_GO = _numbers(4)
    qweight = np.ascontiguousarray(_pack(q_IO.T, 4, tuple(range(8))).T)
    qzeros = _pack(zero_GO, 4, tuple(range(8)))
    with pytest.raises(ValueError, match="64 inputs each"):
        packing.from_gptq(qweight, qzeros, scale_GO, np.zeros(I, np.int32))
    with pytest.raises(ValueError, match="3 bits"):
        packing.from_gptq(qweight, qzeros, scale_GO, bits=3)
    with pytest.raises(ValueError, match="groups of 32, 64"):
        packing.from_gptq(qweight, qzeros[:3], scale_GO[:3])


@pytest.mark.parametrize("inputs", [64, 128, 200, 576])
@pytest.mark.parametrize("group", [None, 32, 64, 128])
def test_quantizers_round_to_the_nearest(inputs: int, group: int | None) -> None:
    w_OI = np.random.default_rng(0).normal(size=(O, inputs)).astype(np.float32)
    size = group or inputs
    padded = np.pad(w_OI, ((0, 0), (0, -inputs % size))).reshape(O, -1, size)
    largest, low, high = np.abs(padded).max(2), np.minimum(padded.min(2), 0), np.maximum(padded.max(2), 0)
    cases = [
        (packing.quantize_int8(w_OI, group), largest / 127 / 2),
        (packing.quantize_int4(w_OI, group), largest / 7 / 2),
        # A rounded zero point moves the range by up to half a step.
        (packing.quantize_int4(w_OI, group, zero_point=True), (high - low) / 15),
    ]
    for w, step in cases:
        error = np.abs(packing.dequantize(w)[:, :inputs] - w_OI)
        assert (error <= np.repeat(step, size, axis=1)[:, :inputs] * 1.0001).all()


@pytest.mark.parametrize("per_tensor", [False, True])
def test_fp8_keeps_three_bits(per_tensor: bool) -> None:
    w_OI = np.random.default_rng(0).normal(size=(O, I)).astype(np.float32)
    w = packing.quantize_fp8(w_OI, per_tensor=per_tensor)
    error = np.abs(packing.dequantize(w) - w_OI)
    assert (error <= np.abs(w_OI) / 16 + 0.002 * np.abs(w_OI).max()).all()
    if per_tensor:
        assert len(np.unique(np.asarray(w.scale_GO))) == 1


def test_fp8_scales_of_checkpoints() -> None:
    w_OI = np.random.default_rng(0).normal(size=(256, 384)).astype(ml_dtypes.float8_e4m3fn)
    plain = w_OI.astype(np.float32)
    one = packing.from_fp8(w_OI, np.full(1, 0.5, np.float32), np.ones((1,), np.float32))
    np.testing.assert_array_equal(packing.dequantize(one), plain * np.float32(0.5))
    assert one.x_scale == 1
    per_output = np.linspace(0.1, 1, 256, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(packing.dequantize(packing.from_fp8(w_OI, per_output)), plain * per_output)
    blocks = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    want = plain * np.kron(blocks, np.ones((128, 128), np.float32))
    np.testing.assert_array_equal(packing.dequantize(packing.from_fp8(w_OI, blocks, activation=None)), want)
    with pytest.raises(ValueError, match="weight-only"):
        packing.from_fp8(w_OI, blocks)


def test_int8_of_checkpoints() -> None:
    w_OI = np.random.default_rng(0).integers(-128, 128, (O, I), dtype=np.int8)
    scale = np.linspace(0.1, 1, O, dtype=np.float32)
    w = packing.from_int8(w_OI, scale, "int8")
    np.testing.assert_array_equal(packing.dequantize(w), w_OI.astype(np.float32) * scale[:, None])


def test_concatenate() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(n, I)).astype(np.float32) for n in (8, 24)]
    symmetric, other = packing.quantize_int4(parts[0]), packing.quantize_int4(parts[1], zero_point=True)
    both = packing.concatenate((symmetric, other))
    want = np.concatenate([packing.dequantize(symmetric), packing.dequantize(other)])
    np.testing.assert_array_equal(packing.dequantize(both), want)
    with pytest.raises(ValueError, match="other formats"):
        packing.concatenate((symmetric, packing.quantize_int4(parts[1], 64)))


class TestAssembly:
    """The PTX that unpacks int4 weights cannot run here, so its few instructions are interpreted."""

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
    @pytest.mark.parametrize("shift", [0, 4])
    @pytest.mark.parametrize("zero", [0, 8, 16])
    def test_unpacks(self, dtype: type, shift: int, zero: int) -> None:
        pairs = np.arange(256, dtype=np.uint8).reshape(-1, 4)
        offset = np.full(2, -nibbles.OFFSETS[jnp.dtype(dtype)] - zero, dtype)
        for four in pairs:
            inputs = [four.view(np.uint32)[0], offset.view(np.uint32)[0], offset.view(np.uint32)[0]]
            out = _run_ptx(nibbles.assembly(jnp.dtype(dtype), shift), inputs, dtype)
            want = ((four >> shift) & 15).astype(np.float32) - zero
            np.testing.assert_array_equal(np.array(out, np.uint32).view(dtype).astype(np.float32), want)


def _run_ptx(text: str, inputs: list[np.uint32], dtype: type) -> list[int]:
    """``$0`` and ``$1`` after the instructions, with inputs in ``$2`` to ``$4``."""
    registers = {f"${2 + i}": int(value) for i, value in enumerate(inputs)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"^(?!\.reg)(\S+) (.*);$", text, re.MULTILINE):
        to, *names = line[1].split(", ")
        a, *rest = [value(name) for name in names]
        match line[0]:
            case "mov.b32":
                registers[to] = a
            case "shr.u32":
                registers[to] = a >> rest[0]
            case "and.b32":
                registers[to] = a & rest[0]
            case "prmt.b32":
                source = a.to_bytes(4, "little") + rest[0].to_bytes(4, "little")
                chosen = bytes(source[rest[1] >> 4 * i & 7] for i in range(4))
                registers[to] = int.from_bytes(chosen, "little")
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                x, y, z = (np.array([v], np.uint32).view(dtype).astype(np.float64) for v in (a, *rest))
                registers[to] = int((x * y + z).astype(dtype).view(np.uint32)[0])
            case unknown:
                raise AssertionError(unknown)
    return [registers["$0"], registers["$1"]]
