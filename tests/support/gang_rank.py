"""A process of a gang, for tests: ``python -m tests.support.gang_rank CONFIG RESULTS``, both JSON files.

Rank 0, or the only process, runs all jobs twice and writes what came out; the others follow.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.hosts.environment import resolve_hosts
from jaxinfer.sampling_params import SamplingParams
from serve.follow import follow
from tests.support.engines import Job, ids, run

_COMMON: dict[str, Any] = {
    "max_tokens": 12,
    "ignore_eos": True,
    "detokenize": False,
    "logprobs": 3,
    "seed": 7,
}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}


def jobs(grammars: bool) -> list[Job]:
    """Prompts of several chunks, two of which begin alike; greedy, random, truncated and penalised rows; scores."""
    params = [
        SamplingParams(temperature=0, **_COMMON),
        SamplingParams(temperature=1, **_COMMON),
        SamplingParams(temperature=0.9, top_k=60, top_p=0.9, min_p=0.01, **_COMMON),
        SamplingParams(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.4, **_COMMON),
        SamplingParams(temperature=0, prompt_logprobs=1, **_COMMON),
    ]
    starts = (3, 90, 40, 3, 17)
    work = [
        Job(ids(range(start, start + 21 + at)), one, at=at)
        for at, (start, one) in enumerate(zip(starts, params))
    ]
    if grammars:
        given = SamplingParams(max_tokens=24, seed=5, structured_outputs={"json": _SCHEMA})
        work.append(Job(ids(range(60, 68)), given, at=5))
    return work


def main() -> int:
    config = resolve_hosts(EngineConfig.model_validate_json(Path(sys.argv[1]).read_text()), os.environ)
    if config.hosts.follows:
        follow(config)
    from jaxinfer.engine.build import build_engine
    from jaxinfer.hosts.gang import leave

    engine = build_engine(config)
    work = jobs(engine.grammars is not None)
    turns = [run(engine, work) for _ in range(2)]
    stats = engine.core.stats
    seen = {
        "turns": [[[_plain(choice) for choice in output.outputs] for output in turn] for turn in turns],
        "scores": _numbers(turns[0][4].prompt_logprobs),
        "cached": [output.num_cached_tokens for output in turns[1]],
        "preemptions": stats.preemptions,
        "drafted": stats.drafted_tokens,
    }
    Path(sys.argv[2]).write_text(json.dumps(seen))
    engine.gang.part(None)
    if config.hosts.several:
        leave(0)
    return 0


def _plain(choice: Any) -> dict[str, Any]:
    return {"tokens": list(choice.token_ids), "text": choice.text, "logprobs": _numbers(choice.logprobs)}


def _numbers(positions: Any) -> list[dict[str, float]]:
    return [
        {str(token): entry.logprob for token, entry in position.items()}
        for position in positions or []
        if position is not None
    ]


if __name__ == "__main__":
    sys.exit(main())
