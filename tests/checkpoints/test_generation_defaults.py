"""What a model's ``generation_config.json`` recommends."""

import logging

import pytest

from jaxinfer.checkpoints.generation_defaults import sampling_defaults


def test_only_sampling_fields_are_taken():
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 5, "eos_token_id": [1, 2]}
    assert sampling_defaults(config) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert sampling_defaults({}) == {}
    assert sampling_defaults({"temperature": None, "do_sample": False, "repetition_penalty": 1.1}) == {
        "repetition_penalty": 1.1
    }


@pytest.mark.parametrize("value", ["hot", -1.0, 7.5, True])
def test_values_out_of_range_are_left_out_with_a_warning(value, caplog):
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults({"temperature": value, "top_p": 0.9}) == {"top_p": 0.9}
    assert "temperature" in caplog.text
