"""Drafts under grammars: cut where they leave the form, and continued where it leaves no choice."""

import pytest

from jaxinfer.config import StructuredConfig
from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.drafts import Drafts
from jaxinfer.engine.build import Engine
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.constrained import within
from jaxinfer.structured.compiler import GrammarCompiler
from jaxinfer.structured.constraint import AllOf, Constraint, TokenRules
from jaxinfer.structured.spec import StructuredOutputs
from tests.support import engines
from tests.support.engines import Job, ids, run
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("structured output", "n-gram speculation")

FORM = StructuredOutputs(regex="ab(c|d)efg(h|i)j")


def constraint(jump: bool = False) -> Constraint:
    compiler = GrammarCompiler(ByteTokenizer(), engines.VOCAB, engines.EOS, StructuredConfig())
    return compiler.compile(FORM).start(jump)


def tokens(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


@pytest.mark.parametrize(
    ("drafted", "limit", "want"),
    [
        ("", 9, "ab"),  # what the form forces, though nobody drafts
        ("abc", 9, "abcefg"),
        ("abcefgij", 9, "abcefgi"),  # nothing is sampled behind the last one
        ("abcefgij", 5, "abcef"),
        ("abx", 9, "ab"),  # no c and no d
        ("axc", 9, "ab"),  # wrong where there was no choice: what follows it is no guess of this text
        ("c", 9, "ab"),
    ],
)
def test_a_chain_follows_the_form(drafted: str, limit: int, want: str) -> None:
    for jump in (False, True):
        state = constraint(jump)
        assert within(Drafts.chain(tokens(drafted)), state, limit) == Drafts.chain(tokens(want))
        assert state.expected() == list(tokens("ab")), "the state itself is not moved"
    rules = TokenRules(engines.VOCAB, None, (), (), 0, False)
    assert within(Drafts.chain(tokens("")), AllOf([rules, constraint()]), 9) == Drafts.chain(tokens("ab"))


def test_a_tree_is_pruned() -> None:
    state = constraint()
    for token in tokens("ab"):
        state.accept(token)
    tree = Drafts.tree(tokens("cxdeee"), (-1, -1, -1, 0, 1, 2))
    assert within(tree, state, 9) == Drafts.tree(tokens("cdee"), (-1, -1, 0, 1))


def outputs(engine: Engine) -> list[list[int]]:
    form = StructuredOutputs(regex=r"name: (A|B), number: (C|D), (A|B){3} end of the record")
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, structured_outputs=form, n=2, logprobs=1)
    return [choice.token_ids for o in run(engine, [Job(ids([65, 66]), params)]) for choice in o.outputs]


@pytest.mark.feature("logprobs", "n > 1")
@pytest.mark.parametrize("adaptive", [False, True])
def test_forced_tokens_are_drafts_where_they_are_not_jumped_over(adaptive: bool) -> None:
    """Log-probabilities are asked for, so every token is sampled; most of them are drafted by the form alone."""
    script = engines.static_script({65: 3.0, 66: 2.5, 67: 2.0, 68: 2.0})
    ngram = SpeculativeConfig(drafter="ngram", max_drafts=6, max_step_drafts=12, adaptive=adaptive)
    plain = engines.scripted(script, tokenizer=ByteTokenizer())
    fast = engines.scripted(script, engines.config(speculative=ngram), tokenizer=ByteTokenizer())
    assert outputs(fast) == outputs(plain)
    stats = fast.core.stats
    if not adaptive:
        assert stats.steps < 0.5 * plain.core.stats.steps
    assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 0
