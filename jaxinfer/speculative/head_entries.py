"""The entries of a draft head on the device: its K and V, and what its last pass gave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.kv_cache.layout import KVCache
from jaxinfer.kv_cache.manager import BlockCopy, SlotMove
from jaxinfer.runner.block_copies import PoolCopies, copy_blocks, move_slots
from jaxinfer.scheduler.plan import ScheduledRow
from jaxinfer.speculative.heads.head import DraftHead
from jaxinfer.speculative.heads.programs import HeadFunctions, HeadLeaves


@dataclass(frozen=True)
class LoadedHead:
    """A head with its weights and its part of the KV cache.

    Attributes:
        kv_cache: of its layers; empty for Medusa.
    """

    head: DraftHead
    functions: HeadFunctions
    leaves: HeadLeaves
    kv_cache: KVCache
    copies: PoolCopies


@dataclass(frozen=True)
class Before:
    """Where the features of a batch's entries are.

    Attributes:
        before_T: int32, index in x of the feature that each entry joins; -1: that of its batch slot.
        slot_T: int32, batch slot.
    """

    before_T: np.ndarray | jax.Array
    slot_T: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], token_bucket: int, spare: int) -> "Before":
        """The first entry of each row joins the feature of its slot, a draft that of its parent, the others that of the
        entry before.

        Args:
            spare: batch slot of padding.
        """
        before_T, slot_T = np.full(token_bucket, -1, np.int32), np.full(token_bucket, spare, np.int32)
        first = 0
        for row in rows:
            plain = row.num_tokens - len(row.drafts)
            stop = first + row.num_tokens
            slot_T[first:stop] = row.seq.slot
            before_T[first + 1 : first + plain] = np.arange(first, first + plain - 1)
            before_T[first + plain : stop] = np.array(row.drafts.parents, np.int32) + first + plain
            first = stop
        return cls(before_T, slot_T)


class HeadEntries:
    """Runs a head over batches whose tokens are its entries.

    Args:
        hidden_size, dtype: of the target's activations.
    """

    def __init__(self, loaded: LoadedHead, plan: CompilePlan, hidden_size: int, dtype: jnp.dtype) -> None:
        self._loaded, self._plan = loaded, plan
        self._kv_cache = loaded.kv_cache
        shape = (plan.token_buckets[-1], hidden_size)
        self._hidden_XD, self._spare_XD = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    @property
    def hidden_XD(self) -> jax.Array:
        """Outputs of the last pass. The pass after the next one overwrites them."""
        return self._hidden_XD

    def compute(
        self,
        packed: np.ndarray | jax.Array,
        token_bucket: int,
        before: Before,
        newest_W: jax.Array,
        feature_WD: jax.Array,
        x_XD: jax.Array,
    ) -> None:
        """Computes the entries of a packed batch.

        Args:
            newest_W: resolves negative token ids.
            feature_WD: features by batch slot.
            x_XD: features by index; it may be ``hidden_XD``.
        """
        self._kv_cache, new_XD = self._loaded.functions.entries(
            self._kv_cache,
            self._spare_XD,
            self._loaded.leaves,
            feature_WD,
            x_XD,
            newest_W,
            packed,
            before.before_T,
            before.slot_T,
            token_bucket,
        )
        self._hidden_XD, self._spare_XD = new_XD, self._hidden_XD

    def logits(self, index_P: np.ndarray) -> jax.Array:
        """Float32 [P, V] of rows of the last pass."""
        return self._loaded.functions.logits(self._loaded.leaves, self._hidden_XD, index_P)

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        if copies and self._kv_cache:
            self._kv_cache = copy_blocks(self._loaded.copies, self._kv_cache, copies, self._plan)

    def move(self, moves: Sequence[SlotMove]) -> None:
        if self._kv_cache:
            self._kv_cache = move_slots(self._loaded.copies, self._kv_cache, moves, self._plan)

    def warm_ups(self) -> list[Callable[[], object]]:
        """The copies; ``compute`` and ``logits`` are not among them."""
        runs: list[Callable[[], object]] = [lambda: self.copy((BlockCopy(0, 0, 0),))]
        if self._plan.moved_slots:
            runs.append(lambda: self.move((SlotMove(0, 0, 0),)))
        return runs
