"""A block pool with prefix cache, and sequences that are computed without a model."""

from jaxinfer.kv_cache.manager import BlockCopy, KVCacheManager
from jaxinfer.request import Sequence
from tests.support.sequences import make_sequence

BLOCK = 4


def manager(
    num_blocks: int = 9, windows: tuple[int | None, ...] = (None,), caching: bool = True
) -> KVCacheManager:
    return KVCacheManager((num_blocks,) * len(windows), BLOCK, windows, caching)


def compute(kv: KVCacheManager, seq: Sequence, num_tokens: int | None = None) -> list[BlockCopy]:
    """Admits a sequence and computes it, or its first tokens, in one step."""
    hit = kv.find(seq)
    count = num_tokens or seq.num_tokens
    copies = kv.admit(seq, hit, count, seq.num_tokens)
    assert copies is not None
    seq.num_computed = seq.num_committed = count
    kv.commit(seq)
    return copies


def grow(kv: KVCacheManager, seq: Sequence, token: int) -> None:
    """One decode step."""
    seq.output_token_ids.append(token)
    assert kv.extend(seq, seq.num_tokens)
    seq.num_computed = seq.num_committed = seq.num_tokens
    kv.commit(seq)


def seq_of(prompt, kv: KVCacheManager, **options) -> Sequence:
    return make_sequence(prompt, num_groups=len(kv.windows), **options)
