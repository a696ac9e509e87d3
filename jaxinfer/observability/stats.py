"""Counters of an engine: one bookkeeping for every way in which requests run and end."""

from collections import Counter
from dataclasses import dataclass, field

from jaxinfer.request import FinishReason, Sequence
from jaxinfer.scheduler.plan import StepPlan


@dataclass
class EngineStats:
    """Totals since start; none of them ever falls.

    Attributes:
        steps: dispatched steps.
        computed_tokens: tokens computed, recomputation after preemption included.
        padded_tokens: padding computed with them.
        preemptions: sequences that lost their blocks.
        prefix_hit_tokens, prompt_tokens: of first admissions and of admitted requests.
        finished_by_reason: sequences ended, by finish reason.
        generated_tokens: of ended sequences.
    """

    steps: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    finished_by_reason: Counter[FinishReason] = field(default_factory=Counter)

    def admitted(self, num_prompt: int) -> None:
        self.prompt_tokens += num_prompt

    def dispatched(self, plan: StepPlan, token_bucket: int) -> None:
        self.steps += 1
        tokens = plan.num_tokens
        self.computed_tokens += tokens
        self.padded_tokens += token_bucket - tokens
        self.preemptions += plan.preempted

    def finished(self, seq: Sequence) -> None:
        assert seq.finish_reason is not None
        self.finished_by_reason[seq.finish_reason] += 1
        self.generated_tokens += len(seq.output_token_ids)
        if seq.index == 0:
            self.prefix_hit_tokens += max(seq.num_cached, 0)
