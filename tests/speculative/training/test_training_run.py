"""Whole training runs on a tiny model: what they write, kills in the middle, recipes that are refused."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from safetensors.numpy import load_file

from jaxinfer.checkpoints.model_files import open_model
from jaxinfer.config_values import ConfigError
from jaxinfer.draft_training import train_draft
from jaxinfer.models.registry import parse_config
from jaxinfer.speculative.heads.loading import open_head
from jaxinfer.speculative.training.config import TrainConfig
from jaxinfer.speculative.training.loop import read_records
from jaxinfer.speculative.training.text import read_lines
from tests.support.tiny_checkpoint import write

STEPS, KILLED_AT = 30, 17
# Kills itself, as the kernel would, in the middle of the optimisation.
CHILD = """
import os, signal, sys
from pathlib import Path
from jaxinfer.draft_training import train_draft
from jaxinfer.speculative.training.config import TrainConfig

def report(part, done, total, news):
    if part == "training" and done == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

train_draft("medusa", TrainConfig.load(Path(sys.argv[1])), report)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, a text, and a compilation cache that the runs share."""
    before = jax.config.jax_compilation_cache_dir
    folder = tmp_path_factory.mktemp("target")
    write(folder / "model")
    text = [
        "the cat sat on the mat and the dog sat on the log",
        "a rose is a rose is a rose",
        "to be or not to be",
    ]
    (folder / "text.txt").write_text("\n".join(text * 5))
    yield folder
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def recipe(model: Path, directory: Path, **changes: dict) -> Path:
    """Writes a recipe; ``changes`` by scope."""
    scopes: dict[str, dict] = {
        "model": {"reference": str(model / "model"), "max_model_len": 64},
        "data": {"source": "file", "file": str(model / "text.txt"), "sequence_length": 32, "held_out": 0.2},
        "head": {"predictions": 2, "draft_vocab_size": 40},
        "optimizer": {
            "steps": STEPS,
            "batch_sequences": 4,
            "learning_rate": 3e-3,
            "checkpoint_every": 5,
            "evaluate_every": 10,
            "warmup_steps": 2,
        },
        "output": {"directory": str(directory)},
        "compile": {"cache_dir": str(model / "compiled"), "warm_up": "lazy"},
    }
    for scope, values in changes.items():
        scopes.setdefault(scope, {}).update(values)
    path = directory.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(scopes))
    return path


def quiet(part: str, done: int, total: int, news: str) -> None:
    pass


@pytest.mark.slow
def test_a_killed_run_ends_as_if_it_had_not_been(model: Path, tmp_path: Path) -> None:
    whole = train_draft("medusa", TrainConfig.load(recipe(model, tmp_path / "whole")), quiet)
    path = recipe(model, tmp_path / "killed")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(KILLED_AT)],
        env=environment,
        capture_output=True,
        timeout=280,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()[-2000:]
    work = tmp_path / "killed" / "training"
    assert max(r["step"] for r in read_records(work / "metrics.jsonl")) == KILLED_AT
    # What a kill in the middle of a write leaves behind.
    (work / "checkpoints" / "00000020.orbax-checkpoint-tmp").mkdir()
    with (work / "metrics.jsonl").open("a") as file:
        file.write('{"step": 18, "lo')

    steps: list[int] = []
    resumed = train_draft(
        "medusa",
        TrainConfig.load(path),
        lambda part, done, total, news: steps.append(done) if part == "training" else None,
    )
    assert steps == list(range(16, STEPS + 1)), "goes on behind the newest checkpoint"
    assert resumed.loss == whole.loss
    assert (resumed.before, resumed.after) == (whole.before, whole.after)
    tensors, others = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert tensors.keys() == others.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)
    losses = [
        [r["loss"] for r in read_records(tmp_path / name / "training" / "metrics.jsonl") if "loss" in r]
        for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
    assert np.mean(losses[0][-5:]) < np.mean(losses[0][:5]) - 0.2
    target = parse_config(open_model(model / "model").config)
    files = open_head(tmp_path / "killed", target)
    assert files.method == "medusa"
    assert files.vocab_map is not None
    assert len(files.vocab_map) == 40
    assert (work / "curves.png").stat().st_size > 10_000
    report = json.loads((work / "report.json").read_text())
    assert report["after"]["mean_length"] == pytest.approx(whole.after.mean_length)

    # A finished run that is started again has nothing left to do; another recipe is not mixed into it.
    assert train_draft("medusa", TrainConfig.load(path), quiet).loss == whole.loss
    other = recipe(model, tmp_path / "killed", optimizer={"learning_rate": 1e-2})
    with pytest.raises(ConfigError, match=r"another recipe \(it differs in optimizer.learning_rate\)"):
        train_draft("medusa", TrainConfig.load(other), quiet)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_eagle_heads_learn_what_the_model_says(method: str, model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"tell me about {word}" for word in "abcdefghijklmnop"))
    data = {"source": "generate", "prompts": str(prompts), "max_tokens": 24, "sequence_length": 64}
    vocab = {"draft_vocab_size": None if method == "eagle" else 64}
    settings = {"cache": {"num_blocks": 200}, "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64}}
    path = recipe(model, tmp_path / "out", data=data, head=vocab, **settings)
    trained = train_draft(method, TrainConfig.load(path), quiet)  # type: ignore[arg-type]
    records = read_records(tmp_path / "out" / "training" / "metrics.jsonl")
    losses = [r["loss"] for r in records if "loss" in r]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    target = parse_config(open_model(model / "model").config)
    assert open_head(trained.directory, target).method == method


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_the_recipes_that_are_shipped_can_be_read(method: str) -> None:
    shipped = TrainConfig.load(Path(f"configs/train_{method}_smollm2.yaml"))
    assert shipped.data.prompts is not None
    prompts = read_lines(shipped.data.prompts, "prompts")
    assert len(set(prompts)) == len(prompts)
    assert shipped.data.max_sequences is not None
    assert len(prompts) >= shipped.data.max_sequences


def problems(path: Path, tree: dict) -> str:
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path)
    return str(caught.value)


def test_all_problems_of_a_recipe_are_told(tmp_path: Path) -> None:
    text = problems(
        tmp_path / "a.yaml",
        {
            "model": {"reference": "m"},
            "data": {"source": "file", "file": "x", "temprature": 1},
            "optimiser": {"steps": 3},
            "output": {"directory": "x", "dtype": "int4"},
        },
    )
    assert "data.temprature: unknown key; did you mean temperature?" in text
    assert "optimiser: unknown scope; did you mean optimizer?" in text
    assert "output.dtype" in text
    tree = {"model": {"reference": "m"}, "data": {"source": "generate"}, "output": {"directory": "x"}}
    assert "source is generate, which needs prompts" in problems(tmp_path / "b.yaml", tree)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("eagle", {"head": {"draft_vocab_size": 40}}, "EAGLE-1/2 predicts all"),
        ("medusa", {"head": {"draft_vocab_size": 400}}, "there are 259 tokens"),
        ("medusa", {"data": {"file": "/nowhere.txt"}}, "data.file: /nowhere.txt: No such file"),
        ("medusa", {"data": {"max_bytes": 300}}, "0 sequences of text are too few"),
    ],
    ids=["eagle_vocabulary", "vocabulary", "file", "disk"],
)
def test_what_does_not_fit_is_refused(
    method: str, changes: dict, message: str, model: Path, tmp_path: Path
) -> None:
    path = recipe(model, tmp_path / "out", **changes)
    with pytest.raises(ConfigError, match=message):
        train_draft(method, TrainConfig.load(path), quiet)  # type: ignore[arg-type]
