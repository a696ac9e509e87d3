"""Engines that only ``cpu_peers.py`` measures, as functions of ``offline_worker.py``; each needs its own packages."""

from collections.abc import Callable

from workloads import Job

Run = Callable[[list[Job]], None]
THREADS = 2


def check(lengths: list[int], jobs: list[Job]) -> None:
    """A rate counts only if every request got all its tokens."""
    wanted = [job.max_tokens for job in jobs]
    if lengths != wanted:
        raise RuntimeError(f"generated {sum(lengths)} tokens, expected {sum(wanted)}")


def idle(model: str, dtype: str) -> Run:
    """Does nothing: measures the measuring, and lets it be tested without a model."""
    return lambda jobs: check([job.max_tokens for job in jobs], jobs)


def openvino_genai(model: str, dtype: str) -> Run:
    """Its continuous batching; ``model`` is a GGUF file. ``dtype`` is a hint for the products, or "auto"."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 512
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    hint = {} if dtype == "auto" else {"INFERENCE_PRECISION_HINT": dtype}
    options = {"INFERENCE_NUM_THREADS": THREADS, **hint}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)

    def generation(count: int) -> "openvino_genai.GenerationConfig":
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        return config

    def run(jobs: list[Job]) -> None:
        prompts = [openvino.Tensor(np.array([job.prompt], np.int64)) for job in jobs]
        results = pipeline.generate(prompts, [generation(job.max_tokens) for job in jobs])
        check([len(result.m_generation_ids[0]) for result in results], jobs)

    return run


def llama_cpp(model: str, dtype: str) -> Run:
    """The library through its Python binding, one request after the other; its batching is in its server only."""
    from llama_cpp import Llama

    llama = Llama(model, n_ctx=2048, n_threads=THREADS, n_threads_batch=THREADS, n_batch=512, verbose=False)

    def run(jobs: list[Job]) -> None:
        lengths = []
        for job in jobs:
            llama.reset()
            tokens = llama.generate(job.prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
            lengths.append(sum(1 for _, _ in zip(range(job.max_tokens), tokens)))
        check(lengths, jobs)

    return run
