"""The list of shipped shapes is complete and consistent."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest

import pallas_kernels
from pallas_kernels.all_cases import all_cases, find_case
from pallas_kernels.aot.matrix import MOSAIC_SINCE
from pallas_kernels.gpus import GPUS
from pallas_kernels.kernel_case import KernelCase

FOLDER = Path(pallas_kernels.__file__).parent
QUICK = [case for case in all_cases() if case.quick]


def test_every_op_with_cases_is_listed() -> None:
    assert {case.op for case in all_cases()} == {path.parent.name for path in FOLDER.glob("*/cases.py")}


def test_names_are_unique() -> None:
    names = Counter((case.op, case.backend, case.name) for case in all_cases())
    assert [name for name, count in names.items() if count > 1] == []


def test_every_backend_has_quick_cases() -> None:
    assert {(case.op, case.backend) for case in QUICK} == {(case.op, case.backend) for case in all_cases()}


def test_cases_are_for_cards_that_have_the_operand_type() -> None:
    for case in all_cases():
        for gpu in GPUS.values():
            assert gpu.generation not in case.generations or case.work.dtype in gpu.tflops, case.name


def test_unknown_case() -> None:
    with pytest.raises(KeyError, match="0 cases are named attention/triton/nothing"):
        find_case("attention", "triton", "nothing")


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.op}-{case.backend}-{case.name}")
def test_kernel_and_oracle_have_equal_results(case: KernelCase) -> None:
    if case.backend == "mosaic" and jax.__version_info__[:2] < MOSAIC_SINCE:
        pytest.skip(f"Mosaic needs a newer jax than {jax.__version__}")
    inputs = jax.eval_shape(lambda: case.inputs(jax.random.key(0)))
    expected = jax.eval_shape(case.oracle, *inputs)
    found = jax.eval_shape(case.build(case.generations[-1], None), *inputs)
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(lambda x: x.shape, expected)


def test_listing_starts_no_backend() -> None:
    """Processes that compile are forked from one that has made the list."""
    lines = (
        "from jax._src import xla_bridge",
        "from pallas_kernels.all_cases import all_cases",
        "all_cases()",
        "print(xla_bridge._backends)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=FOLDER.parent)
    assert done.stdout.strip() == "{}"
