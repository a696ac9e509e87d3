"""The recipe of a training run: frozen models by scope, read from one YAML file."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from jaxinfer.config import CacheConfig, CompileConfig, ModelConfig, SchedulerConfig
from jaxinfer.config_values import Bytes, Scope, read_yaml, validated


class HeadOptions(Scope):
    """The head to train.

    Attributes:
        predictions: tokens that it learns to predict ahead: number of Medusa heads, or steps that an EAGLE head is
            trained on its own outputs (EAGLE-3's training-time test).
        depth: residual blocks of a Medusa head, or layers of an EAGLE head.
        draft_vocab_size: the head predicts only the most frequent tokens of the training text (Medusa, EAGLE-3);
            absent: all.
        intermediate_size: MLP width of an EAGLE head; absent: the target's.
        feature_layers: target layers whose inputs EAGLE-3 reads; absent: the published choice.
    """

    predictions: int = Field(default=3, ge=1, le=16)
    depth: int = Field(default=1, ge=1, le=8)
    draft_vocab_size: int | None = Field(default=None, ge=2)
    intermediate_size: int | None = Field(default=None, ge=1)
    feature_layers: tuple[int, int, int] | None = None


class DataOptions(Scope):
    """The text.

    Attributes:
        source: ``generate``: answers of the model itself to ``prompts``; ``file``: the lines of ``file``.
        prompts: a text file with a prompt a line.
        chat: render each prompt as a user message.
        temperature: of the generated answers; at 0 the measured acceptance is exact.
        max_tokens: of an answer.
        file: a text file; each line is a sequence.
        sequence_length: longest sequence, prompt included; longer ones are cut.
        max_sequences: at most so many.
        held_out: share of the sequences that are kept for measuring.
        max_bytes: disk space for hidden states; text that does not fit is left out.
    """

    source: Literal["generate", "file"] = "generate"
    prompts: str | None = None
    chat: bool = True
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=192, ge=2)
    file: str | None = None
    sequence_length: int = Field(default=256, ge=8)
    max_sequences: int | None = Field(default=None, ge=2)
    held_out: float = Field(default=0.1, gt=0, lt=1)
    max_bytes: Bytes = Field(default=2 * 1024**3, gt=0)

    @model_validator(mode="after")
    def _text_is_named(self) -> Self:
        needed = "prompts" if self.source == "generate" else "file"
        if (self.prompts if self.source == "generate" else self.file) is None:
            raise ValueError(f"source is {self.source}, which needs {needed}")
        return self


class OptimizerOptions(Scope):
    """AdamW with linear warm-up and cosine decay.

    Attributes:
        batch_sequences: sequences of a step.
        clip: largest norm of the gradient.
        checkpoint_every: steps between two checkpoints, from which a killed run goes on.
        evaluate_every: steps between two measurements of acceptance on the held-out text.
    """

    steps: int = Field(default=400, ge=1)
    batch_sequences: int = Field(default=4, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    seed: int = 0
    checkpoint_every: int = Field(default=50, ge=1)
    evaluate_every: int = Field(default=100, ge=1)


class OutputOptions(Scope):
    """Where the result goes.

    Attributes:
        directory: gets the head in its published layout, and ``training/`` with what the run keeps.
        dtype: of the stored weights.
    """

    directory: str = Field(min_length=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class TrainConfig(Scope):
    """A recipe.

    Attributes:
        cache, scheduler: of the engine that generates text.
        compile: its programs and those of the training; ``cache_dir`` makes a run that is resumed start fast.
    """

    model: ModelConfig
    data: DataOptions
    output: OutputOptions
    head: HeadOptions = HeadOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    compile: CompileConfig = CompileConfig(warm_up="lazy")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a YAML file.

        Raises:
            ConfigError: lists every problem; an unknown key names the nearest known one.
        """
        return validated(cls, read_yaml(path, cls), path)
