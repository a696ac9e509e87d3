"""Processes that were connected at the start may be late for each other later on."""

import subprocess
import sys

import pytest

from serve.launch import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.feature("several hosts")]

LATE = 40.0
"""Longer than the 30 s that gloo waits for a connection."""


def test_a_rank_that_is_late_for_a_sum_is_waited_for() -> None:
    port = str(free_ports(1))
    command = [sys.executable, "-m", "tests.support.late_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), port, str(LATE)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=1500)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    # Behind what gloo says.
    assert [text.splitlines()[-1] for text in said] == ["[2.0, 2.0, 2.0]"] * 2
