"""What the machine can do at most: a stream read of a buffer, and a square product of matrices; numpy and threads."""

import importlib.util
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

SQUARES = (512, 1024, 2048)


@dataclass(frozen=True)
class Limits:
    """Attributes:
    read: bytes per second, reading a buffer over and over.
    products: float32 operations per second of the best square product.
    """

    read: float
    products: float


def best_seconds(call: Callable[[], object], repetitions: int) -> float:
    """The shortest of several runs, after one to warm up: a limit is what is possible."""
    call()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def stream_read(num_bytes: int, threads: int, repetitions: int) -> float:
    """Bytes per second when each thread reads its part of a buffer of that size."""
    parts_TX = np.ones((threads, num_bytes // 4 // threads), np.float32)
    # A product of an array with itself reads it once; numpy releases the interpreter lock meanwhile.
    with ThreadPoolExecutor(threads) as pool:
        seconds = best_seconds(lambda: list(pool.map(lambda part: np.dot(part, part), parts_TX)), repetitions)
    return parts_TX.nbytes / seconds


def square_products(repetitions: int, sizes: tuple[int, ...], with_torch: bool) -> float:
    """Float32 operations per second of numpy's product (OpenBLAS), and of PyTorch's (oneDNN or MKL) if it is there;
    the best of some sizes."""
    rates = []
    for size in sizes:
        a = np.ones((size, size), np.float32)
        calls: list[Callable[[], object]] = [lambda a=a: a @ a]
        if with_torch and importlib.util.find_spec("torch"):
            import torch

            t = torch.from_numpy(a)
            calls.append(lambda t=t: t @ t)
        rates += [2 * size**3 / best_seconds(call, repetitions) for call in calls]
    return max(rates)


def measure_limits(num_bytes: int, threads: int) -> Limits:
    """See ``Limits``; the buffer has the size of the weights, so that it fits the same caches."""
    return Limits(stream_read(num_bytes, threads, 10), square_products(10, SQUARES, with_torch=True))


def quick_limits() -> Limits:
    """The same in milliseconds, for smoke runs: no limits of anything."""
    return Limits(stream_read(1 << 20, 2, 1), square_products(1, (64,), with_torch=False))
