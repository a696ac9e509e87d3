"""The nouns of the engine."""

from jaxinfer.sampling_params import SamplingParams
from tests.support.sequences import make_sequence


def test_token_ids_are_a_slice_of_prompt_and_output() -> None:
    seq = make_sequence([10, 11, 12])
    seq.output_token_ids = [20, 21]
    known = [10, 11, 12, 20, 21]
    for start in range(7):
        for stop in range(7):
            assert seq.token_ids(start, stop) == known[start:stop], (start, stop)


def test_whether_positions_of_the_prompt_are_looked_at() -> None:
    assert not make_sequence([1], SamplingParams()).reads_prompt
    assert make_sequence([1], SamplingParams(prompt_logprobs=0)).reads_prompt
