"""Why an answer ended, as clients see it: one rule for streams and whole answers."""

from jaxinfer.request import FinishReason


def finish_reason(reason: str, num_complete_calls: int, named: bool = False) -> str:
    """The ``finish_reason`` of a choice.

    ``tool_calls`` if and only if the model stopped by itself and at least one complete call is in the message. Other
    reasons win: an answer that was cut says so even if it holds a call. With a named ``tool_choice`` the value stays
    ``stop``, as OpenAI documents.

    Args:
        reason: the engine's, a value of ``FinishReason``.
        num_complete_calls: of the choice's parser, after its ``finish``.
        named: ``tool_choice`` names a function.
    """
    if reason == FinishReason.STOP and num_complete_calls > 0 and not named:
        return "tool_calls"
    return str(reason)
