"""The support matrix: features, and pairs of features, by the number of passing tests that exercise them."""

from collections import Counter
from itertools import combinations_with_replacement

HEAD = """# Support matrix

Written by `make matrix` from a test run: a number counts the passing tests that exercise a feature (diagonal), or two
features together. An empty cell is not a refusal, but nothing shows that the pair works.
"""


SPECULATION = """
## Features by drafter

The rows above for the drafters alone: passing tests that exercise a feature together with drafts of each kind.
"""
DRAFTERS = " speculation"
"""Features whose name ends like this are drafters."""


def render(tests: list[tuple[str, ...]]) -> str:
    """Markdown.

    Args:
        tests: the features of each passing test.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for features in tests:
        counts.update(combinations_with_replacement(sorted(set(features)), 2))
    names = sorted({name for features in tests for name in features})
    letters = [str(i + 1) for i in range(len(names))]
    lines = [HEAD, "| | feature | " + " | ".join(letters) + " |", "|---|---|" + "---|" * len(names)]
    for i, row in enumerate(names):
        cells = [str(counts[tuple(sorted((row, column)))] or "") for column in names]  # type: ignore[index]
        lines.append(f"| {letters[i]} | {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + _by_drafter(counts, names)


def _by_drafter(counts: Counter[tuple[str, str]], names: list[str]) -> str:
    drafters = [name for name in names if name.endswith(DRAFTERS)]
    if not drafters:
        return ""
    heads = [name.removesuffix(DRAFTERS) for name in drafters]
    lines = [SPECULATION, "| feature | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for name in names:
        cells = [str(counts[tuple(sorted((name, drafter)))] or "") for drafter in drafters]  # type: ignore[index]
        if name not in drafters and any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
