"""The contract of the truncated draw: every backend's test class inherits ``TruncatedDrawContract``."""

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.sampling.reference import Draws
from tests.pallas_kernels.compiled import jitted
from tests.pallas_kernels.picking import Picks, picked_shapes

# Share of the mass by which float32 may move a boundary.
ROUNDING = 1e-5
P = 8
SHAPES = ((1100, jnp.float32), (5, jnp.bfloat16))
"""Vocabularies and dtypes of logits."""
any_shape = st.tuples(
    st.integers(1, 3000), st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]), st.integers(1, 20)
)


@dataclass(frozen=True)
class Row:
    """Parameters of a row; ``kind`` names its logits, see ``row_logits``."""

    kind: str = "peaked"
    temperature: float = 1.0
    top_k: int = 10**6
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5
    seed: int = 0


KINDS = ("peaked", "flat", "ties", "equal", "masked", "one", "huge", "zeros", "nan", "inf", "nothing")
UNHEALTHY = ("nan", "inf", "nothing")

rows = st.builds(
    Row,
    kind=st.sampled_from(KINDS),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([1, 2, 3, 40, 200, 1099, 10**6]),
    top_p=st.sampled_from([1e-6, 0.2, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0]),
    uniform=st.sampled_from([2.0**-33, 0.1, 0.37, 0.5, 0.77, 0.99, 1 - 2.0**-24]),
    seed=st.integers(0, 9),
)


def row_logits(row: Row, V: int) -> np.ndarray:
    """Logits of a row, float32 [V]."""
    rng = np.random.default_rng(row.seed)
    normal = rng.normal(size=V)
    logits = {
        "peaked": 4 * normal,
        "flat": 0.01 * normal,
        "ties": np.round(3 * normal),
        "equal": np.full(V, -2.5),
        "masked": np.where(rng.random(V) < 0.9, -np.inf, 3 * normal),
        "one": np.full(V, -np.inf),
        "huge": 1e38 * normal.clip(-3, 3),
        "zeros": np.where(rng.random(V) < 0.5, 0.0, -0.0),
        "nan": 4 * normal,
        "inf": 4 * normal,
        "nothing": np.full(V, -np.inf),
    }[row.kind]
    at = rng.integers(V)
    if row.kind in ("one", "masked"):
        logits[at] = 1.5
    if row.kind in ("nan", "inf"):
        logits[at] = np.nan if row.kind == "nan" else np.inf
    return logits.astype(np.float32)


def arguments(batch: list[Row], V: int, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """Arguments of the op."""
    columns = [
        np.array([getattr(row, name) for row in batch]).astype(kind)
        for name, kind in (
            ("uniform", np.float32),
            ("temperature", np.float32),
            ("top_k", np.int32),
            ("top_p", np.float32),
            ("min_p", np.float32),
        )
    ]
    logits_PV = jnp.asarray(np.stack([row_logits(row, V) for row in batch])).astype(dtype)
    return logits_PV, *(jnp.asarray(column) for column in columns)


def check_row(logits_V: np.ndarray, row: Row, draws: dict[str, np.generic]) -> None:
    """Holds the results of a row against its definition, in float64.

    Where rounding decides (a nucleus that ends within ``ROUNDING`` of its mass), either side is right.
    """
    fine = bool((logits_V < np.inf).all() and np.isfinite(logits_V.max()))
    assert draws["healthy_P"] == fine
    assert draws["temperature_P"] == np.float32(row.temperature)
    if not fine:
        assert draws["token_P"] == 0
        return
    logits_V = logits_V.astype(np.float64)
    top = logits_V.max()
    temperature = float(np.float32(row.temperature)) or 1.0
    with np.errstate(over="ignore"):
        weight_V = np.exp((logits_V - top) / temperature)
    assert draws["max_P"] == np.float32(top)
    threshold = float(draws["threshold_P"])
    np.testing.assert_allclose(draws["mass_P"], weight_V[logits_V >= threshold].sum(), rtol=ROUNDING)
    if row.temperature == 0:
        assert draws["token_P"] == logits_V.argmax()
        assert threshold == -np.inf
        return
    loose, tight = (threshold_of(logits_V, weight_V, temperature, row, slack) for slack in (1, -1))
    assert loose <= threshold <= tight
    assert threshold == -np.inf or threshold in logits_V
    kept_V = np.where(logits_V >= threshold, weight_V, 0)
    cdf_V = np.cumsum(kept_V) / kept_V.sum()
    token = int(draws["token_P"])
    assert 0 <= token < len(logits_V)
    assert kept_V[token] > 0
    assert (cdf_V[token - 1] if token else 0) - ROUNDING <= row.uniform <= cdf_V[token] + ROUNDING


def threshold_of(
    logits_V: np.ndarray, weight_V: np.ndarray, temperature: float, row: Row, slack: int
) -> float:
    """The smallest kept logit, where boundaries are moved by rounding so that more (1) or less (-1) is kept."""
    descending_V = np.sort(logits_V)[::-1]
    kth = descending_V[row.top_k - 1] if row.top_k < len(logits_V) else -np.inf
    nucleus = -np.inf
    if row.top_p < 1:
        mass_V = np.cumsum(np.where(descending_V >= kth, np.sort(weight_V)[::-1], 0))
        need = (float(np.float32(row.top_p)) + slack * ROUNDING) * mass_V[-1]
        nucleus = descending_V[min(int((mass_V < need).sum()), len(logits_V) - 1)]
    floor = -np.inf
    if row.min_p > 0:
        floor = logits_V.max() + temperature * np.log(float(np.float32(row.min_p)))
        floor -= slack * 1e-6 * (temperature + abs(logits_V.max()))
        floor = min(floor, logits_V.max())
    bound = max(kth, nucleus, floor)
    return bound if bound == -np.inf else float(logits_V[logits_V >= bound].min())


def unpack(draws: Draws) -> list[dict[str, np.generic]]:
    """One mapping per row."""
    columns = {field.name: np.asarray(getattr(draws, field.name)) for field in fields(draws)}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(columns["token_P"]))]


def bits(draws: Draws) -> np.ndarray:
    """All results, bit by bit, [P, fields]."""
    columns = [np.asarray(getattr(draws, field.name)) for field in fields(draws)]
    return np.stack(
        [np.ascontiguousarray(column.astype(np.float32)).view(np.int32) for column in columns], axis=1
    )


class TruncatedDrawContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @picked_shapes
    def test_follows_the_definition(self, picks: Picks) -> None:
        few = tuple((*shape, P) for shape in SHAPES)

        @replace(picks, per_shape=15).settings(few)
        @given(shape=picks.shapes(few, any_shape), data=st.data())
        def check(shape: tuple[int, jnp.dtype, int], data: st.DataObject) -> None:
            V, dtype, row_count = shape
            batch = data.draw(st.lists(rows, min_size=row_count, max_size=row_count))
            self.check(batch, V, dtype)

        check()

    def test_every_truncation_of_every_kind_of_logits(self) -> None:
        """Each way to truncate alone and all together, on logits with ties, masks and extreme ranges."""
        ways = (
            Row(),
            Row(top_k=40),
            Row(top_k=1099),
            Row(top_p=0.9),
            Row(top_p=0.999, temperature=0.7),
            Row(min_p=0.05, temperature=3.0),
            Row(top_k=200, top_p=0.5, min_p=1e-4),
            Row(temperature=0.0, top_k=5, top_p=0.5),
        )
        assert len(ways) == P
        for kind in KINDS:
            batch = [Row(**{**vars(way), "kind": kind, "seed": 3}) for way in ways]
            self.check(batch, *SHAPES[0])

    def test_a_row_depends_on_itself_alone(self) -> None:
        """The same bits at another place, with neighbours that are broken or that need longer searches."""
        V, dtype = SHAPES[0]
        mine = Row(top_k=200, top_p=0.9, min_p=1e-4, uniform=0.77)
        plain = Row(kind="flat", uniform=0.3)
        calm = [mine, plain, *[Row(temperature=0.0)] * 6]
        wild = [
            *[Row(kind=kind, top_p=0.999) for kind in ("nan", "inf", "nothing", "flat", "huge", "ties")],
            plain,
            mine,
        ]
        a, b = (bits(jitted(self.op)(*arguments(batch, V, dtype))) for batch in (calm, wild))
        np.testing.assert_array_equal(a[0], b[7])
        np.testing.assert_array_equal(a[1], b[6])

    def check(self, batch: list[Row], V: int, dtype: jnp.dtype) -> None:
        args = arguments(batch, V, dtype)
        logits_PV = np.asarray(args[0].astype(jnp.float32))
        draws = unpack(jitted(self.op)(*args))
        for logits_V, row, result in zip(logits_PV, batch, draws):
            check_row(logits_V, row, result)
