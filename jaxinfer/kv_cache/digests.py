"""Keys of cached blocks: 128-bit digests over an unambiguous encoding."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence

DIGEST_BYTES = 16


def root_digest(extra: Mapping[str, str | None]) -> bytes:
    """The parent of first blocks: separates chains that must not share (salt, adapter, media).

    Each part is encoded with its kind and its length, so an absent part differs from an empty one and no two
    combinations collide by concatenation.

    Args:
        extra: kind of key to its value; None means absent.
    """
    encoding = bytearray(b"jaxinfer.kv.1")
    for kind in sorted(extra):
        value = extra[kind]
        if value is not None:
            # JSON can spell lone surrogates; they are kept apart rather than refused.
            for part in (kind.encode(), value.encode("utf-8", "surrogatepass")):
                encoding += len(part).to_bytes(8, "little") + part
    return hashlib.blake2b(encoding, digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block: its parent's digest and its token ids, each as a 64-bit integer.

    Args:
        parent: digest of the block before it, or ``root_digest``.
        token_ids: ids; Python and numpy integers of the same value give the same digest. bool is refused.

    Raises:
        TypeError: an id is not an integer.
    """
    if bool in set(map(type, token_ids)):
        raise TypeError("token ids must be integers, not bool")
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def prompt_root(cache_salt: str | None) -> bytes:
    """The root of a request's chain."""
    return root_digest({"salt": cache_salt})


def prefix_digests(token_ids: Sequence[int], block_size: int, cache_salt: str | None = None) -> list[bytes]:
    """Digests of all full blocks of a prompt, the first one first: the keys under which prefix caches know them."""
    digests, parent = [], prompt_root(cache_salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_digest(parent, token_ids[start : start + block_size])
        digests.append(parent)
    return digests
