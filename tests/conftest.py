"""Settings of the whole test run, and the support matrix that it writes."""

import os
from pathlib import Path

import pytest

from tests.support.compiling import UNOPTIMIZED, as_flags
from tests.support.kernels import BACKENDS, KERNELS
from tests.support.matrix import render

PROPERTY = "features"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--support-matrix",
        type=Path,
        help="write the features, and pairs of features, that passing tests exercise to this Markdown file",
    )
    parser.addoption(
        "--kernels",
        choices=BACKENDS,
        default="xla",
        help="backend of the ops in tests marked `kernels`: the engine with real kernels, interpreted without a GPU",
    )
    parser.addoption(
        "--unoptimized",
        action="store_true",
        help="XLA compiles quickly, what runs slowly; not for tests on or for GPUs",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Read by tests.support.kernels, also in the processes that share the work.
    os.environ[KERNELS] = config.getoption("--kernels")
    # Tests build the same programs again and again, in several processes: compile each of them once.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.rootpath / ".cache" / "xla-tests"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # For tests of models on several devices; all others use the first one. Fixed when JAX starts.
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    if config.getoption("--unoptimized"):
        # A default: jitted functions with options of their own keep them. In the environment, also because JAX takes
        # what it finds there into the keys of its cache.
        flags = os.environ.get("XLA_FLAGS", "")
        wanted = as_flags(UNOPTIMIZED)
        if wanted not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {wanted}".strip()
    config.addinivalue_line(
        "markers", "feature(*names): the features that the test exercises, together; for the support matrix"
    )
    config.pluginmanager.register(_Recorder(config.getoption("--support-matrix")), "support-matrix")


class _Recorder:
    """Notes which tests with a ``feature`` marker passed, in this process or in one that reports to it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._passed: dict[str, tuple[str, ...]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            names = {name for mark in item.iter_markers("feature") for name in mark.args}
            if names:
                item.user_properties.append((PROPERTY, tuple(sorted(names))))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for name, features in report.user_properties:
                if name == PROPERTY:
                    self._passed[report.nodeid] = tuple(features)  # type: ignore[arg-type]

    def pytest_sessionfinish(self) -> None:
        if self._path is not None and "PYTEST_XDIST_WORKER" not in os.environ:
            self._path.write_text(render([self._passed[nodeid] for nodeid in sorted(self._passed)]))
