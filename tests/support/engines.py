"""Engines for tests: the real scheduler, block pool, sampler and output path around a scripted or simulated model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config import (
    CacheConfig,
    CompileConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from jaxinfer.engine.assembly import OutputAssembler
from jaxinfer.engine.build import Engine, assemble
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.inputs import Prompt
from jaxinfer.kv_transfer.connector import KVConnector
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import Request
from jaxinfer.runner.protocol import Runner
from jaxinfer.runner.scripted import Script, ScriptedRunner
from jaxinfer.runner.simulated import CostModel, SimulatedRunner
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.speculative.build import typical_of
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.tokenizer import Tokenizer

VOCAB = 320
EOS = (257, 258)
SLOTS = 8
"""Batch slots and sampled rows of scripted engines, whatever the scheduler's limit: one compiled sampler for all."""


def config(
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    prefix_caching: bool = True,
    speculative: SpeculativeConfig | None = None,
    **scheduler,
) -> EngineConfig:
    """A configuration for tests; ``scheduler`` overrides the fields of that scope."""
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **scheduler}
    return EngineConfig(
        model=ModelConfig(reference="test"),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(**values),
        compile=CompileConfig(cache_dir="none"),
        speculative=speculative or SpeculativeConfig(),
    )


def build(
    runner: Callable[[CompilePlan], Runner],
    settings: EngineConfig,
    *,
    tokenizer: Tokenizer | None = None,
    windows: tuple[int | None, ...] = (None,),
    vocab: int = VOCAB,
    max_model_len: int = 64,
    eos: tuple[int, ...] = EOS,
    shared_sampler: bool = False,
    connector: KVConnector | None = None,
    start: bool = True,
) -> Engine:
    """An engine around a runner.

    Args:
        connector: to other engines.
        start: it; then its events are taken at once.
        shared_sampler: the plan's sampling buckets do not depend on the settings.
    """
    drafts = settings.speculative.draft_limits
    plan = CompilePlan.make(
        settings.scheduler,
        max_model_len,
        settings.cache.block_size,
        len(windows),
        draft_limits=drafts,
        tree_nodes=settings.speculative.tree_nodes,
    )
    if shared_sampler:
        assert settings.scheduler.max_num_seqs <= SLOTS
        plan = replace(plan, max_num_seqs=SLOTS, row_buckets=(SLOTS + drafts[1],), scored_rows=SLOTS)
    assert settings.cache.num_blocks is not None
    engine = assemble(
        settings,
        runner(plan),
        plan,
        (settings.cache.num_blocks,) * len(windows),
        windows,
        tokenizer=tokenizer,
        chat_template=ChatTemplate({}),
        vocab_size=vocab,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        connector=connector,
    )
    if engine.core.remote is not None and start:
        engine.core.remote.connect()
        engine.core.remote.start(lambda function: function())
    return engine


def scripted(
    script: Script, settings: EngineConfig | None = None, *, record: list[StepPlan] | None = None, **options
) -> Engine:
    """An engine whose logits the test decides."""
    vocab, settings = options.get("vocab", VOCAB), settings or config()
    typical = typical_of(settings.speculative)
    return build(
        lambda plan: ScriptedRunner(script, vocab, plan, options.get("eos", EOS), record, typical),
        settings,
        shared_sampler=True,
        **options,
    )


def simulated(settings: EngineConfig | None = None, cost: CostModel | None = None, **options) -> Engine:
    """An engine without a model: tokens follow from request and position."""
    vocab = options.get("vocab", VOCAB)
    return build(lambda _: SimulatedRunner(vocab, cost or CostModel()), settings or config(), **options)


def one_hot(token: int, vocab: int = VOCAB) -> np.ndarray:
    logits = np.full(vocab, -20.0, np.float32)
    logits[token] = 20.0
    return logits


def sequence_script(outputs: dict[str, list[int]] | list[int], vocab: int = VOCAB) -> Script:
    """Forces the given output tokens, per request id or for all; after them EOS."""

    def script(request: Request, index: int, position: int) -> np.ndarray:
        tokens = outputs if isinstance(outputs, list) else outputs[request.request_id]
        at = position - len(request.prompt_token_ids)
        return one_hot(tokens[at] if 0 <= at < len(tokens) else EOS[0], vocab)

    return script


def uniform_script(vocab: int = VOCAB) -> Script:
    return lambda request, index, position: np.zeros(vocab, np.float32)


def static_script(logits: dict[int, float], rest: float = -5.0, vocab: int = VOCAB) -> Script:
    """The same logits at every step."""
    row = np.full(vocab, rest, np.float32)
    for token, value in logits.items():
        row[token] = value
    return lambda request, index, position: row


def context_script(vocab: int = VOCAB) -> Script:
    """Random logits that depend on the prompt's tokens up to the position, as a model's do; EOS is unlikely."""

    def script(request: Request, index: int, position: int) -> np.ndarray:
        context = (*request.prompt_token_ids[:position], position)
        logits = np.random.default_rng(context).normal(size=vocab).astype(np.float32)
        logits[list(EOS)] = -30.0
        return logits

    return script


def token_params(**values) -> SamplingParams:
    """Greedy and without text, unless said otherwise."""
    return SamplingParams(**{"temperature": 0.0, "detokenize": False, **values})


@dataclass
class Job:
    """A request of a test, added before step ``at``."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    at: int = 0
    priority: int = 0
    request_id: str = ""


def ids(tokens: Iterable[int]) -> Prompt:
    return {"prompt_token_ids": list(tokens)}


class Driver:
    """Adds requests to an engine and steps it, checking the integrity after every step.

    With overlap, what is done between two calls of ``step`` happens while a step is in flight.

    Attributes:
        deltas: all news by request id, in the order of arrival.
    """

    def __init__(self, engine: Engine, check: bool = True) -> None:
        self.engine = engine
        self.deltas: dict[str, list[OutputDelta]] = {}
        self._check = check
        self._assemblers: dict[str, OutputAssembler] = {}

    def add(self, name: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0) -> None:
        sequences = self.engine.inputs.process(name, prompt, params or SamplingParams(), priority)
        self.engine.core.add(sequences)
        self._assemblers[name] = OutputAssembler(sequences[0].request, self.engine.tokenizer)
        self.deltas[name] = []

    def abort(self, name: str) -> None:
        self.engine.core.abort(name)

    def step(self, count: int = 1) -> list[OutputDelta]:
        """News of the last of ``count`` steps."""
        news: list[OutputDelta] = []
        for _ in range(count):
            news = self.engine.core.step()
            for delta in news:
                self.deltas[delta.request_id].append(delta)
                self._assemblers[delta.request_id].add(delta)
            if self._check:
                self.engine.core.check_integrity()
        return news

    def drain(self, max_steps: int = 3000) -> None:
        """Steps until nothing is left to do, and checks that nothing leaked."""
        for _ in range(max_steps):
            if not self.engine.core.has_work:
                break
            self.step()
        else:
            raise AssertionError(f"the requests did not end within {max_steps} steps")
        if self._check:
            assert_clean(self.engine)

    def output(self, name: str) -> RequestOutput:
        return self._assemblers[name].take()

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for d in self.deltas[name] if d.index == index for t in d.token_ids]

    def finishes(self, name: str) -> list[str]:
        """Finish reasons of all terminal news of a request."""
        return [d.finish_reason.value for d in self.deltas[name] if d.finish_reason is not None]


def run(engine: Engine, jobs: list[Job], *, max_steps: int = 3000, check: bool = True) -> list[RequestOutput]:
    """Runs the jobs to their end and returns their outputs, checking the integrity after every step."""
    driver = Driver(engine, check)
    names = [job.request_id or str(i) for i, job in enumerate(jobs)]
    waiting = dict(enumerate(jobs))
    for step in range(max_steps):
        for i in [i for i, job in waiting.items() if job.at <= step]:
            job = waiting.pop(i)
            driver.add(names[i], job.prompt, job.params, job.priority)
        if not waiting:
            break
        driver.step()
    driver.drain(max_steps)
    return [driver.output(name) for name in names]


def assert_clean(engine: Engine) -> None:
    """Nothing runs or waits, and every block is free (cached ones count as free)."""
    kv = engine.core.scheduler.kv
    assert not engine.core.has_work
    assert engine.core.num_requests == 0
    for pool in kv.pools:
        assert pool.num_free == pool.num_usable
    engine.core.check_integrity()
