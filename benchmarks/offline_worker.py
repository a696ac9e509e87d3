"""One engine under measurement, in a process of its own: reads workload names, answers with seconds.

usage: offline_worker.py ENGINE MODEL DTYPE       (ENGINE: a key of ENGINES)
"""

import json
import os
import sys
import time
from collections.abc import Callable

from peer_engines import Run, check, idle, llama_cpp, openvino_genai
from workloads import Job, workload


def jaxinfer_engine(model: str, dtype: str) -> Run:
    """``dtype`` is one, or a value of ``model.weights``, or "stored:" and one of ``model.activations``."""
    from jaxinfer import LLM, SamplingParams

    held = {"weights": dtype} if dtype in ("stored", "float") else {"dtype": dtype}
    if dtype.startswith("stored:"):
        held = {"weights": "stored", "activations": dtype.removeprefix("stored:")}
    llm = LLM(model, **held, max_model_len=2048, memory="1GiB", prefix_caching=False)

    def run(jobs: list[Job]) -> None:
        params = [
            SamplingParams(temperature=0, max_tokens=j.max_tokens, ignore_eos=True, detokenize=False)
            for j in jobs
        ]
        outputs = llm.generate([{"prompt_token_ids": j.prompt} for j in jobs], params, progress=False)
        check([len(o.outputs[0].token_ids) for o in outputs], jobs)

    return run


def transformers_batching(model: str, dtype: str) -> Run:
    """The continuous batching of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(2)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
    batching = ContinuousBatchingConfig(max_batch_tokens=1024, num_blocks=256, use_cuda_graph=False)
    manager = net.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()

    def run(jobs: list[Job]) -> None:
        names = [manager.add_request(input_ids=j.prompt, max_new_tokens=j.max_tokens) for j in jobs]
        lengths = {}
        while len(lengths) < len(jobs):
            result = manager.get_result(timeout=600)
            if result is None or result.error:
                raise RuntimeError("no result" if result is None else result.error)
            lengths[result.request_id] = len(result.generated_tokens)
        check([lengths[name] for name in names], jobs)

    return run


def transformers_generate(model: str, dtype: str) -> Run:
    """``generate``, one request after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def run(jobs: list[Job]) -> None:
        lengths = []
        for j in jobs:
            ids = torch.tensor([j.prompt])
            limits = {"max_new_tokens": j.max_tokens, "min_new_tokens": j.max_tokens}
            with torch.inference_mode():
                out = net.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **limits
                )
            lengths.append(out.shape[1] - len(j.prompt))
        check(lengths, jobs)

    return run


def vllm_engine(model: str, dtype: str) -> Run:
    import vllm

    llm = vllm.LLM(
        model=model,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        seed=0,
        skip_tokenizer_init=True,
    )

    def run(jobs: list[Job]) -> None:
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=j.max_tokens, ignore_eos=True, detokenize=False)
            for j in jobs
        ]
        outputs = llm.generate([{"prompt_token_ids": j.prompt} for j in jobs], params, use_tqdm=False)
        check([len(o.outputs[0].token_ids) for o in outputs], jobs)

    return run


ENGINES: dict[str, Callable[[str, str], Run]] = {
    "jaxinfer": jaxinfer_engine,
    "transformers": transformers_batching,
    "transformers-generate": transformers_generate,
    "vllm": vllm_engine,
    "openvino": openvino_genai,
    "llama.cpp": llama_cpp,
    "idle": idle,
}


def main() -> None:
    engine, model, dtype = sys.argv[1:4]
    # Engines and their child processes print; the answers go to what was stdout, everything else to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    run = ENGINES[engine](model, dtype)
    print(json.dumps({"ready": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        jobs = workload(request["workload"], request["seed"]).jobs
        if most := request.get("most_tokens"):
            jobs = [Job(job.prompt, min(job.max_tokens, most)) for job in jobs]
        start = time.perf_counter()
        try:
            run(jobs)
            answer = {"seconds": time.perf_counter() - start}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
