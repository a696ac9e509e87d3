"""What the check of compiled kernels does without compiling: limits, rooflines, tables."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import report
from pallas_kernels.aot.checks import problems
from pallas_kernels.aot.inspect import KernelFacts, ProgramFacts
from pallas_kernels.aot.matrix import Result, Variant
from pallas_kernels.aot.occupancy import blocks_per_sm
from pallas_kernels.aot.roofline import bound, read_measurements
from pallas_kernels.aot.target import target_config
from pallas_kernels.gpus import GPUS
from pallas_kernels.kernel_case import KernelCase, Limits, Work

KERNEL = KernelFacts(
    name="attend",
    arch="sm_90a",
    registers=96,
    spill_bytes=0,
    shared_bytes=38912,
    threads=128,
    grid="8,8,4",
    instructions=("mma.sync",),
    pallas=True,
)
FACTS = ProgramFacts(
    seconds=0.5,
    alias_bytes=0,
    temp_bytes=0,
    kernels=(KERNEL,),
    thunks={},
    launches={},
    collectives={},
    hlo="",
)
CASE = KernelCase(
    op="attention",
    name="decode-b64",
    backend="triton",
    generations=("hopper",),
    build=lambda generation, choice: jnp.negative,
    oracle=jnp.negative,
    inputs=lambda key: (jax.random.normal(key, (8,)),),
    work=Work(bytes=4_800_000, flops=1_000_000),
    tolerance=0.0,
)


class TestOccupancy:
    @pytest.mark.parametrize(
        ("gpu", "registers", "shared", "threads", "expected"),
        [
            ("h200", 96, 38_912, 128, 5),  # 5 by registers and by shared memory
            ("h200", 32, 0, 128, 16),  # 16 blocks are all threads
            ("h200", 255, 0, 256, 1),
            ("h200", 16, 0, 32, 32),  # most blocks of an SM
            ("l4", 16, 0, 32, 24),
            ("l4", 64, 49_152, 128, 2),
        ],
    )
    def test_smallest_limit_counts(
        self, gpu: str, registers: int, shared: int, threads: int, expected: int
    ) -> None:
        found = blocks_per_sm(GPUS[gpu], registers=registers, shared_bytes=shared, threads=threads)
        assert found == expected


class TestRoofline:
    def test_memory_bound(self) -> None:
        least = bound(Work(bytes=4_800_000_000, flops=1), GPUS["h200"])
        assert (least.seconds, least.kind) == (1e-3, "memory")

    def test_compute_bound(self) -> None:
        least = bound(Work(bytes=1, flops=989_000_000_000), GPUS["h200"])
        assert (least.seconds, least.kind) == (1e-3, "compute")

    def test_table_shows_what_was_measured(self, tmp_path: Path) -> None:
        path = tmp_path / "h200.json"
        values = {"seconds": 2e-6, "baseline_seconds": None, "max_error": 0.0}
        path.write_text(json.dumps({"gpu": "h200", "cases": {"attention/triton/decode-b64": values}}))
        text = report.roofline_markdown([CASE], ["h200", "a100"], read_measurements([path]))
        assert "| decode-b64 | triton | 4.80 | 0.00 | 1.0 memory |  | 2.0 (50%) |" in text

    def test_table_without_measurements(self) -> None:
        text = report.roofline_markdown([CASE], ["h200"], {})
        assert "| case | backend | MB | GFLOP | h200 µs | measured |" in text
        assert "| decode-b64 | triton | 4.80 | 0.00 | 1.0 memory |  |" in text


class TestTables:
    def test_markdown_has_a_row_per_case(self) -> None:
        results = [
            Result(Variant(CASE, "h200"), FACTS, ()),
            Result(Variant(CASE, "h100"), None, ("aborted",)),
        ]
        text = report.compiled_markdown(results)
        assert "| decode-b64 | triton | 96 r, 38 KiB, 5/SM, mma.sync | failed |" in text

    def test_plain_table_has_a_row_per_kernel(self) -> None:
        lines = report.plain_table(report.HEADER, report.rows([Result(Variant(CASE, "h200"), FACTS, ())]))
        assert lines.splitlines()[1].split() == [
            *("attention", "triton", "decode-b64", "h200", "attend", "96", "0", "38.0", "128", "8,8,4"),
            *("mma.sync", "5", "0.5"),
        ]

    def test_section_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "kernels.md"
        path.write_text("before\n<!-- compiled:begin -->\nold\n<!-- compiled:end -->\nafter\n")
        report.replace_section(path, "compiled", "new \\1")
        assert path.read_text() == "before\n<!-- compiled:begin -->\nnew \\1\n<!-- compiled:end -->\nafter\n"

    def test_missing_section_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "kernels.md"
        path.write_text("nothing here\n")
        with pytest.raises(ValueError, match="has no section between <!-- roofline:begin -->"):
            report.replace_section(path, "roofline", "new")


class TestChecks:
    def test_shared_memory_over_the_limit(self) -> None:
        found = problems(
            Limits(), GPUS["l4"], replace(FACTS, kernels=(replace(KERNEL, shared_bytes=120_000),)), 0
        )
        assert found == ("attend: 120000 bytes of shared memory; allowed on l4: 101376",)

    def test_wgmma_is_not_mma(self) -> None:
        found = problems(Limits(tensor_core="wgmma"), GPUS["h200"], FACTS, 0)
        assert found == ("no wgmma instruction; found: mma.sync",)

    def test_temporaries(self) -> None:
        facts = replace(FACTS, temp_bytes=200)
        found = problems(Limits(temp_bytes=100), GPUS["h200"], facts, 0)
        assert found == ("200 bytes of temporary buffers; allowed: 100",)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_target_has_tensor_cores_of_hopper(gpu) -> None:  # type: ignore[no-untyped-def]
    text = target_config(gpu)
    assert gpu.device_kind in text
    assert ("ACCELERATED_FEATURES" in text) == (gpu.generation == "hopper")
