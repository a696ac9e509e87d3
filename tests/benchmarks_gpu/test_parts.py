"""The parts of the GPU benchmark that need no process of their own."""

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import records, report
from benchmarks.gpu.limits import Ceilings
from benchmarks.gpu.models import BLOCK_SIZE
from benchmarks.gpu.numerics import largest_error
from benchmarks.gpu.records import Recorder
from benchmarks.gpu.run import REPORT_SECONDS, Budget
from benchmarks.gpu.settings import PARTS, Settings
from benchmarks.gpu.step_programs import Load, packed_batch, plan_for
from benchmarks.gpu.timing import Plan, Repeated
from benchmarks.gpu.tune import decide, new_tables
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.batch.packing import Packing
from pallas_kernels.gpus import GPUS
from pallas_kernels.kernel_case import Work


def test_budget_gives_what_a_part_leaves_to_the_next() -> None:
    budget = Budget(1000.0, 360.0, PARTS)
    deadlines = [budget.deadline(part) for part in PARTS]
    assert deadlines == sorted(deadlines)
    assert deadlines[-1] == pytest.approx(1360.0 - REPORT_SECONDS)
    assert Budget(0.0, 100.0, ("steps",)).deadline("steps") == pytest.approx(100.0 - REPORT_SECONDS)


def test_settings_travel_as_json(tmp_path: Path) -> None:
    settings = Settings("steps", tmp_path / "r", 5.0, smoke=True, hide=("flax",))
    assert Settings.from_json(settings.to_json()) == settings


def test_records_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    recorder = Recorder(path)
    recorder.planned("kernels", ["a", "b", "c"])
    recorder.begin("kernels", "a")
    recorder.end("kernels", "a", "ok", {"seconds": float("nan"), "summary": "fine"})
    recorder.begin("kernels", "b")
    path.write_text(path.read_text() + '{"kind": "end", "part"')
    results = records.read(path)
    assert results.ok("kernels") == {"a": {"seconds": None, "summary": "fine"}}
    assert results.open_cases("kernels") == ["b"]
    assert results.untouched("kernels") == ["c"]


def test_report_names_everything() -> None:
    results = records.Results(facts={"device": {"gpu": "h200", "kind": "NVIDIA H200"}, "seconds": 5.0})
    kernel = {
        "seconds": 1e-5,
        "gb_per_second": 3000.0,
        "tflops": 1.0,
        "share": 0.75,
        "bound": "bytes",
        "baseline_seconds": 3e-5,
        "max_error": 1e-3,
    }
    for case in (
        records.Case("kernels", "op/triton/x", "ok", values=kernel),
        records.Case("kernels", "op/triton/y", "failed", "it broke"),
        records.Case("steps", "z", "skipped", "no time was left"),
    ):
        results.cases[case.part, case.name] = case
    results.missing["matplotlib"] = "no plots"
    text = report.tables(results)
    for part in ("NVIDIA H200", "75 % bytes", "3.00 x", "y: it broke", "z: no time", "matplotlib: no plots"):
        assert part in text
    values = report.as_json(results)
    assert values["gpu"] == "h200"
    assert values["cases"] == {"op/triton/x": kernel}
    assert values["failed"] == {"kernels: op/triton/y": "it broke"}
    assert values["missing"] == [{"package": "matplotlib", "effect": "no plots"}]


def test_ceilings_prefer_what_was_measured() -> None:
    published = Ceilings.of({}, GPUS["h200"])
    assert published.bandwidth == GPUS["h200"].memory_bandwidth
    measured = Ceilings.of(
        {"copy": {"bytes_per_second": 4.0e12}, "matmul-bf16": {"tflops": 700.0}}, GPUS["h200"]
    )
    assert measured.floor(Work(bytes=4_000_000, flops=1)) == (1e-6, "bytes")
    assert measured.floor(Work(bytes=1, flops=7 * 10**14)) == (pytest.approx(1.0), "flops")


def test_largest_error() -> None:
    wanted = jnp.array([1.0, -4.0, jnp.nan])
    assert largest_error(wanted, wanted) == 0
    assert largest_error(jnp.array([1.0, -3.0, jnp.nan]), wanted) == pytest.approx(0.25)
    assert largest_error(jnp.array([1.0, jnp.nan, jnp.nan]), wanted) == np.inf
    assert largest_error(jnp.array([1.0, -4.0, 0.0]), wanted) == np.inf
    with pytest.raises(ValueError, match="shapes"):
        largest_error(wanted[:2], wanted)


class TestRepeated:
    def test_plan_rotates_inputs_that_fit_the_cache(self) -> None:
        small = Plan.make(1e-5, moved_bytes=10 << 20, input_bytes=10 << 20, l2_bytes=50 << 20)
        assert small.sets == 8
        middle = Plan.make(1e-3, moved_bytes=50 << 20, input_bytes=50 << 20, l2_bytes=50 << 20)
        assert middle.sets == 3
        large = Plan.make(1e-2, moved_bytes=1 << 30, input_bytes=4 << 30, l2_bytes=50 << 20)
        assert (large.sets, large.rounds) == (1, 1)

    def test_every_call_counts(self) -> None:
        """A function that updates its argument shows how often it was called."""
        shapes = (jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32))
        repeated = Repeated(lambda x, y: (x.sum(), x + y), (0,), shapes, Plan(sets=2, rounds=5))
        program = repeated.compile()
        sets = tuple((jnp.full(4, float(i)), jnp.float32(1)) for i in range(2))
        carry = program.compiled(repeated.first_carry(sets), sets)
        np.testing.assert_allclose(carry[0][1], np.full(4, 5.0))
        np.testing.assert_allclose(carry[1][1], np.full(4, 6.0))
        assert program.measure(sets).median > 0
        assert not sets[0][0].is_deleted()

    def test_says_which_donated_array_has_no_output(self) -> None:
        shapes = (jax.ShapeDtypeStruct((4,), jnp.float32),)
        with pytest.raises(ValueError, match=r"donated array 0 of shape \(4,\)"):
            Repeated(lambda x: x.sum(), (0,), shapes, Plan(1, 1))


class TestDecisions:
    @staticmethod
    def results(*measured: tuple[str, int | None, float]) -> records.Results:
        results = records.Results()
        for case, rows, seconds in measured:
            choice = None if rows is None else {"rows": rows}
            values = {"op": "op", "key": "k", "case": case, "choice": choice, "seconds": seconds}
            name = f"{case}#{len(results.cases)}"
            results.cases["tuning", name] = records.Case("tuning", name, "ok", values=values)
        return results

    def test_the_fastest_for_all_cases_of_a_key_wins(self, tmp_path: Path) -> None:
        results = self.results(
            ("a", None, 10.0),
            ("a", 1, 5.0),
            ("a", 2, 6.0),
            ("b", None, 10.0),
            ("b", 1, 11.0),
            ("b", 2, 6.0),
            ("a", 4, 0.1),
        )
        (decision,) = decide(results)
        assert (decision.now, decision.best, decision.choice) == (20.0, 12.0, {"rows": 2})
        texts = new_tables([decision], "hopper", tmp_path)
        assert json.loads(texts["op"]) == {"hopper": {"k": {"rows": 2}}}

    def test_noise_changes_nothing(self, tmp_path: Path) -> None:
        (decision,) = decide(self.results(("a", None, 10.0), ("a", 1, 9.9)))
        assert not decision.changes
        assert new_tables([decision], "hopper", tmp_path) == {}

    def test_nothing_is_decided_without_the_present_choice(self) -> None:
        assert decide(self.results(("a", 1, 9.9))) == []


def unpacked(load: Load, max_num_seqs: int) -> tuple[CompilePlan, ForwardBatch]:
    plan = plan_for((load,), max_num_seqs)
    tokens = load.rows * load.tokens
    packed = packed_batch(plan, load, num_blocks=100, vocab_size=320)
    return plan, Packing.make(plan, tokens).unpack(jnp.asarray(packed))


class TestPackedBatch:
    def test_decode(self) -> None:
        _, batch = unpacked(Load(rows=3, tokens=1, context=40), max_num_seqs=8)
        np.testing.assert_array_equal(batch.positions_T, [39, 39, 39])
        np.testing.assert_array_equal(batch.query_start_Q, [0, 1, 2, 3])
        np.testing.assert_array_equal(batch.context_len_R, [40, 40, 40])
        assert len(set(batch.block_tables[0][:, :3].ravel().tolist()) - {0}) == 9
        np.testing.assert_array_equal(
            batch.slots[0], batch.block_tables[0][:, 2] * BLOCK_SIZE + 39 % BLOCK_SIZE
        )

    def test_prompt(self) -> None:
        plan, batch = unpacked(Load(rows=1, tokens=32, context=32), max_num_seqs=4)
        assert plan.table_rows(32) == 4
        np.testing.assert_array_equal(batch.positions_T, np.arange(32))
        np.testing.assert_array_equal(batch.query_start_Q, [0, 32, 32, 32, 32])
        np.testing.assert_array_equal(batch.context_len_R, [32, 0, 0, 0])
        np.testing.assert_array_equal(
            batch.slots[0] // BLOCK_SIZE, np.repeat(batch.block_tables[0][0], BLOCK_SIZE)
        )


def test_seconds_left_is_in_real_time(tmp_path: Path) -> None:
    assert Settings("steps", tmp_path, time.time() + 5).for_part("kernels", 7.0).deadline == 7.0
