"""The host's table of sampling parameters, one row per batch slot, and the device inputs built from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.inputs import SamplingInputs
from jaxinfer.sampling.limits import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS
from jaxinfer.sampling.masks import ALL, TokenSequences, allow_all, allow_only, ban, num_words
from jaxinfer.sampling_params import SamplingParams

_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("key", np.uint32, 2),
        ("first_free", np.int32),  # end tokens are banned below this position
        ("processed", np.bool_),
        ("penalty", np.bool_),
        ("mask", np.bool_),
        ("bias", np.bool_),
        ("random", np.bool_),
        ("truncation", np.bool_),
        ("logprobs", np.bool_),
        ("named", np.bool_),
    ]
)
_COLUMNS = {
    "temperature_P": "temperature",
    "top_k_P": "top_k",
    "top_p_P": "top_p",
    "min_p_P": "min_p",
    "repetition_penalty_P": "repetition_penalty",
    "presence_penalty_P": "presence_penalty",
    "frequency_penalty_P": "frequency_penalty",
    "key_P2": "key",
    "processed_logprobs_P": "processed",
}
_FLAGS = {
    "any_penalty": "penalty",
    "any_bias": "bias",
    "any_random": "random",
    "any_truncation": "truncation",
    "any_logprobs": "logprobs",
    "any_named": "named",
}


@dataclass(frozen=True)
class _Lists:
    """Parameters of a slot that are not one number.

    Attributes:
        allowed_X: packed mask of the tokens that are allowed throughout, or None for all.
        end_token_ids: banned until ``min_tokens`` exist.
        bias: token ids and values.
        named: token ids.
    """

    allowed_X: np.ndarray | None
    end_token_ids: tuple[int, ...]
    bias: tuple[tuple[int, ...], tuple[float, ...]]
    named: tuple[int, ...]


@dataclass(frozen=True)
class _Neutral:
    """Device arrays of a bucket that are the same whenever no row needs them."""

    allowed_PX: jax.Array
    bias_ids_PB: jax.Array
    bias_values_PB: jax.Array
    named_ids_PX: jax.Array
    draft_P: jax.Array
    before_P: jax.Array
    history_PK: jax.Array


class Drafts(NamedTuple):
    """Drafts before the rows to sample: see ``draft_P`` and ``before_P`` of ``SamplingInputs``."""

    token: np.ndarray
    before: np.ndarray


class SamplingTable:
    """Sampling parameters of all batch slots; a step's inputs are gathered from it.

    Args:
        num_slots: batch slots; ``SamplerState`` has one more, for padded rows.
        vocab: V.
        max_drafts: K.
    """

    def __init__(self, num_slots: int, vocab: int, max_drafts: int = 0) -> None:
        self._vocab = vocab
        self._max_drafts = max_drafts
        self._spare = num_slots
        self._rows_W = np.zeros(num_slots + 1, _ROW)
        self._rows_W[:] = self._row(SamplingParams(temperature=0), (0, 0))
        self._lists: dict[int, _Lists] = {}
        self._neutral: dict[int, _Neutral] = {}

    def set(
        self,
        slot: int,
        params: SamplingParams,
        key: tuple[int, int],
        num_prompt: int,
        eos_token_ids: Sequence[int] = (),
        bad_words: TokenSequences = (),
    ) -> None:
        """Gives a slot to a sequence.

        Args:
            slot: below ``num_slots``.
            params: valid for the model.
            key: of the sequence's random stream, see ``stream_key``.
            num_prompt: tokens of the prompt; the output's first token has this position.
            eos_token_ids: end tokens of the model, which ``min_tokens`` bans unless the request ignores them.
            bad_words: token sequences of ``params.bad_words``; those of several tokens are not banned here.
        """
        assert 0 <= slot < self._spare, f"slot {slot} of {self._spare}"
        ends = dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))
        lists = _Lists(
            allowed_X=_static_mask(params.allowed_token_ids, bad_words, self._vocab),
            end_token_ids=tuple(ends) if params.min_tokens > 0 else (),
            bias=(tuple(params.logit_bias or ()), tuple((params.logit_bias or {}).values())),
            named=tuple(params.logprob_token_ids or ()),
        )
        row = self._row(params, key)
        row["mask"] = lists.allowed_X is not None
        row["first_free"] = num_prompt + params.min_tokens if lists.end_token_ids else 0
        self._rows_W[slot] = row
        self._lists[slot] = lists

    def clear(self, slot: int) -> None:
        """Makes a slot neutral again."""
        self._rows_W[slot] = self._rows_W[self._spare]
        self._lists.pop(slot, None)

    def allowed(self, slot: int, position: int) -> np.ndarray | None:
        """The bans of a slot at a position as one packed mask, uint32 [X]; None if there are none.

        Args:
            slot: of a sequence.
            position: of the token to be sampled.
        """
        lists = self._lists.get(slot)
        if lists is None:
            return None
        banned = lists.end_token_ids if position < self._rows_W["first_free"][slot] else ()
        if lists.allowed_X is None and not banned:
            return None
        mask_X = allow_all(self._vocab) if lists.allowed_X is None else lists.allowed_X.copy()
        ban(mask_X, banned)
        return mask_X

    def build(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        bucket: int,
        masks: Mapping[int, np.ndarray] | None = None,
        drafts: Drafts | None = None,
    ) -> SamplingInputs:
        """Inputs of a step.

        Args:
            slots: batch slot of each row to sample, int.
            positions: position of the token to be sampled in each row, int.
            bucket: P, at least the number of rows; the rest is padding.
            masks: row -> packed mask that replaces the table's own, where it depends on the tokens before.
            drafts: of the rows, if there are any.

        Returns:
            NumPy arrays, which cost less to pass to a compiled function than to put on the device first, and
            large device arrays that are shared between steps while no row needs them.
        """
        assert len(slots) <= bucket, f"{len(slots)} rows in a bucket of {bucket}"
        slot_P = _padded(slots, bucket, self._spare)
        position_P = _padded(positions, bucket, 0)
        rows_P = self._rows_W[slot_P]
        arrays: dict[str, Any] = {
            name: np.ascontiguousarray(rows_P[column]) for name, column in _COLUMNS.items()
        }
        arrays |= {name: np.bool_(rows_P[column].any()) for name, column in _FLAGS.items()}
        masked_P = rows_P["mask"] | (position_P < rows_P["first_free"])
        arrays["any_mask"] = np.bool_(bool(masks) or masked_P.any())
        arrays["any_draft"] = np.bool_(False)
        arrays |= vars(self._neutral_of(bucket))
        if arrays["any_mask"]:
            arrays["allowed_PX"] = self._allowed_of(slot_P, position_P, masked_P, masks or {})
        if arrays["any_bias"]:
            arrays["bias_ids_PB"], arrays["bias_values_PB"] = self._bias_of(slot_P, rows_P["bias"])
        if arrays["any_named"]:
            arrays["named_ids_PX"] = self._named_of(slot_P, rows_P["named"])
        if drafts is not None:
            arrays |= self._drafts_of(drafts, bucket)
        return SamplingInputs(slot_P=cast(Any, slot_P), position_P=cast(Any, position_P), **arrays)

    def _row(self, params: SamplingParams, key: tuple[int, int]) -> np.ndarray:
        """The numbers of a request, in the form the device wants: greedy rows have no truncation."""
        row = np.zeros((), _ROW)
        row["top_k"], row["top_p"] = self._vocab, 1
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            row[name] = vars(params)[name]
        row["key"] = key
        row["penalty"] = params.penalised
        row["bias"] = bool(params.logit_bias)
        row["logprobs"] = params.wants_logprobs
        row["processed"] = params.wants_logprobs and params.logprobs_mode == "processed"
        row["named"] = bool(params.logprob_token_ids)
        if not params.greedy:
            row["random"] = True
            row["temperature"] = params.temperature
            row["top_k"] = min(params.top_k or self._vocab, self._vocab)
            row["top_p"], row["min_p"] = params.top_p, params.min_p
            row["truncation"] = row["top_k"] < self._vocab or row["top_p"] < 1 or row["min_p"] > 0
        return row

    def _neutral_of(self, bucket: int) -> _Neutral:
        if bucket not in self._neutral:
            self._neutral[bucket] = _Neutral(
                allowed_PX=jnp.full((bucket, num_words(self._vocab)), ALL),
                bias_ids_PB=jnp.zeros((bucket, MAX_LOGIT_BIAS), jnp.int32),
                bias_values_PB=jnp.zeros((bucket, MAX_LOGIT_BIAS), jnp.float32),
                named_ids_PX=jnp.zeros((bucket, MAX_LOGPROB_TOKEN_IDS), jnp.int32),
                draft_P=jnp.full(bucket, -1, jnp.int32),
                before_P=jnp.full(bucket, -1, jnp.int32),
                history_PK=jnp.full((bucket, self._max_drafts), self._vocab, jnp.int32),
            )
        return self._neutral[bucket]

    def _allowed_of(
        self,
        slot_P: np.ndarray,
        position_P: np.ndarray,
        masked_P: np.ndarray,
        masks: Mapping[int, np.ndarray],
    ) -> np.ndarray:
        allowed_PX = np.full((len(slot_P), num_words(self._vocab)), ALL)
        for r in set(np.flatnonzero(masked_P).tolist()) - masks.keys():
            mask_X = self.allowed(int(slot_P[r]), int(position_P[r]))
            assert mask_X is not None
            allowed_PX[r] = mask_X
        for r, mask_X in masks.items():
            allowed_PX[r] = mask_X
        return allowed_PX

    def _drafts_of(self, drafts: Drafts, bucket: int) -> dict[str, Any]:
        history_PK = np.full((bucket, self._max_drafts), self._vocab, np.int32)
        rows = np.flatnonzero(drafts.before >= 0)
        at = rows
        for back in range(self._max_drafts):
            history_PK[rows, back] = drafts.token[at]
            at = drafts.before[at]
            deeper = drafts.before[at] >= 0
            rows, at = rows[deeper], at[deeper]
        return {
            "draft_P": _padded(drafts.token, bucket, -1),
            "before_P": _padded(drafts.before, bucket, -1),
            "history_PK": history_PK,
            "any_draft": np.bool_(True),
        }

    def _bias_of(self, slot_P: np.ndarray, biased_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids_PB = np.zeros((len(slot_P), MAX_LOGIT_BIAS), np.int32)
        values_PB = np.zeros((len(slot_P), MAX_LOGIT_BIAS), np.float32)
        for r in np.flatnonzero(biased_P):
            ids, values = self._lists[int(slot_P[r])].bias
            ids_PB[r, : len(ids)], values_PB[r, : len(ids)] = ids, values
        return ids_PB, values_PB

    def _named_of(self, slot_P: np.ndarray, named_P: np.ndarray) -> np.ndarray:
        ids_PX = np.zeros((len(slot_P), MAX_LOGPROB_TOKEN_IDS), np.int32)
        for r in np.flatnonzero(named_P):
            named = self._lists[int(slot_P[r])].named
            ids_PX[r, : len(named)] = named
        return ids_PX


def _padded(values: np.ndarray, bucket: int, fill: int) -> np.ndarray:
    padded_P = np.full(bucket, fill, np.int32)
    padded_P[: len(values)] = values
    return padded_P


def _static_mask(allowed: Sequence[int] | None, bad_words: TokenSequences, vocab: int) -> np.ndarray | None:
    """What is allowed at every position: the allowed tokens without bad words of one token; None for all."""
    banned = [ids[0] for ids in bad_words if len(ids) == 1]
    if allowed is None and not banned:
        return None
    mask_X = allow_all(vocab) if allowed is None else allow_only(allowed, vocab)
    ban(mask_X, banned)
    return mask_X
