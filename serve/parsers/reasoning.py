"""Splits the reasoning of ``<think>`` style models from the answer."""

from collections.abc import Callable

from serve.parsers.source import SPACE, Sink, Source, Steps, all_text, literal, skip_space, text_until

THINK, THINK_END = "<think>", "</think>"


def split_reasoning(source: Source, reasoning: Sink, content: Sink, inside: bool) -> Steps[None]:
    """Reads a text to its end: ``<think>reasoning</think>answer``, white space around the reasoning left out.

    Args:
        inside: the prompt opened the reasoning, so the text begins within it (a start tag at the beginning is ignored).
            Otherwise a text that does not begin with the tag has no reasoning.
    """
    source.hold()
    yield from skip_space(source)
    if (yield from literal(source, THINK)) or inside:
        source.release()
        yield from skip_space(source)
        yield from text_until(source, (THINK_END,), _without_last_space(reasoning))
        yield from literal(source, THINK_END)
        yield from skip_space(source)
    else:
        source.rewind()
    yield from all_text(source, content)


def _without_last_space(sink: Sink) -> Callable[[str], None]:
    """Passes text on, white space only once something follows it."""
    space = ""

    def pass_on(text: str) -> None:
        nonlocal space
        text = space + text
        shown = text.rstrip(SPACE)
        space = text[len(shown) :]
        if shown:
            sink(shown)

    return pass_on
