"""Random scenarios of requests, aborts, sizes and policies on the real engine around shadow memory."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.scenarios import Scenario, play, scenario_of, verify

pytestmark = pytest.mark.feature(
    "prefix cache",
    "preemption",
    "n > 1",
    "priorities",
    "abort",
    "sliding window",
    "chunked prefill",
    "overlap",
    "continuous batching",
)

QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=300, **QUIET)
@given(scenario_of())
def test_every_request_gets_what_it_would_get_alone(scenario: Scenario) -> None:
    """After every step nothing is lost, something moved, and every token saw exactly its own history."""
    verify(scenario, play(scenario))
