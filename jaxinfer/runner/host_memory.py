"""The C library's allocator, set for XLA on the CPU."""

import ctypes
import logging
import platform

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Makes glibc keep large freed buffers instead of returning them to the kernel.

    XLA on the CPU allocates its temporaries anew at each execution. Beyond the default threshold of 32 MB each of them
    is mapped, zeroed page by page, and unmapped again: page faults then cost more than the computation.

    Returns:
        Whether the allocator could be set (glibc only).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    done = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    logger.info("host allocator: freed buffers are %s", "kept" if done else "returned to the kernel")
    return done
