"""The law of what speculation emits, and that the test finds what is wrong with it."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.device import sample
from jaxinfer.sampling.edits import edit
from jaxinfer.speculative.check.matrix import RULES, SAMPLERS, enumerated, sampled_cell
from jaxinfer.speculative.check.operations import Operations, matched
from jaxinfer.speculative.check.statistics import goodness_of_fit, same_law
from jaxinfer.speculative.check.target import SETTINGS
from pallas_kernels.sampling.reference import truncated_draw
from pallas_kernels.speculative_verify.reference import speculative_verify

FEATURES = {
    "penalties": "penalties",
    "bias": "bias, allowed ids, bad words",
    "top-k": "sampling",
    "top-p": "sampling",
    "min-p": "sampling",
    "temperature": "sampling",
}
GOOD = Operations()


def check(rule: str, setting: str, ops: Operations, drafts: str = "random"):
    return enumerated(rule, setting, SETTINGS[setting], drafts == "random", 0, ops)


def marked(name: str):
    features = ["verify-spec", *([FEATURES[name]] if name in FEATURES else [])]
    return pytest.param(name, marks=pytest.mark.feature(*features))


@pytest.mark.parametrize("drafts", ["random", "likeliest"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", [marked(name) for name in SETTINGS])
def test_what_is_emitted_follows_the_processed_law_at_every_position(rule, setting, drafts):
    finding = check(rule, setting, GOOD, drafts)
    assert finding.holds, finding
    assert len(finding.by_position) == 3


# ---- planted faults, in operations that compile quickly

PLAIN = Operations(draw=truncated_draw, verify=speculative_verify)


def no_residual(logits_NV, target, token_N, parent_N, start_Q, *rest, max_nodes):
    """A rejected draft is followed by a token of the target's law, instead of what is left of it."""
    result = speculative_verify(logits_NV, target, token_N, parent_N, start_Q, *rest, max_nodes=max_nodes)
    return replace(result, next_token_R=target.token_P[last_node(result, start_Q)])


def last_node(result, start_Q):
    last_R = jnp.take_along_axis(
        result.path_RD, jnp.maximum(result.accepted_count_R - 1, 0)[:, None], axis=1
    )[:, 0]
    return jnp.where(result.accepted_count_R > 0, last_R, jnp.minimum(start_Q[:-1], len(start_Q) - 1))


def law_before_temperature(*args, max_nodes):
    """Drafts are drawn with a temperature, but accepted by the law without it."""
    if len(args) == 7:
        return speculative_verify(*args, max_nodes=max_nodes)
    draft_NV, draft = args[7:]
    ones_N = jnp.ones_like(draft.temperature_P)
    kept_NV = jnp.where(draft_NV >= draft.threshold_P[:, None], draft_NV, -jnp.inf)
    plain = truncated_draw(
        kept_NV, 0.5 * ones_N, ones_N, jnp.full(len(kept_NV), kept_NV.shape[1]), ones_N, 0 * ones_N
    )
    return speculative_verify(
        *args[:7], draft_NV, replace(plain, threshold_P=draft.threshold_P), max_nodes=max_nodes
    )


def bonus_of_the_root(logits_NV, target, token_N, parent_N, start_Q, *rest, max_nodes):
    """The token behind accepted drafts is the one that the target drew at the root."""
    result = speculative_verify(logits_NV, target, token_N, parent_N, start_Q, *rest, max_nodes=max_nodes)
    root_R = target.token_P[jnp.minimum(start_Q[:-1], len(token_N) - 1)]
    bonus_R = result.next_token_R == target.token_P[last_node(result, start_Q)]
    return replace(result, next_token_R=jnp.where(bonus_R, root_R, result.next_token_R))


def edit_without_history(logits_PV, inputs, state):
    return edit(logits_PV, without_history(inputs), state)


def sample_without_history(logits_PV, inputs, state, draw_op=None):
    """Penalties count what was emitted before the step, but not the drafts before a position."""
    return sample(logits_PV, without_history(inputs), state, draw_op)


def without_history(inputs):
    return replace(inputs, history_PK=jnp.full_like(inputs.history_PK, 2**30))


def bonus_of_the_last_row(drafts: Sequence[int], samples: Sequence[int]) -> list[int]:
    return [*matched(drafts, samples)[:-1], samples[-1]]


def drafts_are_believed(drafts: Sequence[int], samples: Sequence[int]) -> list[int]:
    """A first draft counts whatever the target says."""
    return matched(drafts, [*drafts[:1], *samples[1:]])


def another_draw(edited_PV, uniform_P, temperature_P, *rest):
    return truncated_draw(edited_PV, uniform_P, temperature_P * 0.9, *rest)


FAULTS = {
    "none": (PLAIN, "rejection", "penalties"),
    "acceptance without residual": (replace(PLAIN, verify=no_residual), "rejection", "temperature"),
    "draft law before temperature": (
        replace(PLAIN, verify=law_before_temperature),
        "rejection",
        "temperature",
    ),
    "bonus from the wrong row": (replace(PLAIN, verify=bonus_of_the_root), "rejection", "temperature"),
    "bonus from the wrong row, matching": (
        replace(PLAIN, emit=bonus_of_the_last_row),
        "matching, ",
        "temperature",
    ),
    "penalties ignore drafts": (replace(PLAIN, edit=edit_without_history), "rejection", "penalties"),
    "penalties ignore drafts, matching": (
        replace(PLAIN, sample=sample_without_history),
        "matching, ",
        "penalties",
    ),
    "drafts are believed": (replace(PLAIN, emit=drafts_are_believed), "matching, ", "top-k"),
    "another temperature": (replace(PLAIN, draw=another_draw), ("matching, ", "rejection"), "top-p"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_every_rule_that_it_concerns(fault):
    ops, rules, setting = FAULTS[fault]
    for rule in RULES:
        if rule.startswith(rules):
            finding = check(rule, setting, ops)
            assert finding.difference is not None
            assert finding.holds == (fault == "none"), finding
            assert (finding.difference > 1e-3) == (fault != "none")


@pytest.mark.parametrize(
    "rule", [pytest.param(name, marks=pytest.mark.slow if "rejection" in name else ()) for name in SAMPLERS]
)
def test_spd_06_samples_follow_the_law(rule):
    finding = sampled_cell(rule, "all", SETTINGS["all"], 4000, 0, GOOD)
    assert finding.holds, finding


@pytest.mark.slow
def test_spd_06_a_fault_is_found_in_samples_too():
    ops = replace(GOOD, sample=sample_without_history)
    assert not sampled_cell("matching, chain", "all", SETTINGS["all"], 4000, 0, ops).holds


def test_p_values_are_those_of_the_textbook():
    """95 % points of the chi-square distribution."""
    even = np.full(4, 0.25)
    off = np.sqrt(7.815 * 250 / 4)
    count = np.array([250 + off, 250 - off, 250 + off, 250 - off])
    assert goodness_of_fit(count, even) == pytest.approx(0.05, rel=1e-3)
    assert goodness_of_fit(np.array([10, 0, 10, 0]), np.array([0.5, 0, 0.5, 0])) == 1.0
    assert goodness_of_fit(np.array([10, 1, 10, 0]), np.array([0.5, 0, 0.5, 0])) == 0.0
    assert same_law(np.array([100, 100]), np.array([100, 100])) == pytest.approx(1.0)
    assert same_law(np.array([100, 200]), np.array([200, 100])) < 1e-10
