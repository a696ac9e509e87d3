"""Cumulative, delta and final outputs, and the interval between them."""

import pytest

from jaxinfer.engine.assembly import OutputAssembler
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import FinishReason, Request
from jaxinfer.sampling_params import OutputKind, SamplingParams


def outputs(n: int = 1, count: int = 7, finish: bool = True, **params) -> list[RequestOutput]:
    """What a consumer that is always ready sees of ``count`` tokens per choice that come one by one."""
    request = Request("r", "p", (1,), SamplingParams(n=n, **params))
    assembler, seen = OutputAssembler(request, None), []
    for i in range(count):
        for index in range(n):
            reason = FinishReason.LENGTH if finish and i == count - 1 else None
            assembler.add(OutputDelta("r", index, (10 * index + i,), f"{i}", finish_reason=reason))
            if assembler.due:
                seen.append(assembler.take())
    return seen


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_cumulative():
    assert ids_of(outputs(count=3)) == [[0], [0, 1], [0, 1, 2]]
    assert [o.outputs[0].text for o in outputs(count=3)] == ["0", "01", "012"]
    assert [o.finished for o in outputs(count=3)] == [False, False, True]


def test_cumulative_outputs_are_snapshots():
    seen = outputs(count=3)
    assert len({id(o.outputs[0]) for o in seen}) == 3


def test_delta():
    seen = outputs(count=3, output_kind=OutputKind.DELTA)
    assert ids_of(seen) == [[0], [1], [2]]
    assert [o.outputs[0].finish_reason for o in seen] == [None, None, "length"]


def test_final_only():
    assert ids_of(outputs(count=3, output_kind=OutputKind.FINAL_ONLY)) == [[0, 1, 2]]
    assert outputs(count=3, finish=False, output_kind=OutputKind.FINAL_ONLY) == []


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.DELTA])
def test_the_interval_counts_tokens_and_the_first_token_comes_at_once(kind):
    seen = outputs(count=9, output_kind=kind, stream_interval=3)
    ends = [output.outputs[0].token_ids[-1] for output in seen]
    assert ends == [0, 3, 6, 8]
    if kind is OutputKind.DELTA:
        assert ids_of(seen) == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]


def test_the_interval_is_kept_for_each_choice():
    seen = outputs(n=2, count=5, output_kind=OutputKind.DELTA, stream_interval=2)
    by_choice: dict[int, list[list[int]]] = {0: [], 1: []}
    for output in seen:
        for choice in output.outputs:
            by_choice[choice.index].append(choice.token_ids)
    for index, pieces in by_choice.items():
        assert [t for piece in pieces for t in piece] == [10 * index + i for i in range(5)]
        assert pieces[0] == [10 * index]


def test_final_outputs_hold_all_choices_in_order():
    (output,) = outputs(n=3, count=2, output_kind=OutputKind.FINAL_ONLY)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert output.finished


def test_deltas_hold_only_choices_with_news():
    seen = outputs(n=3, count=1, output_kind=OutputKind.DELTA)
    assert [[choice.index for choice in output.outputs] for output in seen] == [[0], [1], [2]]
    assert [output.finished for output in seen] == [False, False, True]


def test_what_is_not_taken_merges_into_one_output():
    request = Request("r", "p", (1,), SamplingParams(output_kind=OutputKind.DELTA))
    assembler = OutputAssembler(request, None)
    for i in range(1000):
        assembler.add(OutputDelta("r", 0, (i,), "x"))
    output = assembler.take()
    assert output.outputs[0].token_ids == list(range(1000))
    assert not assembler.due


def test_errors_are_reported():
    request = Request("r", "p", (1,), SamplingParams(output_kind=OutputKind.DELTA))
    assembler = OutputAssembler(request, None)
    assembler.add(OutputDelta("r", 0, finish_reason=FinishReason.ERROR, error="why"))
    assert assembler.due
    output = assembler.take()
    assert (output.finished, output.error, output.outputs[0].finish_reason) == (True, "why", "error")
