"""The contract of verification: every backend's test class inherits ``SpeculativeVerifyContract``."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.sampling.reference import Draws, truncated_draw
from pallas_kernels.speculative_verify.reference import Verified, speculative_verify
from tests.pallas_kernels import compiled
from tests.pallas_kernels.picking import Picks, picked_shapes
from tests.pallas_kernels.speculative_verify_law import LAWS, MAX_NODES, NODES, ROWS, TREES, VOCAB, check_law

R, N, V = ROWS, NODES, VOCAB
Verify = Callable[..., Verified]


@dataclass(frozen=True)
class Shape:
    """What a compiled verification depends on: R rows, N nodes, V tokens, most nodes of a row, kind of drafts."""

    R: int = ROWS
    N: int = NODES
    V: int = VOCAB
    max_nodes: int = MAX_NODES
    sampled: bool = True


SHAPES = (Shape(), Shape(sampled=False))


@st.composite
def any_shape(draw: st.DrawFn) -> Shape:
    R, most = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return Shape(
        R=R,
        N=R * most + draw(st.integers(0, 5)),
        V=draw(st.integers(8, 700)),
        max_nodes=most,
        sampled=draw(st.booleans()),
    )


def jitted(op: Verify) -> Verify:
    return compiled.jitted(op, "max_nodes")


def random_laws(logits_NV: jax.Array, rng: np.random.Generator) -> Draws:
    """Laws of all kinds: greedy, plain, truncated."""
    n, vocab = logits_NV.shape
    columns = (
        rng.uniform(0.01, 0.99, n),
        rng.choice([0.0, 0.7, 1.0, 2.0], n),
        rng.choice([3, 40, vocab], n),
        rng.choice([0.8, 1.0], n),
        rng.choice([0.0, 0.02], n),
    )
    kinds = (np.float32, np.float32, np.int32, np.float32, np.float32)
    return _sampled(logits_NV, *(jnp.asarray(x.astype(kind)) for x, kind in zip(columns, kinds)))


_sampled = compiled.jitted(truncated_draw)


def random_tree(nodes: int, width: int, rng: np.random.Generator) -> list[int]:
    """Parents of a row with at most ``width`` children per node."""
    parents, children = [-1], [0] * nodes
    for i in range(1, nodes):
        parent = int(rng.choice([p for p in range(i) if children[p] < width]))
        children[parent] += 1
        parents.append(parent)
    return parents


def random_case(sizes: list[int], width: int, sampled: bool, seed: int) -> tuple:  # type: ignore[type-arg]
    """Arguments of the op in the usual shape: rows of so many nodes, and garbage after them."""
    return case_of(Shape(sampled=sampled), sizes, width, seed)


def case_of(shape: Shape, sizes: list[int], width: int, seed: int) -> tuple:  # type: ignore[type-arg]
    """Arguments of the op: rows of so many nodes, and garbage after them."""
    N, V = shape.N, shape.V
    rng = np.random.default_rng(seed)
    logits_NV = rng.normal(size=(N, V)) * 1.5
    draft_NV = logits_NV + rng.normal(size=(N, V)) * rng.choice([0.0, 0.3, 1.0])
    start_Q = np.concatenate([[0], np.cumsum(sizes)])
    parent_N, token_N = rng.choice([0, 3, -1, 2**30, -(2**30)], (2, N))
    for row, size in enumerate(sizes):
        start = start_Q[row]
        parents = random_tree(size, width, rng) if size else []
        parent_N[start : start + size] = parents
        used = [0] * size
        for i, parent in enumerate(parents):
            token_N[start + i] = 2**30 if parent < 0 else np.argsort(-draft_NV[start + parent])[used[parent]]
            if parent >= 0:
                used[parent] += 1
    draft_NV = jnp.asarray(draft_NV, jnp.float32)
    target, draft = random_laws(jnp.asarray(logits_NV, jnp.float32), rng), random_laws(draft_NV, rng)
    args = (
        jnp.asarray(logits_NV, jnp.float32),
        target,
        *(jnp.asarray(x, jnp.int32) for x in (token_N, parent_N, start_Q)),
        jnp.asarray(rng.uniform(size=N), jnp.float32),
        jnp.asarray(rng.uniform(0.01, 0.99, size=shape.R), jnp.float32),
    )
    return (*args, draft_NV, draft) if shape.sampled else args


def assert_same(got: Verified, args: tuple, max_nodes: int) -> None:  # type: ignore[type-arg]
    """Equal to the reference; next tokens may be those of a uniform number that differs by rounding."""
    wants = [
        jitted(speculative_verify)(*args[:6], args[6] * factor, *args[7:], max_nodes=max_nodes)
        for factor in (1.0, 1 - 1e-5, 1 + 1e-5)
    ]
    np.testing.assert_array_equal(got.accepted_count_R, wants[0].accepted_count_R)
    np.testing.assert_array_equal(got.path_RD, wants[0].path_RD)
    allowed_3R = np.stack([np.asarray(want.next_token_R) for want in wants])
    assert (np.asarray(got.next_token_R) == allowed_3R).any(0).all()


class SpeculativeVerifyContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod
    slow_trees: tuple[str, ...] = ("bushy",)
    """Their law takes long, and is that of the reference, with which the other tests compare every backend."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "tree" in metafunc.fixturenames:
            slow = dict.fromkeys(self.slow_trees, pytest.mark.slow)
            metafunc.parametrize("tree", [pytest.param(name, marks=slow.get(name, ())) for name in TREES])

    def run(self, args: tuple, max_nodes: int = MAX_NODES) -> Verified:  # type: ignore[type-arg]
        return jitted(self.op)(*args, max_nodes=max_nodes)

    @picked_shapes
    def test_parity(self, picks: Picks) -> None:
        """Chains and trees of all sizes, in any mix of 32 rows, with empty rows."""

        @replace(picks, per_shape=6).settings(SHAPES)
        @given(
            shape=picks.shapes(SHAPES, any_shape()),
            data=st.data(),
            width=st.integers(1, 4),
            seed=st.integers(0, 1000),
        )
        def check(shape: Shape, data: st.DataObject, width: int, seed: int) -> None:
            most = min(shape.max_nodes, shape.N // shape.R)
            sizes = data.draw(st.lists(st.integers(0, most), min_size=shape.R, max_size=shape.R))
            args = case_of(shape, sizes, width, seed)
            assert_same(self.run(args, shape.max_nodes), args, shape.max_nodes)

        check()

    @pytest.mark.parametrize("sampled", [True, False])
    def test_a_row_depends_on_itself_alone(self, sampled: bool) -> None:
        """Foreign nodes that are NaN and unhealthy change nothing."""
        args = random_case([7] * R, 3, sampled, seed=5)
        clean = self.run(args)
        mine_R = np.arange(R) % 2 == 0
        mine_N = np.append(np.repeat(mine_R, 7), [False] * (N - 7 * R))
        broken = [jnp.where(mine_N[:, None], args[0], jnp.nan), _broken(args[1], mine_N), *args[2:7]]
        if sampled:
            broken += [jnp.where(mine_N[:, None], args[7], jnp.nan), _broken(args[8], mine_N)]
        dirty = self.run(tuple(broken))
        for name in ("accepted_count_R", "path_RD", "next_token_R"):
            a, b = (np.asarray(getattr(result, name)) for result in (clean, dirty))
            np.testing.assert_array_equal(a[mine_R], b[mine_R])
            np.testing.assert_array_equal(
                b[~mine_R], np.full_like(b[~mine_R], -1 if name == "path_RD" else 0)
            )

    def test_greedy_follows_the_target(self) -> None:
        """A greedy target accepts its own tokens and nothing else, whatever the drafts and the numbers are."""
        rng = np.random.default_rng(0)
        args = list(random_case([6] * R, 1, True, seed=1))
        greedy = (jnp.zeros(N), jnp.full(N, V), jnp.ones(N), jnp.zeros(N))
        args[1] = _sampled(args[0], jnp.full(N, 0.5), greedy[0], greedy[1].astype(jnp.int32), *greedy[2:])
        best_N = np.asarray(args[1].token_P)
        wrong_at = [1 + row % 6 for row in range(R)]
        token_N = np.array(args[2])
        for row, bad in enumerate(wrong_at):
            for i in range(1, 6):
                token_N[row * 6 + i] = (best_N[row * 6 + i - 1] + (i == bad)) % V
        args[2] = jnp.asarray(token_N)
        args[5] = jnp.asarray(rng.uniform(size=N), jnp.float32)
        for extra in ([], args[7:]):
            got = self.run((*args[:7], *extra))
            np.testing.assert_array_equal(got.accepted_count_R, [bad - 1 for bad in wrong_at])
            ends = [row * 6 + bad - 1 for row, bad in enumerate(wrong_at)]
            np.testing.assert_array_equal(got.next_token_R, best_N[ends])

    @pytest.mark.parametrize("sampled", [True, False])
    def test_exact_law(self, tree: str, sampled: bool) -> None:
        """What is emitted has the target's law, by integration over all uniform numbers and all drafts."""
        for law in LAWS:
            check_law(jitted(self.op), TREES[tree], law, sampled)

    def test_exact_law_of_matching(self) -> None:
        """Deterministic drafts held against tokens that the target drew before, as if its rows were greedy."""
        for tree in ("chain", "two-children"):
            check_law(jitted(self.op), TREES[tree], LAWS[1], sampled=False, matching=True)

    def test_half_a_draft_law_is_refused(self) -> None:
        args = random_case([3] * R, 1, True, seed=0)
        with pytest.raises(ValueError, match="belong together"):
            self.op(*args[:8], max_nodes=MAX_NODES)


def _broken(laws: Draws, fine_N: np.ndarray) -> Draws:
    return replace(
        laws,
        healthy_P=laws.healthy_P & fine_N,
        token_P=jnp.where(fine_N, laws.token_P, 0),
        **{
            name: jnp.where(fine_N, getattr(laws, name), jnp.nan)
            for name in ("max_P", "mass_P", "threshold_P")
        },
    )
