"""What a process that has requests, but no engine, needs of the model: its text side and its limits."""

from dataclasses import dataclass
from pathlib import Path

from jaxinfer.config import EngineConfig
from jaxinfer.engine.inputs import InputProcessor
from jaxinfer.structured.compiler import GrammarCompiler
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.loading import load_text
from jaxinfer.tokenization.tokenizer import Tokenizer
from serve.process.wire import Ready


@dataclass(frozen=True)
class FrontEnd:
    """Attributes:
    inputs: validates requests as the engine does.
    """

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate
    inputs: InputProcessor


def load_front_end(ready: Ready, config: EngineConfig) -> FrontEnd:
    """Reads tokenizer and chat template where the engine found them; never weights."""
    tokenizer, template = load_text(None if ready.text_path is None else Path(ready.text_path))
    grammars = None
    if tokenizer is not None:
        grammars = GrammarCompiler(tokenizer, ready.limits.vocab_size, ready.eos_token_ids, config.structured)
    inputs = InputProcessor(tokenizer, ready.limits, 1, ready.eos_token_ids, grammars)
    return FrontEnd(tokenizer, template, inputs)
