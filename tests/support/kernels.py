"""Which op backend the tests of the engine run with: ``pytest --kernels triton -m kernels``."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_kernels.ops import Ops

KERNELS = "JAXINFER_TEST_KERNELS"
BACKENDS = ("xla", "triton")


def kernels() -> str:
    """The backend of this test run."""
    return os.environ.get(KERNELS, "xla")


def kernel_ops() -> "Ops":
    """The ops of this test run; a fallback is an error, so that the kernels are what is tested."""
    # Not above: ``conftest`` reads this file before it sets the variables that JAX reads when it is imported.
    from pallas_kernels.select import select_ops

    return select_ops(kernels(), "cpu", strict=True)
