"""Keys of cached blocks."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from jaxinfer.kv_cache.digests import DIGEST_BYTES, block_digest, root_digest


def test_kvc_03_extra_keys_are_tagged():
    combinations = [
        {"adapter": "X", "salt": None},
        {"adapter": None, "salt": "X"},
        {"adapter": "X", "salt": ""},
        {"adapter": "", "salt": "X"},
        {"adapter": "ab", "salt": "c"},
        {"adapter": "a", "salt": "bc"},
        {},
    ]
    keys = [block_digest(root_digest(extra), [1, 2, 3, 4]) for extra in combinations]
    assert len(set(keys)) == len(keys)
    assert root_digest({"adapter": None, "salt": None}) == root_digest({})


def test_kvc_03_salt_isolates_the_whole_chain():
    a, b = root_digest({"salt": "s1"}), root_digest({"salt": "s2"})
    for block in range(3):
        a, b = block_digest(a, [block] * 4), block_digest(b, [block] * 4)
        assert a != b


def test_kvc_04_no_collisions_of_shifted_and_swapped_ids():
    rng = random.Random(0)
    parent, other = root_digest({}), root_digest({"salt": "x"})
    seen: dict[bytes, tuple] = {}

    def add(root: bytes, ids: list[int]) -> None:
        key = (root, tuple(ids))
        assert seen.setdefault(block_digest(root, ids), key) == key

    for _ in range(4000):
        ids = [rng.randrange(50_000) for _ in range(16)]
        add(parent, ids)
        add(other, ids)
        for j in range(15):
            shifted = list(ids)
            shifted[j] += 31
            shifted[j + 1] -= 1
            add(parent, shifted)
            swapped = list(ids)
            swapped[j], swapped[j + 1] = swapped[j + 1], swapped[j]
            add(parent, swapped)
        add(block_digest(parent, ids[:15]), ids[15:])
    assert DIGEST_BYTES >= 16


def test_kvc_04_spellings_of_the_same_id():
    root = root_digest({})
    assert block_digest(root, [1, 2]) == block_digest(root, list(np.array([1, 2])))
    assert block_digest(root, [-1, 2]) != block_digest(root, [-2, 2])
    with pytest.raises(TypeError, match="bool"):
        block_digest(root, [True, 2])


def test_kvc_04_same_digest_in_every_process():
    code = (
        "from jaxinfer.kv_cache.digests import *;"
        "print(block_digest(root_digest({'salt': 's'}), list(range(16))).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(found) == 1
