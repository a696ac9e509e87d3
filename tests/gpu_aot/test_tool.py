"""The check of compiled kernels finds what it is there to find."""

from collections.abc import Mapping

import pytest

from pallas_kernels.aot.checks import problems
from pallas_kernels.aot.isolated import Job, Outcome, run_isolated
from pallas_kernels.aot.toolchain import missing
from pallas_kernels.gpus import GPUS
from pallas_kernels.kernel_case import Limits
from tests.gpu_aot import faulty_programs

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"cannot compile for GPUs here: {missing()}"),
    pytest.mark.timeout(600),
]

NAMES = (
    *("sound", "spilling", "too_much_shared_memory", "without_tensor_cores"),
    *("not_in_place", "aborting", "raising"),
)
H200 = GPUS["h200"]


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, Outcome]:
    jobs = {name: Job(f"{faulty_programs.__name__}:{name}", (), "h200") for name in NAMES}
    found = {outcome.job: outcome for outcome in run_isolated(list(jobs.values()))}
    return {name: found[job] for name, job in jobs.items()}


def problems_of(outcome: Outcome, limits: Limits) -> str:
    assert outcome.facts is not None, outcome.error
    return "; ".join(problems(limits, H200, outcome.facts, outcome.donated_bytes))


def test_nothing_is_wrong_with_a_sound_kernel(outcomes: Mapping[str, Outcome]) -> None:
    assert problems_of(outcomes["sound"], Limits(registers=168, temp_bytes=0)) == ""
    kernel = next(k for k in outcomes["sound"].facts.kernels if k.pallas)
    assert (kernel.name, kernel.arch, kernel.grid, kernel.threads) == ("planted", "sm_90a", "16,1,1", 128)
    assert kernel.shared_bytes > 0


@pytest.mark.parametrize(
    ("name", "limits", "expected"),
    [
        ("spilling", Limits(), "bytes of registers spilled; allowed: 0"),
        ("sound", Limits(registers=16), "registers; allowed: 16"),
        ("without_tensor_cores", Limits(), "no mma instruction; found: none"),
        ("not_in_place", Limits(tensor_core=None), "0 of 16384 donated bytes are updated in place"),
        ("not_in_place", Limits(tensor_core=None), "no Pallas kernel in the program"),
    ],
)
def test_faults_are_found(outcomes: Mapping[str, Outcome], name: str, limits: Limits, expected: str) -> None:
    assert expected in problems_of(outcomes[name], limits)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("too_much_shared_memory", "Shared memory size limit exceeded"),
        ("aborting", "the compiler ended the process (-6)"),
        ("raising", "ValueError: this shape is not supported"),
    ],
)
def test_what_does_not_compile_says_why(outcomes: Mapping[str, Outcome], name: str, expected: str) -> None:
    assert outcomes[name].facts is None
    assert expected in outcomes[name].error
