"""Device data of sampling: inputs of a step, state that lives between steps, and results, as pytrees."""

from dataclasses import dataclass

import jax
from jax.tree_util import register_dataclass


@register_dataclass
@dataclass(frozen=True)
class SamplingInputs:
    """Parameters of the P rows to sample. One structure for every mix of requests: neutral, never None.

    Attributes:
        temperature_P: float32; 0 means greedy.
        top_k_P: int32; V when off.
        top_p_P: float32; 1 when off.
        min_p_P: float32; 0 when off.
        repetition_penalty_P: float32; 1 when off. Covers prompt and output.
        presence_penalty_P, frequency_penalty_P: float32; 0 when off. Cover the output.
        key_P2: uint32 [P, 2], key data of the sequence's random stream.
        position_P: int32, position of the token to be sampled; the counter of the stream.
        slot_P: int32, batch slot of the sequence in ``SamplerState``; padding uses the last, spare slot.
        allowed_PX: uint32 [P, ceil(V / 32)], bit ``v % 32`` of word ``v // 32`` allows token v.
        bias_ids_PB, bias_values_PB: int32 and float32; unused entries are (0, 0.0).
        named_ids_PX: int32 [P, MAX_LOGPROB_TOKEN_IDS], tokens whose log-probabilities are asked for by id.
        processed_logprobs_P: bool; log-probabilities of the processed law instead of the raw one.
        draft_P: int32, the draft that the row is sampled behind, or -1.
        before_P: int32, the row whose token must equal that draft, for this row to count; -1: it always counts.
        history_PK: int32, that draft and those before it, for the penalties; V where there is none.
        any_draft, any_penalty, any_mask, any_bias, any_random, any_truncation, any_logprobs, any_named: bool scalars
            that switch off the branches that no row needs.

    The host builds them as NumPy arrays where they are small; a compiled function takes both kinds.
    """

    temperature_P: jax.Array
    top_k_P: jax.Array
    top_p_P: jax.Array
    min_p_P: jax.Array
    repetition_penalty_P: jax.Array
    presence_penalty_P: jax.Array
    frequency_penalty_P: jax.Array
    key_P2: jax.Array
    position_P: jax.Array
    slot_P: jax.Array
    allowed_PX: jax.Array
    bias_ids_PB: jax.Array
    bias_values_PB: jax.Array
    named_ids_PX: jax.Array
    processed_logprobs_P: jax.Array
    draft_P: jax.Array
    before_P: jax.Array
    history_PK: jax.Array
    any_draft: jax.Array
    any_penalty: jax.Array
    any_mask: jax.Array
    any_bias: jax.Array
    any_random: jax.Array
    any_truncation: jax.Array
    any_logprobs: jax.Array
    any_named: jax.Array


@register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """What the sampler remembers per batch slot; W slots and a spare one for padding.

    Attributes:
        newest_W: int32, the last sampled token.
        output_counts_WV: int32, how often each token occurs in the output.
        prompt_seen_WV: bool, whether each token occurs in the prompt.
    """

    newest_W: jax.Array
    output_counts_WV: jax.Array
    prompt_seen_WV: jax.Array


@register_dataclass
@dataclass(frozen=True)
class LogprobOutputs:
    """Log-probabilities of P positions.

    Attributes:
        chosen_P: float32, of the token at that position.
        rank_P: int32, 1 + number of tokens that are strictly more likely.
        top_ids_PX, top_values_PX: the MAX_LOGPROBS most likely tokens, best first.
        named_values_PX: of ``named_ids_PX``.
    """

    chosen_P: jax.Array
    rank_P: jax.Array
    top_ids_PX: jax.Array
    top_values_PX: jax.Array
    named_values_PX: jax.Array


@register_dataclass
@dataclass(frozen=True)
class SamplerOutputs:
    """Result of sampling P rows.

    Attributes:
        token_P: int32.
        healthy_P: bool; False where the model's logits held NaN or +inf, or left no token at all.
        logprobs: all zeros unless ``any_logprobs``.
    """

    token_P: jax.Array
    healthy_P: jax.Array
    logprobs: LogprobOutputs
