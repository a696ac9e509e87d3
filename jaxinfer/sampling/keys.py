"""Keys of random streams: one per sequence, decided on the host when the request arrives."""

import hashlib
import os
import struct
from collections.abc import Sequence

import numpy as np

_DOMAIN = b"jaxinfer.stream1"


def stream_key(seed: int | None, prompt_token_ids: Sequence[int], choice: int) -> tuple[int, int]:
    """Key data of a sequence's random stream, two uint32.

    The key depends on seed, prompt and choice index alone: different prompts of one call and different
    choices are independent, and neither the place in a list nor the number of choices matters. Without a seed
    each call draws fresh entropy.

    Args:
        seed: any signed 64-bit integer, or None.
        prompt_token_ids: ids of the prompt, each within int32.
        choice: index of the choice, from 0.
    """
    if seed is None:
        digest = os.urandom(8)
    else:
        ids_bytes = np.asarray(prompt_token_ids, dtype="<i4").tobytes()  # the same key on every machine
        fields = struct.pack("<qq", seed, choice)
        digest = hashlib.blake2b(fields + ids_bytes, digest_size=8, person=_DOMAIN).digest()
    first, second = struct.unpack("<II", digest)
    return first, second
