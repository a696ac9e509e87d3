"""Engines for tests: the real scheduler, block pool, sampler and output path around a scripted or simulated model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config import CacheConfig, CompileConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.assembly import OutputAssembler
from jaxinfer.engine.build import Engine, assemble
from jaxinfer.engine.inputs import Prompt
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import Request
from jaxinfer.runner.protocol import Runner
from jaxinfer.runner.scripted import Script, ScriptedRunner
from jaxinfer.runner.simulated import CostModel, SimulatedRunner
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.tokenizer import Tokenizer

VOCAB = 320
EOS = (257, 258)


def config(
    *, block_size: int = 4, num_blocks: int = 64, prefix_caching: bool = True, **scheduler
) -> EngineConfig:
    """A configuration for tests; ``scheduler`` overrides the fields of that scope."""
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **scheduler}
    return EngineConfig(
        model=ModelConfig(reference="test"),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(**values),
        compile=CompileConfig(cache_dir="none"),
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
) -> Engine:
    plan = CompilePlan.make(settings.scheduler, max_model_len, settings.cache.block_size, len(windows))
    assert settings.cache.num_blocks is not None
    return assemble(
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
    )


def scripted(
    script: Script, settings: EngineConfig | None = None, *, record: list[StepPlan] | None = None, **options
) -> Engine:
    """An engine whose logits the test decides."""
    vocab = options.get("vocab", VOCAB)
    return build(
        lambda plan: ScriptedRunner(script, vocab, plan, options.get("eos", EOS), record),
        settings or config(),
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


def run(engine: Engine, jobs: list[Job], *, max_steps: int = 3000, check: bool = True) -> list[RequestOutput]:
    """Runs the jobs to their end and returns their outputs, checking the integrity after every step."""
    waiting = {i: job for i, job in enumerate(jobs)}
    assemblers: dict[str, OutputAssembler] = {}
    names = [job.request_id or str(i) for i, job in enumerate(jobs)]
    for step in range(max_steps):
        for i in [i for i, job in waiting.items() if job.at <= step]:
            job = waiting.pop(i)
            sequences = engine.inputs.process(names[i], job.prompt, job.params, job.priority)
            assemblers[names[i]] = OutputAssembler(sequences[0].request, engine.tokenizer)
            engine.core.add(sequences)
        for delta in engine.core.step():
            assemblers[delta.request_id].add(delta)
        if check:
            engine.core.check_integrity()
        if not waiting and not engine.core.has_work:
            break
    else:
        raise AssertionError(f"the requests did not end within {max_steps} steps")
    if check:
        assert_clean(engine)
    return [assemblers[name].take() for name in names]


def assert_clean(engine: Engine) -> None:
    """Nothing runs or waits, and every block is free (cached ones count as free)."""
    kv = engine.core.scheduler.kv
    assert not engine.core.has_work
    assert engine.core.num_requests == 0
    for pool in kv.pools:
        assert pool.num_free == pool.num_usable
    engine.core.check_integrity()
