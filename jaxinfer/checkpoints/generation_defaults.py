"""Sampling parameters that a model's ``generation_config.json`` recommends."""

import logging
from collections.abc import Mapping
from typing import Any

from jaxinfer.sampling_params import InvalidParamsError, SamplingParams

logger = logging.getLogger(__name__)

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The fields of ``SamplingParams`` that the model's authors set; a value out of range is left out, with a warning.

    ``do_sample`` is not looked at: it says whether a library samples by default, not how.
    """
    defaults: dict[str, float] = {}
    for name in FIELDS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidParamsError as error:
            logger.warning("generation_config.json: %s; not used", error)
        else:
            defaults[name] = value
    return defaults
