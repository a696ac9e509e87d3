"""A simulated model behind the real processes.

``python -m tests.support.engine_process SECONDS STEPS DIRECTORY`` is an engine process. Its steps take ``SECONDS``;
after ``STEPS`` of them (-1: never) a step raises, or hangs if the last part of the configuration's model reference is
"hang". With a reference that is a directory, the tokenizer there is used.

``python -m tests.support.engine_process serve ...`` is the server with such an engine, whatever the model; the
arguments are those of ``jaxinfer serve``, written as ``--scope.key value``.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.engine.build import Engine
from jaxinfer.engine.model_setup import Progress
from jaxinfer.runner.simulated import CostModel, SimulatedRunner
from jaxinfer.tokenization.loading import load_text
from serve.overrides import parse_overrides
from serve.process.main import guard
from serve.process.server import run
from tests.support import engines

STEP_SECONDS = 0.002


class FailingRunner(SimulatedRunner):
    """Works for some steps, then raises or hangs."""

    def __init__(self, vocab: int, seconds: float, steps: int, hang: bool) -> None:
        super().__init__(vocab, CostModel(base=seconds))
        self._left = steps
        self._hang = hang

    def dispatch(self, plan, arrays):
        self._left -= 1
        if self._left == -1:
            if self._hang:
                time.sleep(3600)
            raise RuntimeError("the device is gone")
        return super().dispatch(plan, arrays)


def build(config: EngineConfig, progress: Progress, seconds: float = STEP_SECONDS, steps: int = -1) -> Engine:
    if config.model.reference == "broken":
        raise ConfigError("model.reference: this model is broken")
    if config.model.reference == "bug":
        raise AssertionError("a bug")
    for done in range(3):
        progress("loading weights", done, 2)
    hang = Path(config.model.reference).name == "hang"
    if hang and steps < 0:
        steps = 50
    path = Path(config.model.reference) if Path(config.model.reference).is_dir() else None
    tokenizer, _ = load_text(path)
    vocab = engines.VOCAB if tokenizer is None else tokenizer.vocab_size
    engine = engines.build(
        lambda _: FailingRunner(vocab, seconds, steps if steps >= 0 else 1 << 60, hang),
        config,
        tokenizer=tokenizer,
        vocab=vocab,
        max_model_len=config.model.max_model_len or 64,
    )
    return replace(engine, sampling_defaults={"temperature": 0.5}, text_path=path)


def serve_simulated(arguments: list[str]) -> int:
    from serve.run import EngineSource, serve  # not needed by an engine process

    overrides = parse_overrides(arguments)
    command = (sys.executable, "-m", "tests.support.engine_process", str(STEP_SECONDS), "-1")
    source = EngineSource(command, lambda config, progress: build(config, progress))
    return serve(EngineConfig.load(overrides["model.reference"], overrides), source)


def main() -> int:
    if sys.argv[1] == "serve":
        return serve_simulated(sys.argv[2:])
    seconds, steps, private = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    guard(private)
    return run(private, lambda config, progress: build(config, progress, seconds, steps))


if __name__ == "__main__":
    sys.exit(main())
