"""A draw from truncated softmax laws in XLA, on any device: a few passes over the logits and no sort."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpus import Generation
from pallas_kernels.sampling.reference import Draws
from pallas_kernels.sampling.search import Measured, largest_reaching
from pallas_kernels.sampling.xla_sums import GROUP, pick, split_groups, take_group, total


def supports(
    logits_PV: jax.Array,
    uniform_P: jax.Array,
    temperature_P: jax.Array,
    top_k_P: jax.Array,
    top_p_P: jax.Array,
    min_p_P: jax.Array,
    *,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if not jnp.issubdtype(logits_PV.dtype, jnp.floating):
        return False, f"logits are {logits_PV.dtype}; they must be of a float type"
    return True, ""


def truncated_draw(
    logits_PV: jax.Array,
    uniform_P: jax.Array,
    temperature_P: jax.Array,
    top_k_P: jax.Array,
    top_p_P: jax.Array,
    min_p_P: jax.Array,
) -> Draws:
    """See ``reference.truncated_draw``."""
    V = logits_PV.shape[1]
    finite_P = (logits_PV < jnp.inf).all(-1)
    logits_PGJ = split_groups(logits_PV.astype(jnp.float32), -jnp.inf)
    logits_PGJ = jnp.where(finite_P[:, None, None], logits_PGJ, 0.0)
    max_PG = logits_PGJ.max(-1)
    max_P = max_PG.max(-1)
    healthy_P = finite_P & (max_P > -jnp.inf)
    max_P = jnp.where(healthy_P, max_P, 0.0)
    random_P = temperature_P > 0
    divisor_P = jnp.where(random_P, temperature_P, 1.0)
    # Others would make the searches run to their end.
    truncated_P = healthy_P & random_P & ((top_k_P < V) | (top_p_P < 1) | (min_p_P > 0))

    def threshold() -> jax.Array:
        on_P = truncated_P
        return _threshold(
            logits_PGJ,
            max_P,
            divisor_P,
            jnp.where(on_P & (top_k_P < V), top_k_P, 0),
            jnp.where(on_P, top_p_P, 1.0),
            jnp.where(on_P, min_p_P, 0.0),
        )

    threshold_P = lax.cond(truncated_P.any(), threshold, lambda: jnp.full_like(max_P, -jnp.inf))

    def weights(x_PX: jax.Array) -> jax.Array:
        return _weights(x_PX, max_P, divisor_P, threshold_P)

    mass_PG = total(weights(logits_PGJ))
    mass_P = total(mass_PG)
    group_P, rest_P = pick(mass_PG, uniform_P * mass_P)
    group_P = jnp.where(random_P, group_P, jnp.argmax(max_PG, axis=-1))
    logits_PJ = take_group(logits_PGJ, group_P)
    inner_P = jnp.where(random_P, pick(weights(logits_PJ), rest_P)[0], jnp.argmax(logits_PJ, axis=-1))
    return Draws(
        token_P=jnp.where(healthy_P, group_P * GROUP + inner_P, 0).astype(jnp.int32),
        healthy_P=healthy_P,
        max_P=max_P,
        temperature_P=temperature_P.astype(jnp.float32),
        threshold_P=threshold_P,
        mass_P=mass_P,
    )


def _threshold(
    logits_PGJ: jax.Array,
    max_P: jax.Array,
    divisor_P: jax.Array,
    top_k_P: jax.Array,
    top_p_P: jax.Array,
    min_p_P: jax.Array,
) -> jax.Array:
    """Smallest kept logit, -inf where nothing is cut off. ``top_k`` 0 is off."""
    nothing_P = jnp.full_like(max_P, -jnp.inf)

    def search(amount_PGJ: jax.Array, need_P: jax.Array, low_P: jax.Array) -> jax.Array:
        def measure(pivot_P: jax.Array) -> Measured:
            above_PGJ = logits_PGJ >= pivot_P[:, None, None]
            measured_P = total(total(jnp.where(above_PGJ, amount_PGJ, 0)))
            kept_P = jnp.where(above_PGJ, logits_PGJ, jnp.inf).min((1, 2))
            dropped_P = jnp.where(above_PGJ, -jnp.inf, logits_PGJ).max((1, 2))
            return measured_P, kept_P, dropped_P

        return largest_reaching(measure, need_P, low_P, max_P)

    k_on_P, p_on_P = top_k_P > 0, top_p_P < 1
    ones_PGJ = jnp.ones(logits_PGJ.shape, jnp.int32)
    kth_P = search(ones_PGJ, top_k_P, jnp.where(k_on_P, nothing_P, max_P))
    kth_P = jnp.where(k_on_P, kth_P, -jnp.inf)
    weight_PGJ = _weights(logits_PGJ, max_P, divisor_P, kth_P)
    need_P = top_p_P * total(total(weight_PGJ))
    nucleus_P = search(weight_PGJ, need_P, jnp.where(p_on_P, kth_P, max_P))
    floor_P = jnp.where(min_p_P > 0, max_P + divisor_P * jnp.log(min_p_P), -jnp.inf)
    bound_P = jnp.maximum(jnp.maximum(kth_P, jnp.where(p_on_P, nucleus_P, -jnp.inf)), floor_P)
    smallest_P = jnp.where(logits_PGJ >= bound_P[:, None, None], logits_PGJ, jnp.inf).min((1, 2))
    return jnp.where(bound_P == -jnp.inf, -jnp.inf, smallest_P)


def _weights(x_PX: jax.Array, max_P: jax.Array, divisor_P: jax.Array, threshold_P: jax.Array) -> jax.Array:
    shape = (-1,) + (1,) * (x_PX.ndim - 1)
    weight_PX = jnp.exp((x_PX - max_P.reshape(shape)) / divisor_P.reshape(shape))
    return jnp.where(x_PX >= threshold_P.reshape(shape), weight_PX, 0.0)
