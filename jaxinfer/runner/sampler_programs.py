"""The compiled programs of a sampler, for a vocabulary on one device or shared by several."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp

from jaxinfer.layers.linear import vocab_axis
from jaxinfer.sampling.device import Draw, draw_only, sample
from jaxinfer.sampling.inputs import LogprobOutputs, SamplerOutputs, SamplerState, SamplingInputs
from jaxinfer.sampling.logprobs import score
from jaxinfer.sampling.state import init_state, reset_slot
from jaxinfer.sampling.typical import Typical
from jaxinfer.sampling.vocabulary import Vocabulary
from sharding.layout import WHOLE, Layout


@dataclass(frozen=True)
class SamplerPrograms:
    """What a ``DeviceSampler`` runs. The state is donated.

    Attributes:
        init: number of slots -> empty state, on the devices.
        zero_logits: number of rows -> logits, on the devices.
        sample, draw, score, reset: see ``sampling.device``, ``sampling.logprobs`` and ``sampling.state``.
    """

    init: Callable[[int], SamplerState]
    zero_logits: Callable[[int], jax.Array]
    sample: Callable[[jax.Array, SamplingInputs, SamplerState], tuple[SamplerOutputs, SamplerState]]
    draw: Callable[..., tuple[jax.Array, jax.Array]]
    score: Callable[..., LogprobOutputs]
    reset: Callable[..., SamplerState]


@cache
def sampler_programs(
    vocab_size: int, draw_op: Draw | None, layout: Layout, typical: Typical | None = None
) -> SamplerPrograms:
    """One value, and so one compilation per shape, for all samplers of a process with equal arguments.

    Args:
        draw_op: see ``sample``; not used where devices share the vocabulary, since it needs whole rows.
        typical: see ``sample``.
    """
    vocab = Vocabulary(vocab_size, layout.rules)
    op = None if vocab.shared else draw_op
    axes = (None, vocab_axis(vocab_size))
    over_tokens = layout.rules.spec(axes)
    state = SamplerState(newest_W=WHOLE, output_counts_WV=over_tokens, prompt_seen_WV=over_tokens)  # type: ignore[arg-type]
    _, columns = layout.placed_shape((1, vocab_size), axes)

    def sampled(
        logits_PV: jax.Array, inputs: SamplingInputs, state: SamplerState
    ) -> tuple[SamplerOutputs, SamplerState]:
        return sample(logits_PV, inputs, state, op, vocab, typical)

    def drawn(
        logits_PV: jax.Array, inputs: SamplingInputs, state: SamplerState, newest_W: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        assert not vocab.shared, "only drafters draw, and they need one device"
        return draw_only(logits_PV, inputs, state, newest_W, op)

    spread = layout.spread
    rows = (over_tokens, WHOLE, WHOLE)
    return SamplerPrograms(
        init=lambda slots: layout.make(lambda: init_state(slots, columns), state),
        zero_logits=lambda rows: layout.make(lambda: jnp.zeros((rows, columns), jnp.float32), over_tokens),
        sample=jax.jit(spread(sampled, (over_tokens, WHOLE, state), (WHOLE, state)), donate_argnums=(2,)),
        draw=jax.jit(drawn, donate_argnums=(3,)),
        score=jax.jit(spread(partial(score, vocab=vocab), rows, WHOLE)),
        reset=jax.jit(
            spread(partial(reset_slot, vocab=vocab), (state, *(WHOLE,) * 6), state), donate_argnums=(0,)
        ),
    )
