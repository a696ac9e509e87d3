"""The text of a run, as token ids: from a file, or what the model itself says."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.config_values import ConfigError
from jaxinfer.speculative.training.config import DataOptions
from jaxinfer.tokenization.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
ROUND = 64
"""Prompts that are answered before the answers are written."""


@dataclass(frozen=True)
class TextSequence:
    """Tokens of one text; the first ``prompt_len`` of them are not learnt."""

    token_ids: tuple[int, ...]
    prompt_len: int


Answer = Callable[[list[str]], list[TextSequence]]
"""Prompts -> prompt and answer of each."""


def read_lines(path: str, what: str) -> list[str]:
    """The lines of a text file that are not empty.

    Raises:
        ConfigError: there is no such file, or nothing in it.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except OSError as error:
        raise ConfigError(f"data.{what}: {path}: {error.strerror or error}") from None
    lines = [line for line in lines if line]
    if not lines:
        raise ConfigError(f"data.{what}: {path} has no text")
    return lines


def file_sequences(options: DataOptions, tokenizer: Tokenizer) -> Iterator[TextSequence]:
    """The sequences of a text file."""
    assert options.file is not None
    for line in read_lines(options.file, "file"):
        ids = tokenizer.encode(line)[: options.sequence_length]
        if len(ids) >= 3:
            yield TextSequence(tuple(ids), 1)


def generate_sequences(options: DataOptions, answer: Answer, path: Path, progress: Progress) -> None:
    """Lets the model answer the prompts, and adds the answers to ``path`` round by round.

    What a run that was killed has written stays; a last line that is cut is dropped.
    """
    assert options.prompts is not None
    prompts = read_lines(options.prompts, "prompts")[: options.max_sequences]
    answered = read_sequences(path) if path.is_file() else []
    write_sequences(path, answered)
    for start in range(len(answered), len(prompts), ROUND):
        progress(start, len(prompts))
        with path.open("a") as file:
            file.writelines(map(_line, answer(prompts[start : start + ROUND])))
    progress(len(prompts), len(prompts))


def write_sequences(path: Path, sequences: Iterable[TextSequence]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(_line, sequences)))


def read_sequences(path: Path) -> list[TextSequence]:
    """What ``write_sequences`` wrote; a line that is cut ends it."""
    sequences = []
    for line in path.read_text().splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            break
        sequences.append(TextSequence(tuple(value["token_ids"]), value["prompt_len"]))
    return sequences


def _line(sequence: TextSequence) -> str:
    return json.dumps({"token_ids": sequence.token_ids, "prompt_len": sequence.prompt_len}) + "\n"
