"""Settings of the whole test run, and the support matrix that it writes."""

import os
from pathlib import Path

import pytest

from tests.support.matrix import render


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--support-matrix",
        type=Path,
        help="write the features, and pairs of features, that passing tests exercise to this Markdown file",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Tests build the same programs again and again, in several processes: compile each of them once.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.rootpath / ".cache" / "xla-tests"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    config.addinivalue_line(
        "markers", "feature(*names): the features that the test exercises, together; for the support matrix"
    )
    config.pluginmanager.register(_Recorder(config.getoption("--support-matrix")), "support-matrix")


class _Recorder:
    """Notes which tests with a ``feature`` marker passed."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._features: dict[str, tuple[str, ...]] = {}
        self._passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            names = {name for mark in item.iter_markers("feature") for name in mark.args}
            if names:
                self._features[item.nodeid] = tuple(sorted(names))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and report.nodeid in self._features:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self._path is not None:
            self._path.write_text(render([self._features[nodeid] for nodeid in sorted(self._passed)]))
