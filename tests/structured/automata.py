"""Looks into grammars: what they accept, and all that they can write."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from jaxinfer.config import StructuredConfig
from jaxinfer.sampling.masks import unpack
from jaxinfer.structured.compiler import GrammarCompiler
from jaxinfer.structured.constraint import Constraint
from jaxinfer.structured.grammar import Grammar
from jaxinfer.structured.spec import StructuredOutputs
from jaxinfer.tokenization.tokenizer import Tokenizer
from tests.support.engines import EOS, VOCAB
from tests.support.tokenizers import ByteTokenizer


def compiler(tokenizer: Tokenizer | None = None, vocab: int = VOCAB, **settings: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer or ByteTokenizer(), vocab, EOS, StructuredConfig(**settings))


@cache
def shared_compiler() -> GrammarCompiler:
    return compiler()


def compiled(**spec: Any) -> Grammar:
    return shared_compiler().compile(StructuredOutputs(**spec))


def schema_grammar(schema: Any) -> Grammar:
    return compiled(json=schema, disable_any_whitespace=True)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text, byte by byte, is a whole answer."""
    state = grammar.start()
    for byte in text.encode():
        if not allowed(state)[byte] or not state.accept(byte):
            return False
    return state.may_end


def allowed(state: Constraint) -> np.ndarray:
    """bool [VOCAB]: the tokens allowed next; none of them once the answer is complete."""
    if state.complete:
        return np.zeros(VOCAB, bool)
    return unpack(state.next_mask(), VOCAB)


def all_texts(grammar: Grammar, limit: int = 1000) -> set[str]:
    """Every text that a finite grammar accepts."""
    return {bytes(data).decode() for data in _all(grammar, [], limit)}


def _all(grammar: Grammar, prefix: list[int], limit: int) -> Iterator[list[int]]:
    assert len(prefix) <= limit, "the grammar is not finite"
    state = grammar.start()
    assert all(state.accept(byte) for byte in prefix)
    if state.may_end:
        yield prefix
    for byte in np.flatnonzero(allowed(state)[:256]).tolist():
        yield from _all(grammar, [*prefix, byte], limit)
