"""Properties of the speed model: more of anything good never hurts, and the parts add up."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.planning.assumptions import SOURCES, Assumptions, assume
from jaxinfer.planning.described import describe
from jaxinfer.planning.layouts import Replica, candidates
from jaxinfer.planning.load import Load, Techniques, parse_load
from jaxinfer.planning.parts import model_parts
from jaxinfer.planning.roofline import Work, stage_models
from jaxinfer.planning.search import NoPlanError, Plan, make_plan
from jaxinfer.planning.service import ReplicaModel, batches, serve
from jaxinfer.planning.techniques import parse_techniques, variations
from pallas_kernels.gpus import CARDS

H200, ASSUMED = CARDS["h200"], Assumptions()
FP8 = Techniques(weights="fp8", cache="fp8")
LAYOUTS = {
    "llama-3-8b": (Replica(), Replica(4), Replica(2, pipeline=2)),
    "qwen3-30b-a3b": (Replica(), Replica(2, 2), Replica(expert=4, attention="data")),
}
REPLICAS = [(name, replica) for name, replicas in LAYOUTS.items() for replica in replicas]
LOADS = st.builds(Load, st.floats(1, 1e6), st.floats(16, 8000), st.floats(16, 2000))
CASES = st.sampled_from(REPLICAS)
PICKED = settings(max_examples=15, deadline=None)


def replica_model(
    name: str, replica: Replica, techniques: Techniques = FP8, **assumed: float
) -> ReplicaModel:
    parts = model_parts(describe(name).config)
    return ReplicaModel.make(parts, replica, H200, techniques, replace(ASSUMED, **assumed))


def plan(name: str, load: Load, techniques: Techniques = FP8, gpu: str = "h200", **more: object) -> Plan:
    more = {"max_devices": 2, **more}
    return make_plan(model_parts(describe(name).config), CARDS[gpu], load, techniques, ASSUMED, **more)  # type: ignore[arg-type]


@PICKED
@given(CASES, LOADS, st.integers(1, 2000), st.sampled_from((256, 2048)))
def test_more_sequences_serve_more_and_are_slower(
    case: tuple[str, Replica], load: Load, sequences: int, chunk: int
) -> None:
    """What bisection relies on."""
    model = replica_model(*case)
    few, many = (serve(model, load, n, chunk) for n in (float(sequences), math.ceil(sequences * 1.06)))
    if many is None:
        return
    assert few is not None
    assert many.rate >= few.rate * (1 - 1e-9)
    assert many.tpot >= few.tpot * (1 - 1e-9)
    assert many.gap >= few.gap * (1 - 1e-9)


@PICKED
@given(CASES, LOADS, st.integers(1, 500), st.sampled_from(("memory", "compute", "link")))
def test_better_hardware_is_never_slower(
    case: tuple[str, Replica], load: Load, sequences: int, what: str
) -> None:
    model = replica_model(*case)
    work = Work(sequences, 1, load.prompt, 512, load.prompt / 2)
    better = replica_model(*case, **{f"{what}_efficiency": 1.0})
    assert better.period(work) <= model.period(work)


@PICKED
@given(CASES, LOADS, st.integers(1, 500), st.floats(0, 0.9))
def test_prefix_hits_never_hurt(case: tuple[str, Replica], load: Load, sequences: int, hits: float) -> None:
    without = serve(replica_model(*case), load, sequences, 512)
    with_hits = serve(replica_model(*case, replace(FP8, prefix_hits=hits)), load, sequences, 512)
    if without is not None:
        assert with_hits is not None
        assert with_hits.rate >= without.rate * (1 - 1e-9)


@PICKED
@given(CASES, st.integers(1, 4000), st.floats(1, 8000))
def test_a_step_does_what_its_parts_do(case: tuple[str, Replica], tokens: int, context: float) -> None:
    """Halves of a step take at least as long together, and each part is a time."""
    for stage in replica_model(*case).stages:
        whole = stage.step(Work(2 * tokens, 1, context))
        half = stage.step(Work(tokens, 1, context))
        assert whole.total <= 2 * half.total * (1 + 1e-9)
        assert whole.total >= half.total
        for part in (whole.matrices, whole.experts, whole.attention, whole.head, whole.exchange):
            assert 0 <= part < math.inf


def test_a_decode_step_reads_what_it_must() -> None:
    """One token of Llama-3-8B in bfloat16: all weights but the embedding, and K and V of its context."""
    (stage,) = stage_models(
        model_parts(describe("llama-3-8b").config),
        Replica(),
        H200,
        Techniques(),
        replace(ASSUMED, memory_efficiency=1.0),
    )
    time = stage.step(Work(1, 1, 1000))
    assert time.matrices == pytest.approx(32 * 218_103_808 * 2 / 4.8e12)
    assert time.attention == pytest.approx(1000 * 131_072 / 4.8e12)
    assert time.head == pytest.approx((128_256 * 4096 * 2 + 2 * 12 * 128_256) / 4.8e12, rel=1e-3)
    assert time.exchange == 0


def test_all_reduces_are_counted_as_in_the_engine() -> None:
    """Two a layer, one for a shared expert, one for the embedding (docs/parallel.md)."""

    def reductions(name: str) -> int:
        parts = model_parts(describe(name).config)
        (stage,) = stage_models(parts, Replica(2), H200, FP8, ASSUMED)
        return stage.exchange.reductions

    assert reductions("llama-3-8b") == 2 * 32 + 1
    assert reductions("deepseek-v3") == 2 * 61 + 58 + 1


def test_the_layouts_that_are_tried() -> None:
    mixtral, llama = describe("mixtral-8x7b").config, describe("llama-3-8b").config
    assert all(replica.expert == 1 for replica in candidates(llama, 8, 16))
    tried = set(candidates(mixtral, 8, 16))
    assert {replica.expert for replica in tried} == {1, 2, 4, 8}
    assert max(replica.devices for replica in tried) == 16
    by_data = list(candidates(mixtral, 8, 16, "data"))
    assert {replica.expert for replica in by_data} == {1, 2, 4, 8}
    assert {(replica.tensor, replica.pipeline) for replica in by_data} == {(1, 1)}


class TestPlans:
    LOAD = Load(1000, 1000, 300, ttft=1.0, tpot=0.05, gap=0.2)

    def test_limits_are_met_and_the_rate_is_served(self) -> None:
        found = plan("llama-3-8b", self.LOAD)
        (pool,) = found.pools
        assert (found.ttft, found.tpot, found.gap) <= (1.0, 0.05, 0.2)
        assert pool.replicas * pool.service.rate >= self.LOAD.rate > (pool.replicas - 1) * pool.service.rate
        assert pool.service.sequences in batches(4096)

    @pytest.mark.parametrize(
        "change", [{"tpot": 0.02}, {"ttft": 0.2}, {"output": 600}, {"prompt": 3000}], ids=str
    )
    def test_harder_loads_take_more(self, change: dict[str, float]) -> None:
        assert (
            plan("llama-3-8b", replace(self.LOAD, **change)).devices >= plan("llama-3-8b", self.LOAD).devices
        )

    def test_twice_the_rate_takes_twice_the_replicas(self) -> None:
        one, two = plan("llama-3-8b", self.LOAD), plan("llama-3-8b", replace(self.LOAD, rate=2000))
        assert abs(two.devices - 2 * one.devices) <= one.pools[0].model.replica.devices
        assert one.pools[0].service == two.pools[0].service

    def test_pools_of_their_own(self) -> None:
        found = plan("llama-3-8b", self.LOAD, replace(FP8, disaggregated=True))
        prefill, decode = found.pools
        assert (prefill.purpose, decode.purpose) == ("prefill", "decode")
        assert found.devices == prefill.devices + decode.devices
        assert (prefill.service.tpot, decode.service.ttft) == (0, 0)

    def test_a_model_that_does_not_fit_is_told(self) -> None:
        with pytest.raises(
            NoPlanError, match=r"1 GPU: weights and temporaries take .* GiB more than a device has"
        ):
            plan("llama-3-405b", self.LOAD, Techniques(), gpu="l4", max_devices=8)

    def test_limits_that_nothing_meets_are_told(self) -> None:
        with pytest.raises(NoPlanError, match=r"tpot 0\.00\d+ \(limit 1e-05\)"):
            plan("llama-3-8b", replace(self.LOAD, tpot=1e-5))

    def test_a_given_layout_is_not_searched(self) -> None:
        assert plan("llama-3-8b", self.LOAD, replica=Replica(2)).pools[0].model.replica == Replica(2)
        with pytest.raises(ValueError, match="3 does not divide 8"):
            plan("llama-3-8b", self.LOAD, replica=Replica(3))

    @pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
    def test_other_cards(self, gpu: str) -> None:
        slower = plan("llama-3-8b", self.LOAD, Techniques(), gpu=gpu)
        ours = plan("llama-3-8b", self.LOAD, Techniques())
        assert (slower.devices < ours.devices) == (gpu == "b200")


def test_every_technique_alone_and_left_out() -> None:
    used = Techniques("fp8", "fp8", prefix_hits=0.5, drafts=3, accepted=2.2, disaggregated=True)
    named = dict(variations(used, Techniques(batching="static")))
    assert named["none"] == Techniques(batching="static")
    assert named["all"] == used
    assert len(named) == 2 + 6 + 6
    assert not named["all but continuous batching"].disaggregated
    assert named["speculation, 2.2 tokens a step of 3 drafts"].accepted == 2.2
    assert named["all but prefix sharing, 50% hits"] == replace(used, prefix_hits=0.0)
    assert named["disaggregation"].batching == "continuous"


def test_every_assumption_has_a_source() -> None:
    assert set(SOURCES) == set(vars(ASSUMED))
    assert assume({"node_size": 4}).node_size == 4
    with pytest.raises(ValueError, match="unknown assumption 'speed'; allowed: memory_efficiency"):
        assume({"speed": 1})
    with pytest.raises(ValueError, match="must be positive"):
        assume({"memory_efficiency": 0})


def test_texts_of_loads_and_techniques() -> None:
    load = parse_load("rate=1.4M, prompt=1.5k, output=300, ttft=1s, tpot=50ms")
    assert load == Load(1.4e6, 1500, 300, 1.0, 0.05)
    found = parse_techniques("weights=fp8, drafts=3, accepted=2.2, disaggregated=yes")
    assert found == Techniques("fp8", drafts=3, accepted=2.2, disaggregated=True)
    assert parse_techniques("") == Techniques()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate=1, prompt=2", "load: missing 'output'"),
        ("rate=1, prompt=2, output=3, speed=4", "load: unknown 'speed'"),
        ("rate=1, prompt=2, output=x", "load: 'output=x' is not NAME=NUMBER"),
        ("rate=1, rate=1, prompt=2, output=3", "load: 'rate' is there twice"),
        ("rate=0, prompt=2, output=3", "load: rate is 0.0, but must be positive"),
    ],
)
def test_bad_loads_are_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weight=fp8", "unknown technique 'weight'; allowed: weights, cache, batching"),
        ("weights=fp6", "technique weights: 'fp6' is not allowed; allowed: bf16, fp8, int4"),
        ("drafts=x", "technique drafts: 'x' is not a number"),
        ("accepted=2", "2.0 tokens a step with 0 drafts"),
        ("prefix_hits=1", "prefix hits are 1.0, but must be"),
        ("batching=static, disaggregated=yes", "disaggregation goes with continuous batching only"),
    ],
)
def test_bad_techniques_are_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_techniques(text)
