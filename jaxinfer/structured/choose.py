"""Which constraint a choice of a request needs, if any."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.sampling.masks import TokenSequences
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.structured.constraint import AllOf, Constraint, TokenRules
from jaxinfer.structured.grammar import Grammar
from jaxinfer.structured.reasoning import Reasoning
from jaxinfer.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class ConstraintMaker:
    """Makes constraints for one model.

    Attributes:
        tokenizer: None for a model without text, which has neither grammars nor reasoning.
        vocab_size: V.
        jump_ahead: append forced tokens without sampling them.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    jump_ahead: bool

    def make(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        bad_words: TokenSequences,
        grammar: Grammar | None,
    ) -> Constraint | None:
        """The constraint of one choice; None if its bans do not depend on what it generates.

        A form holds from the first token unless it says otherwise; then there is no reasoning, and no budget of it.
        Forced tokens are not appended where the sampler has to see every position (log-probabilities, penalties),
        or where other bans might hit them.
        """
        budget = params.thinking_token_budget
        if grammar is None and budget is None and all(len(word) == 1 for word in bad_words):
            return None
        parts: list[Constraint] = []
        ruled = bool(params.allowed_token_ids or bad_words or params.min_tokens)
        jump = self.jump_ahead and not (ruled or params.wants_logprobs or params.penalised)
        form = None if grammar is None else grammar.start(jump)
        after_reasoning = params.structured_outputs is not None and params.structured_outputs.after_reasoning
        if after_reasoning or (budget is not None and form is None):
            assert self.tokenizer is not None, "reasoning is text"
            ends = (*self.eos_token_ids, *params.stop_token_ids)
            parts.append(Reasoning(self.tokenizer, self.vocab_size, prompt_ids, budget, form, ends, jump))
        elif form is not None:
            parts.append(form)
        if ruled:
            parts.append(self._rules(params, bad_words, ends_alone=grammar is not None))
        return parts[0] if len(parts) == 1 else AllOf(parts)

    def _rules(self, params: SamplingParams, bad_words: TokenSequences, ends_alone: bool) -> TokenRules:
        """An end token ends an answer that has a form even if the request ignores end tokens."""
        ends = () if params.ignore_eos and not ends_alone else self.eos_token_ids
        return TokenRules(
            self.vocab_size,
            params.allowed_token_ids,
            bad_words,
            (*params.stop_token_ids, *ends),
            params.min_tokens,
            ends_alone,
        )
