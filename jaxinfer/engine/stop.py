"""When generation ends: conditions on token ids."""

from jaxinfer.request import FinishReason, Sequence


class StopConditions:
    """Token-level stop conditions of a model; stop strings are found in the text.

    Args:
        eos_token_ids: all ids that end a generation.
    """

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = frozenset(eos_token_ids)

    def check(self, seq: Sequence) -> tuple[FinishReason, int | None] | None:
        """Looks at the newest token.

        Returns:
            Reason and stop token id (None for EOS), or None to go on. STOP means that the newest token is a stop
            token; whether it is part of the output is the request's choice.
        """
        params = seq.request.params
        generated = len(seq.output_token_ids)
        token = seq.output_token_ids[-1]
        if seq.constraint is not None and seq.constraint.complete and token in self._eos:
            return FinishReason.STOP, None
        if generated > params.min_tokens:
            if token in self._eos and not params.ignore_eos:
                return FinishReason.STOP, None
            if token in params.stop_token_ids:
                return FinishReason.STOP, token
        if generated >= seq.max_tokens:
            return FinishReason.LENGTH, None
        rule = params.repetition_detection
        if rule is not None and repeats(
            seq.output_token_ids, rule.min_pattern_size, rule.max_pattern_size, rule.min_count
        ):
            return FinishReason.REPETITION, None
        return None


def repeats(token_ids: list[int], min_size: int, max_size: int, min_count: int) -> bool:
    """Whether the output ends with a pattern of ``min_size`` to ``max_size`` tokens at least ``min_count`` times."""
    for size in range(max(min_size, 1), max_size + 1):
        span = size * min_count
        if span > len(token_ids):
            return False
        # The newest token decides most sizes without comparing the whole span.
        if token_ids[-1] == token_ids[-1 - size] and token_ids[-span:-size] == token_ids[size - span :]:
            return True
    return False
