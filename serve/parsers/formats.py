"""How families of models write their calls.

What is not a call stays content, as it stands: JSON that breaks, arguments that are not an object, a function that
does not exist. A call that is cut has the beginning of its arguments that the model wrote. Long arguments are streamed
before their end is seen (``HELD_CHARACTERS``), and what was given out is not taken back: if such arguments break, they
keep what the model wrote up to the end mark of the call. Neither of these counts as a complete call.
"""

from collections.abc import Callable

from serve.parsers.calls import CallOutput, Outcome, call_sequence, named_call
from serve.parsers.source import Source, Steps, all_text, literal, peek, read_while, skip_space, text_until

Format = Callable[[Source, CallOutput], Steps[None]]
"""Reads a text to its end."""

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, CALL_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE, FENCE_JSON = "```", "```json"
MAX_NAME = 64


def hermes(source: Source, output: CallOutput) -> Steps[None]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3.

    One pair of tags may hold several objects, and the end tag may be missing.
    """
    while (yield from text_until(source, (TOOL_CALL,), output.content)):
        source.hold()
        yield from literal(source, TOOL_CALL)
        outcome = yield from call_sequence(source, output, only_known_keys=False)
        if outcome is Outcome.NOT_A_CALL:
            output.content(source.held())
        elif outcome is Outcome.BROKEN:
            source.release()
            yield from text_until(source, (TOOL_CALL_END,), output.arguments)
            yield from literal(source, TOOL_CALL_END)
        else:
            yield from _end_mark(source, TOOL_CALL_END)


def llama3_json(source: Source, output: CallOutput) -> Steps[None]:
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between them, at the beginning of the text or after
    ``<|python_tag|>``: Llama 3.1 to 3.3.
    """
    yield from _bare_calls(source, output)
    while (yield from text_until(source, (PYTHON_TAG,), output.content)):
        source.hold()
        yield from literal(source, PYTHON_TAG)
        yield from _calls_to_the_end(source, output)


def generic_json(source: Source, output: CallOutput) -> Steps[None]:
    """A text that begins with ``{"name": ..., "arguments": {...}}``, or with a list of such objects; in a code fence or
    not.
    """
    yield from _bare_calls(source, output, (FENCE_JSON, FENCE))
    yield from all_text(source, output.content)


def mistral(source: Source, output: CallOutput) -> Steps[None]:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, and since 2025 ``[TOOL_CALLS]name[ARGS]{...}`` for each
    call, with ``[CALL_ID]...`` after the name or not.
    """
    while (yield from text_until(source, (TOOL_CALLS,), output.content)):
        source.hold()
        yield from literal(source, TOOL_CALLS)
        yield from skip_space(source)
        if (yield from peek(source)) in ("[", "{"):
            yield from _calls_to_the_end(source, output)
            continue
        name = yield from _name(source)
        if (yield from literal(source, CALL_ID)):
            yield from read_while(source, str.isalnum, MAX_NAME)
        yield from literal(source, ARGS)
        yield from skip_space(source)
        outcome = yield from named_call(source, output, name)
        if outcome is Outcome.NOT_A_CALL:
            output.content(source.held())
        source.release()
        if outcome is Outcome.BROKEN:
            yield from text_until(source, (TOOL_CALLS,), output.arguments)


def deepseek(source: Source, output: CallOutput) -> Steps[None]:
    """DeepSeek V2.5, V3 and R1, whose calls say ``function<｜tool▁sep｜>name`` and have their arguments fenced as JSON,
    and V3.1, whose calls say ``name<｜tool▁sep｜>{...}``.
    """
    while (yield from text_until(source, (CALLS_BEGIN, CALL_BEGIN), output.content)):
        source.hold()
        yield from literal(source, CALLS_BEGIN)
        yield from skip_space(source)
        outcome = Outcome.NOT_A_CALL
        while (yield from literal(source, CALL_BEGIN)):
            outcome = yield from _deepseek_call(source, output)
            if outcome is Outcome.NOT_A_CALL:
                break
            if outcome is Outcome.BROKEN:
                yield from text_until(source, (CALL_END, CALLS_END), output.arguments)
            yield from _end_mark(source, CALL_END)
            source.hold()
            yield from skip_space(source)
        if outcome is Outcome.NOT_A_CALL:
            output.content(source.held())
        else:
            source.rewind()
            yield from _end_mark(source, CALLS_END)


def _deepseek_call(source: Source, output: CallOutput) -> Steps[Outcome]:
    name = yield from _name(source)
    yield from skip_space(source)
    if not (yield from literal(source, CALL_SEP)):
        return Outcome.NOT_A_CALL
    yield from skip_space(source)
    if name == "function" and (yield from peek(source)) != "{":
        name = yield from _name(source)
        yield from skip_space(source)
        yield from literal(source, FENCE_JSON)
        yield from skip_space(source)
    if (yield from literal(source, CALL_END)) and output.knows(name):
        output.start(name)
        output.arguments("{}")
        output.complete()
        return Outcome.COMPLETE
    outcome = yield from named_call(source, output, name)
    if outcome is Outcome.COMPLETE:
        yield from _end_mark(source, FENCE)
    return outcome


def _bare_calls(source: Source, output: CallOutput, fences: tuple[str, ...] = ()) -> Steps[None]:
    """Calls at the beginning of a text, without a mark."""
    source.hold()
    yield from skip_space(source)
    fenced = False
    for fence in fences:
        fenced = fenced or (yield from literal(source, fence))
    if fenced:
        yield from skip_space(source)
    if (yield from peek(source)) not in ("{", "["):
        output.content(source.held())
        return
    outcome = yield from _calls_to_the_end(source, output)
    if fenced and outcome is Outcome.COMPLETE:
        yield from _end_mark(source, FENCE)


def _calls_to_the_end(source: Source, output: CallOutput) -> Steps[Outcome]:
    """Calls after the place that the source holds; a broken one takes all that is left."""
    outcome = yield from call_sequence(source, output, only_known_keys=True)
    if outcome is Outcome.NOT_A_CALL:
        output.content(source.held())
    source.release()
    if outcome is Outcome.BROKEN:
        yield from all_text(source, output.arguments)
    return outcome


def _end_mark(source: Source, mark: str) -> Steps[None]:
    """Reads the mark after a call, if it is there; the beginning of one at the end of a cut text too."""
    source.hold()
    yield from skip_space(source)
    if (yield from literal(source, mark)):
        source.release()
    elif source.ended and mark.startswith(source.text[source.position :]):
        source.take_to(len(source.text))
        source.release()
    else:
        source.rewind()


def _name(source: Source) -> Steps[str]:
    return (yield from read_while(source, lambda letter: letter.isalnum() or letter in "_.:-", MAX_NAME))
