"""How busy the stages of a pipeline are: the real scheduler and step loop over stages that sleep.

``python -m benchmarks.pipeline_timeline [--stages 4] [--seconds 0.03] [--plot docs/images/pipeline_timeline.png]``
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from jaxinfer.engine.build import assemble
from jaxinfer.runner.simulated_pipeline import SimulatedPipeline
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization.chat import ChatTemplate

VOCAB, MAX_MODEL_LEN, BLOCKS, SEQUENCES, PROMPT, TOKENS = 1000, 128, 400, 20, 12, 16


@dataclass
class Timeline:
    """(stage, step, start, stop) of all that the stages did; seconds."""

    spans: list[tuple[int, int, float, float]] = field(default_factory=list)

    def note(self, stage: int, step: int, start: float, stop: float) -> None:
        self.spans.append((stage, step, start, stop))

    @property
    def elapsed(self) -> float:
        return max(stop for *_, stop in self.spans) - min(start for _, _, start, _ in self.spans)

    def busy(self, stage: int) -> float:
        return sum(stop - start for at, _, start, stop in self.spans if at == stage)

    def overlap(self, stages: int) -> float:
        """The least possible time over the time that it took."""
        first = {stage: stop - start for stage, step, start, stop in self.spans if step == 0}
        busiest = max(range(stages), key=self.busy)
        fill = sum(seconds for stage, seconds in first.items() if stage != busiest)
        return (self.busy(busiest) + fill) / self.elapsed


def run(stages: int, seconds: float) -> Timeline:
    """Twenty requests from prompt to the last token."""
    config = EngineConfig(
        model=ModelConfig(reference="simulated"),
        cache=CacheConfig(num_blocks=BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=SEQUENCES, max_num_batched_tokens=256),
        parallel=ParallelConfig(pipeline=stages),
    )
    timeline = Timeline()
    engine = assemble(
        config,
        SimulatedPipeline(VOCAB, [seconds] * stages, timeline.note),
        CompilePlan.make(config.scheduler, MAX_MODEL_LEN, config.cache.block_size, 1),
        (BLOCKS,),
        (None,),
        tokenizer=None,
        chat_template=ChatTemplate({}),
        vocab_size=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(),
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for number in range(SEQUENCES):
        prompt = [(7 * number + i) % VOCAB for i in range(PROMPT)]
        engine.core.add(engine.inputs.process(str(number), {"prompt_token_ids": prompt}, params))
    while engine.core.has_work:
        engine.core.step()
    return timeline


def draw(timeline: Timeline, stages: int, path: Path) -> None:
    """One bar per stage and step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    origin = min(start for _, _, start, _ in timeline.spans)
    figure, axes = plt.subplots(figsize=(10, 0.6 * stages + 1.4))
    colours = plt.get_cmap("tab20").colors
    for stage, step, start, stop in timeline.spans:
        axes.barh(stage, stop - start, left=start - origin, color=colours[step % 20], height=0.85)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds; a colour is a step")
    axes.set_title(f"{SEQUENCES} requests, overlap {timeline.overlap(stages):.2f} of the ideal")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.03, help="that a stage sleeps per step")
    parser.add_argument("--plot", type=Path, default=Path("docs/images/pipeline_timeline.png"))
    options = parser.parse_args()
    timeline = run(options.stages, options.seconds)
    print("| stage | steps | busy, s | share of the time |\n|---|---|---|---|")
    for stage in range(options.stages):
        steps, busy = sum(1 for span in timeline.spans if span[0] == stage), timeline.busy(stage)
        print(f"| {stage} | {steps} | {busy:.2f} | {busy / timeline.elapsed:.0%} |")
    print(f"\n{timeline.elapsed:.2f} s, overlap {timeline.overlap(options.stages):.2f} of the ideal")
    draw(timeline, options.stages, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
