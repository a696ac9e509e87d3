"""How many replicas a load needs."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from jaxinfer.config_values import ConfigError
from serve.replicas.config import Peak, ReplicasConfig, ScalingConfig
from serve.replicas.demand import KV_USAGE, REQUESTS, scheduled_minimum, wanted_replicas

NOON = datetime(2026, 11, 30, 12, 0, tzinfo=ZoneInfo("UTC"))  # a Monday


def report(requests: float, usage: float = 0.0) -> dict[str, float]:
    return {REQUESTS: requests, KV_USAGE: usage}


@pytest.mark.parametrize(
    ("reports", "queued", "wanted"),
    [
        ([], 0, 1),
        ([report(10)], 0, 1),
        ([report(11)], 0, 2),
        ([report(8)], 4, 2),
        ([report(30), report(0)], 0, 3),
        ([report(1, 0.9)], 0, 2),
        ([report(1, 0.7), report(1, 0.7), report(1, 0.7)], 0, 3),
        ([report(100, 1.0)] * 4, 1000, 5),
    ],
)
def test_queue_and_kv_usage(reports, queued, wanted):
    scaling = ScalingConfig(min_replicas=1, max_replicas=5, target_requests=10, target_kv_usage=0.7)
    assert wanted_replicas(scaling, reports, queued, NOON) == wanted


def peak(start: str, end: str, least: int, **values) -> Peak:
    return Peak(start=start, end=end, min_replicas=least, **values)


def test_scheduled_minimums():
    peaks = (
        peak("09:00", "12:00", 3, days=("mon", "tue")),
        peak("11:00", "13:00", 2),
        peak("22:00", "02:00", 4, days=("mon",)),
    )
    monday = NOON.replace(tzinfo=None)
    at = {
        (30, 8): 0, (30, 9): 3, (30, 11): 3, (30, 12): 2, (30, 13): 0, (30, 22): 4, (30, 1): 0,
    }  # fmt: skip
    for (day, hour), least in at.items():
        assert scheduled_minimum(peaks, monday.replace(day=day, hour=hour)) == least
    assert scheduled_minimum(peaks, datetime(2026, 12, 1, 1)) == 4, "it began on Monday"
    assert scheduled_minimum(peaks, datetime(2026, 12, 2, 1)) == 0
    assert scheduled_minimum(peaks, datetime(2026, 12, 2, 9)) == 0, "a Wednesday"


def test_peaks_are_on_the_clock_of_their_time_zone():
    scaling = ScalingConfig(max_replicas=4, peaks=(peak("13:00", "14:00", 3),), timezone="Europe/Berlin")
    assert wanted_replicas(scaling, [], 0, NOON) == 3
    assert wanted_replicas(scaling.model_copy(update={"timezone": "UTC"}), [], 0, NOON) == 1


NINE = {"start": "09:00", "end": "10:00", "min_replicas": 1}


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, r"min_replicas \(3\) is above max_replicas \(2\)"),
        ({"look_back": 5}, r"look_back.*greater than 10"),
        ({"timezone": "Mars/Olympus"}, "is no time zone"),
        ({"peaks": [{**NINE, "min_replicas": 2}]}, "asks for 2 replicas, but max_replicas is 1"),
        ({"peaks": [{**NINE, "end": 1080}]}, "in quotes"),
        (
            {"peaks": [{**NINE, "day": ["mon"]}]},
            "models.0.scaling.peaks.0.day: unknown key; did you mean days",
        ),
        ({"max_replica": 2}, "models.0.scaling.max_replica: unknown key; did you mean max_replicas"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(scaling, message):
    with pytest.raises(ConfigError, match=message):
        ReplicasConfig.of({"models": [{"config": "x", "scaling": scaling}]})


def test_some_model_is_needed():
    with pytest.raises(ConfigError, match="models: at least one model is needed"):
        ReplicasConfig.of({"models": []})
