"""K and V as 8-bit integers on their way between engines: lossy."""

import numpy as np

_LARGEST = 127.0


def quantize(x_CKSh: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds to int8 with one scale per block and head.

    Returns:
        int8 ``[C, K, S, h]`` and float32 ``[C, K]``. The error of a value is at most half its scale, which is the
        largest magnitude of the block and head over 127. Values that are not finite make the scale not finite.
    """
    wide_CKSh = x_CKSh.astype(np.float32)
    scale_CK = np.abs(wide_CKSh).max(axis=(2, 3)) / _LARGEST
    safe_CK11 = np.where(scale_CK > 0, scale_CK, 1.0)[:, :, None, None]
    with np.errstate(invalid="ignore"):
        return np.rint(wide_CKSh / safe_CK11).astype(np.int8), scale_CK.astype(np.float32)


def dequantize(q_CKSh: np.ndarray, scale_CK: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values ``q * scale``, in the dtype of the cache."""
    return (q_CKSh.astype(np.float32) * scale_CK[:, :, None, None]).astype(dtype)
