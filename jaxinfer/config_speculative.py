"""Configuration of speculative decoding; see ``config`` for the whole."""

from typing import Literal, Self

from pydantic import Field, model_validator

from jaxinfer.config_values import Scope


class SpeculativeConfig(Scope):
    """Speculative decoding: several tokens a step, the same tokens as without it.

    Attributes:
        drafter: what guesses tokens: ``none``; ``ngram`` (prompt lookup); ``suffix`` (suffix decoding, also over
            earlier outputs of the server); ``model`` or ``head``, which ``model`` names; ``path.py:Class`` for one of
            your own (called with this configuration; see ``jaxinfer.speculative.drafter.Drafter``); or the name of an
            entry point in the group ``jaxinfer.drafters``.
        model: reference of a smaller model with the same tokenizer, or of a Medusa, EAGLE or EAGLE-3 head.
        trees: drafters may propose trees, which attention verifies under masks; heads do.
        tree_depth, tree_top_k: how an EAGLE head grows its trees: levels, and drafts that are expanded at each level,
            which is also the number of guesses behind each. The best ``max_drafts`` of all of them are verified.
        acceptance: ``exact``: a draft counts if it is what would have come without it. ``typical``: for sampled
            requests also if it is probable enough (Medusa's rule). That is lossy: the output does not follow the
            model's law.
        typical_epsilon, typical_delta: a draft counts where its probability exceeds the smaller of epsilon and delta
            times exp(-entropy).
        max_drafts: most drafts of a sequence in a step.
        max_step_drafts: most drafts of all sequences in a step.
        adaptive: give drafts where they make more tokens per second, by step times that are measured at start-up and
            while running, and by what each sequence accepted; none where they do not. ``false``: as many as a
            sequence lately accepted, and a few more.
        ngram_longest, ngram_shortest: lengths of the token sequences that ``ngram`` looks up.
        suffix_longest, suffix_shortest: the same of ``suffix``; longer matches are found too, and preferred.
        suffix_factor: most drafts of ``suffix`` per token of the match.
        suffix_min_probability: ``suffix`` drafts a token while at least this share of the matches went on with all of
            the draft.
        suffix_tokens: output tokens that are kept per ``cache_salt``, about 400 bytes each; the oldest are forgotten.
        suffix_salts: salts that have an index of their own; one more makes the server forget the one that was used
            longest ago.
    """

    drafter: str = Field(default="none", min_length=1)
    model: str | None = Field(default=None, min_length=1)
    trees: bool = False
    tree_depth: int = Field(default=5, ge=1, le=16)
    tree_top_k: int = Field(default=4, ge=1, le=32)
    acceptance: Literal["exact", "typical"] = "exact"
    typical_epsilon: float = Field(default=0.09, gt=0, le=1)
    typical_delta: float = Field(default=0.3, gt=0)
    max_drafts: int = Field(default=8, ge=1, le=64)
    max_step_drafts: int = Field(default=64, ge=1)
    adaptive: bool = False
    ngram_longest: int = Field(default=4, ge=1)
    ngram_shortest: int = Field(default=2, ge=1)
    suffix_longest: int = Field(default=8, ge=1, le=64)
    suffix_shortest: int = Field(default=2, ge=1)
    suffix_factor: float = Field(default=2.0, gt=0)
    suffix_min_probability: float = Field(default=0.2, gt=0, le=1)
    suffix_tokens: int = Field(default=100_000, ge=64)
    suffix_salts: int = Field(default=8, ge=1)

    @property
    def draft_limits(self) -> tuple[int, int]:
        """Most drafts of a sequence, and of all of them, in a step; 0 without speculation."""
        return (0, 0) if self.drafter == "none" else (self.max_drafts, self.max_step_drafts)

    @property
    def tree_nodes(self) -> int:
        """Most drafts of a tree that attention sees at once; 0 without trees."""
        if not self.trees or self.drafter == "none":
            return 0
        expanded = self.tree_depth * self.tree_top_k if self.drafter == "head" else 0
        return max(self.max_drafts, expanded)

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> Self:
        for kind in ("ngram", "suffix"):
            values = self.model_dump(include={f"{kind}_shortest", f"{kind}_longest"})
            shortest, longest = values[f"{kind}_shortest"], values[f"{kind}_longest"]
            if shortest > longest:
                raise ValueError(f"{kind}_shortest ({shortest}) must be at most {kind}_longest ({longest})")
        return self

    @model_validator(mode="after")
    def _adaptive_chains(self) -> Self:
        if self.adaptive and self.trees:
            raise ValueError("adaptive counts the drafts of chains: it does not go with trees")
        return self

    @model_validator(mode="after")
    def _typical_of_something(self) -> Self:
        # By value, not by what was given: a configuration that crosses a process border names every field.
        fields = type(self).model_fields
        names = ("typical_delta", "typical_epsilon")
        given = [name for name in names if getattr(self, name) != fields[name].default]
        if self.acceptance == "exact" and given:
            raise ValueError(f"{' and '.join(given)} belong to acceptance: typical, but acceptance is exact")
        if self.acceptance == "typical" and self.drafter == "none":
            raise ValueError("acceptance is typical, but there is no drafter whose drafts could be accepted")
        return self

    @model_validator(mode="after")
    def _model_is_named(self) -> Self:
        if (self.drafter in ("model", "head")) != (self.model is not None):
            raise ValueError(f"drafter is {self.drafter!r} and model is {self.model!r}: one needs the other")
        return self
