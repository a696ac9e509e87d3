"""Prompt lookup: what followed the same n tokens before (Saxena 2023; Yang et al. 2023, arXiv:2304.04487)."""

from collections.abc import Sequence

from jaxinfer.request import Sequence as Seq
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.evidence import MAX_MATCH, class_of


class NgramIndex:
    """The tokens of one sequence, and where each n-gram of them was last continued. Grows token by token.

    Args:
        sizes: lengths of the n-grams, longest first.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._tokens: list[int] = []
        self._continued: dict[tuple[int, ...], int] = {}
        """Index of the token behind the newest earlier occurrence."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens at the end."""
        tokens = self._tokens
        for token in token_ids:
            # What ends before this token is continued by it.
            end = len(tokens)
            for n in self._sizes:
                if n <= end:
                    self._continued[tuple(tokens[end - n :])] = end
            tokens.append(token)

    def propose(self, limit: int) -> tuple[int, ...]:
        """What followed the newest earlier occurrence of the longest n-gram at the end; none if there is none.

        A continuation that reaches the end goes on with the guess itself, so a period is continued as a period.
        """
        tokens = self._tokens
        start = self._start()
        if start is None:
            return ()
        period = len(tokens) - start
        return tuple(tokens[start + i % period] for i in range(limit))

    def match(self) -> int:
        """Tokens at the end that equal those before what ``propose`` gives, up to ``MAX_MATCH``; 0 if that is none."""
        tokens, start = self._tokens, self._start()
        length = 0
        while start is not None and length < min(start, MAX_MATCH):
            if tokens[start - 1 - length] != tokens[-1 - length]:
                break
            length += 1
        return length

    def _start(self) -> int | None:
        """Index of the token behind the newest earlier occurrence of the longest n-gram at the end."""
        tokens = self._tokens
        for n in self._sizes:
            start = self._continued.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if start is not None:
                return start
        return None


class NgramDrafter:
    """A ``Drafter`` that looks up n-grams of each sequence in its own prompt and output.

    Args:
        longest, shortest: n-gram lengths to look for, the longest first.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = tuple(range(longest, shortest - 1, -1))
        self._indices: dict[Seq, NgramIndex] = {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        return [self._index_of(job.seq).propose(job.limit) for job in jobs]

    def evidence(self, seq: Seq) -> int:
        """See ``Evidence``."""
        return class_of(self._index_of(seq).match())

    def forget(self, seq: Seq) -> None:
        self._indices.pop(seq, None)

    def _index_of(self, seq: Seq) -> NgramIndex:
        """The index with all known tokens of the sequence; those of a preempted one stay the same."""
        index = self._indices.get(seq)
        if index is None:
            index = self._indices[seq] = NgramIndex(self._sizes)
        index.extend(seq.token_ids(len(index), seq.num_tokens))
        return index
