"""What is refused when a draft head is opened, and how it is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.speculative.heads.config import default_feature_layers
from jaxinfer.speculative.heads.loading import open_head
from tests.support.draft_heads import (
    TARGET,
    D,
    HeadFile,
    eagle3_file,
    eagle_file,
    load,
    medusa_file,
    vllm_medusa_file,
)


def with_config(file: HeadFile, **changes: Any) -> HeadFile:
    return replace(file, config={**file.config, **changes})


def with_tensors(file: HeadFile, **changes: np.ndarray) -> HeadFile:
    return replace(file, tensors={**file.tensors, **changes})


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (with_config(eagle3_file(), hidden_size=None), "'hidden_size' must be a positive integer, not None"),
        (with_config(eagle_file(), vocab_size=99), "vocab_size is 99, but the target model's is 64"),
        (with_config(eagle3_file(), draft_vocab_size=999), "draft_vocab_size 999 exceeds the target's 64"),
        (with_config(eagle3_file(), target_hidden_size=8), "target_hidden_size is 8, but the target"),
        (with_config(eagle3_file(), eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "3 numbers from 0 to 8"),
        (with_tensors(eagle3_file(), d2t=np.arange(24)[::-1].copy()), "in increasing order"),
        (with_config(medusa_file(), medusa_num_heads=99), "99 Medusa heads; at most 16"),
        (with_config(medusa_file(), hidden_size=99), "hidden_size is 99"),
        (with_config(vllm_medusa_file(), original_lm_head=True), "original_lm_head does not go with"),
        (HeadFile({}, {"something.weight": np.zeros(3, np.float32)}), "not a draft head that can be read"),
    ],
    ids=lambda value: value.replace(" ", "_")[:30] if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(file: HeadFile, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_head(file.write(tmp_path), TARGET)


def test_missing_and_left_over_tensors_are_listed(tmp_path: Path) -> None:
    file = eagle3_file()
    tensors = {name: value for name, value in file.tensors.items() if "q_proj" not in name}
    with pytest.raises(CheckpointError, match="q_proj") as error:
        load(replace(file, tensors={**tensors, "extra.weight": np.zeros(2, np.float32)}).write(tmp_path))
    assert "'extra.weight'" in str(error.value)


def test_a_table_is_needed_for_a_part_of_the_vocabulary(tmp_path: Path) -> None:
    file = eagle3_file()
    tensors = {name: value for name, value in file.tensors.items() if name != "d2t"}
    with pytest.raises(CheckpointError, match="predicts 24 of 64 tokens"):
        open_head(replace(file, tensors=tensors).write(tmp_path), TARGET)


def test_a_pickled_head_is_told_to_be_converted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: convert"):
        open_head(tmp_path, TARGET)


def test_an_output_head_that_is_the_targets_is_left_out(tmp_path: Path) -> None:
    file = with_tensors(eagle_file(), **{"lm_head.weight": np.zeros((64, D), np.float32)})
    head, _ = load(file.write(tmp_path))
    assert not any("lm_head" in path for path in head.paths)


def test_feature_layers_of_the_configuration(tmp_path: Path) -> None:
    file = with_config(eagle3_file(), eagle_aux_hidden_state_layer_ids=[0, 3, 8])
    assert load(file.write(tmp_path))[0].feature_layers == (0, 3, 8)


def test_default_feature_layers() -> None:
    assert default_feature_layers(32) == (2, 16, 29)
    assert default_feature_layers(30) == (2, 15, 27)
    assert default_feature_layers(2) == (0, 1, 2)
