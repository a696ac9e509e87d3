"""Verification in XLA and its reference: the contract, and that the test of the law finds planted faults."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.speculative_verify import reference, xla
from pallas_kernels.speculative_verify.reference import Verified, probabilities
from tests.pallas_kernels import compiled
from tests.pallas_kernels.speculative_verify_cases import SpeculativeVerifyContract, jitted, random_case
from tests.pallas_kernels.speculative_verify_law import LAWS, ROWS, TREES, check_law


class TestSpeculativeVerifyReference(SpeculativeVerifyContract):
    op = staticmethod(reference.speculative_verify)
    slow_trees = ()


class TestSpeculativeVerifyXla(SpeculativeVerifyContract):
    op = staticmethod(xla.speculative_verify)

    def test_integer_logits_are_refused(self) -> None:
        args = random_case([3] * ROWS, 1, True, seed=0)
        ok, reason = xla.supports(args[0].astype(jnp.int32), *args[1:], max_nodes=3)
        assert not ok
        assert "int32" in reason


_right = jitted(xla.speculative_verify)
_probabilities = compiled.jitted(probabilities)


def _ends(result: Verified, parent_N: jax.Array, node_start_Q: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The last node of each path, and whether it has children."""
    start_R = np.asarray(node_start_Q)[:-1]
    last_R = np.maximum(np.asarray(result.path_RD).max(-1), start_R)
    row_N = np.searchsorted(np.asarray(node_start_Q), np.arange(len(parent_N)), side="right") - 1
    packed_N = np.where(parent_N >= 0, start_R[np.minimum(row_N, len(start_R) - 1)] + parent_N, -1)
    return np.minimum(last_R, len(parent_N) - 1), (packed_N == last_R[:, None]).any(-1)


def no_residual(*args: Any, max_nodes: int) -> Verified:
    """Draws from p instead of the residual law."""
    result = _right(*args, max_nodes=max_nodes)
    last_R, inner_R = _ends(result, args[3], args[4])
    cdf_RV = np.cumsum(np.asarray(_probabilities(args[0], args[1]))[last_R], axis=-1)
    drawn_R = (cdf_RV > np.asarray(args[6])[:, None]).argmax(-1)
    return replace(result, next_token_R=np.where(inner_R, drawn_R, result.next_token_R))


def bonus_of_the_root(*args: Any, max_nodes: int) -> Verified:
    """Takes the bonus from the wrong row of the target."""
    result = _right(*args, max_nodes=max_nodes)
    _, inner_R = _ends(result, args[3], args[4])
    start_R = np.minimum(np.asarray(args[4])[:-1], len(args[3]) - 1)
    root_R = np.asarray(args[1].token_P)[start_R]
    return replace(result, next_token_R=np.where(inner_R, result.next_token_R, root_R))


def draft_law_before_temperature(*args: Any, max_nodes: int) -> Verified:
    """Takes q at temperature 1."""
    draft_logits_NV, draft = args[7:]
    mass_N = jnp.exp(draft_logits_NV - draft.max_P[:, None]).sum(-1)
    plain = replace(draft, temperature_P=jnp.ones_like(mass_N), threshold_P=-jnp.inf * mass_N, mass_P=mass_N)
    return _right(*args[:8], plain, max_nodes=max_nodes)


def likely_acceptance_of_later_children(*args: Any, max_nodes: int) -> Verified:
    """Tries the later children with a smaller number."""
    uniform_N = np.array(args[5])
    parent_N = np.asarray(args[3])
    uniform_N[1:][(parent_N[1:] == 0) & (parent_N[:-1] == 0)] *= 0.8
    return _right(*args[:5], uniform_N, *args[6:], max_nodes=max_nodes)


@pytest.mark.parametrize(
    ("fault", "tree", "law", "sampled"),
    [
        (no_residual, "chain", 0, True),
        (no_residual, "bushy", 1, True),
        (no_residual, "chain", 0, False),
        (bonus_of_the_root, "chain", 0, True),
        (draft_law_before_temperature, "chain", 2, True),
        (likely_acceptance_of_later_children, "two-children", 0, True),
    ],
)
def test_planted_faults_are_found(fault: Callable[..., Verified], tree: str, law: int, sampled: bool) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_law(fault, TREES[tree], LAWS[law], sampled)
