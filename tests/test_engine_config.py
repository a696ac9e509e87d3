"""Configuration: sources and their order, all errors at once, nearest keys, sizes."""

import os
from pathlib import Path

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError, parse_bytes


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):

    for name in list(os.environ):
        if name.startswith("JAXINFER_"):
            monkeypatch.delenv(name)


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    return path


def problems(source, overrides=None) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(source, overrides)
    return str(caught.value)


# ---- sources


def test_a_model_reference_is_enough():
    config = EngineConfig.load("hf:org/name")
    assert config.model.reference == "hf:org/name"
    assert config.cache.block_size == 16


def test_yaml_then_environment_then_overrides(tmp_path, monkeypatch):
    path = yaml_file(
        tmp_path,
        "model: {reference: m}\ncache: {num_blocks: 10, block_size: 8}\nscheduler: {max_num_seqs: 3}\n",
    )
    monkeypatch.setenv("JAXINFER_CACHE__NUM_BLOCKS", "20")
    monkeypatch.setenv("JAXINFER_SCHEDULER__MAX_NUM_SEQS", "4")
    config = EngineConfig.load(path, {"cache.num_blocks": 30})
    assert (config.cache.num_blocks, config.cache.block_size, config.scheduler.max_num_seqs) == (30, 8, 4)
    assert EngineConfig.load(path).cache.num_blocks == 20


def test_environment_values_are_yaml(monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE__PREFIX_CACHING", "false")
    monkeypatch.setenv("JAXINFER_CACHE__MEMORY", "512MiB")
    monkeypatch.setenv("JAXINFER_MODEL__MAX_MODEL_LEN", "null")
    monkeypatch.setenv("JAXINFER_HOME", "unrelated: it names no scope")
    config = EngineConfig.load("m")
    assert config.cache.prefix_caching is False
    assert config.cache.memory == 512 * 2**20
    assert config.model.max_model_len is None


def test_spellings_of_overrides():
    for overrides in (
        {"cache.block_size": 8},
        {"cache": {"block_size": 8}},
        {"block_size": 8},
    ):
        assert EngineConfig.load("m", overrides).cache.block_size == 8


def test_a_bare_name_of_two_scopes_means_the_first():
    config = EngineConfig.load("m", {"dtype": "float16"})
    assert (config.model.dtype, config.cache.dtype) == ("float16", "auto")
    config = EngineConfig.load("m", {"cache.dtype": "float16"})
    assert (config.model.dtype, config.cache.dtype) == ("auto", "float16")


def test_the_model_may_be_given_as_a_string():
    assert EngineConfig.load("m", {"model": "other"}).model.reference == "other"


def test_overrides_of_a_scope_keep_its_other_fields(tmp_path):
    path = yaml_file(tmp_path, "model: {reference: m}\ncache: {num_blocks: 10}\n")
    config = EngineConfig.load(path, {"cache": {"block_size": 8}})
    assert (config.cache.num_blocks, config.cache.block_size) == (10, 8)


def test_a_configuration_can_be_changed_and_does_not_read_the_environment(monkeypatch):
    config = EngineConfig.load("m", {"block_size": 8})
    monkeypatch.setenv("JAXINFER_CACHE__BLOCK_SIZE", "32")
    changed = EngineConfig.load(config, {"num_blocks": 99})
    assert (changed.cache.block_size, changed.cache.num_blocks) == (8, 99)
    assert config.cache.num_blocks is None


# ---- errors


def test_all_errors_at_once_with_their_paths():
    message = problems(
        "m",
        {
            "cache.block_size": 0,
            "cache.num_block": 5,
            "scheduler": {"policy": "lifo", "max_num_seqs": -1},
            "shedule.overlap": 1,
            "max_waiting_seq": 3,
        },
    )
    for part in (
        "cache.block_size",
        "cache.num_block: unknown key; did you mean num_blocks?",
        "scheduler.policy",
        "(given: lifo)",
        "scheduler.max_num_seqs",
        "shedule: unknown scope; did you mean scheduler?",
        "max_waiting_seq: unknown key; did you mean max_waiting_seqs?",
    ):
        assert part in message


def test_a_key_without_a_near_one_lists_the_known():
    message = problems("m", {"cache.zzz": 1})
    assert "cache.zzz: unknown key; known: block_size, num_blocks" in message


def test_unknown_keys_in_yaml_and_environment(tmp_path, monkeypatch):
    path = yaml_file(tmp_path, "model: {reference: m, dtipe: x}\n")
    monkeypatch.setenv("JAXINFER_CACHE__BLOCKSIZE", "4")
    message = problems(path)
    assert "model.dtipe: unknown key; did you mean dtype?" in message
    assert "cache.blocksize: unknown key; did you mean block_size?" in message


def test_environment_values_that_are_no_yaml(monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE__NUM_BLOCKS", "[1, 2")
    assert "JAXINFER_CACHE__NUM_BLOCKS" in problems("m")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n- b\n", "must hold a mapping"),
        ("model: [unclosed\n", "not valid YAML"),
        ("", "must hold a mapping"),
        ("cache: {}\n", "model: Field required"),
        ("model: {reference: ''}\n", "model.reference"),
        ("model: {reference: m}\ncache: 5\n", "cache:"),
        ("model: {reference: m, sha256: xyz}\n", "model.sha256"),
    ],
)
def test_bad_files(tmp_path, text, part):
    assert part in problems(yaml_file(tmp_path, text))


def test_a_missing_file(tmp_path):
    assert "does not exist" in problems(tmp_path / "none.yaml")


def test_every_running_sequence_must_fit_a_step():
    message = problems("m", {"max_num_seqs": 8, "max_num_batched_tokens": 4})
    assert "max_num_batched_tokens (4) must be at least max_num_seqs (8)" in message


def test_configurations_are_frozen():
    config = EngineConfig.load("m")
    with pytest.raises(ValueError, match="frozen"):
        config.cache.block_size = 3  # type: ignore[misc]


# ---- sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", 512),
        ("1B", 1),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("1.5 GiB", 3 * 2**29),
        ("512mib", 512 * 2**20),
        ("2G", 2 * 10**9),
        (" 1 TiB ", 2**40),
        (7, 7),
        (None, None),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "1 PB", "1,5GB", "-1GB", "1e9"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match=r"is not a size; write for example 512MiB or 2GB"):
        parse_bytes(text)
    assert "cache.memory" in problems("m", {"cache.memory": text})


@pytest.mark.parametrize("text", ["1.2.3GB", "."])
def test_bad_numbers_in_sizes(text):
    test_bad_sizes(text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"parallel": {"tensor": 2}, "model": {"weights": "stored"}},
            "'stored' and parallel asks for 2 devices",
        ),
        (
            {"parallel": {"expert": 2}, "model": {"activations": "int8"}},
            "'int8' and parallel asks for 2 devices: rounded activations need weights in the form",
        ),
        (
            {"parallel": {"tensor": 2, "expert": 2}, "speculative": {"drafter": "model", "model": "x"}},
            "parallel asks for 4 devices: draft models and heads need one",
        ),
    ],
)
def test_what_needs_one_device_is_told(overrides, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.load("some/model", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {
            "speculative.drafter": "ngram",
            "speculative.acceptance": "typical",
            "speculative.typical_delta": 0.2,
        },
        {"parallel.tensor": 2, "model.weights": "float"},
        {"model.activations": "int8"},
        {"model.activations": "bfloat16"},
    ],
    ids=str,
)
def test_a_configuration_survives_the_way_to_another_process(overrides):
    """There every field is named, those with defaults too."""
    config = EngineConfig.load("package:x/y.gguf", overrides)
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
