"""Suffix decoding: drafts from the sequence itself and from earlier outputs of the server.

Oliaro et al. 2024 (arXiv:2411.04975). Agents, retries and structured answers repeat what the server has already said,
often at length; a draft of ten tokens then costs no model.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.request import Sequence as Seq
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.evidence import class_of
from jaxinfer.speculative.suffix_index import MAX_MATCH, NONE, Guess, SuffixIndex


@dataclass
class _Known:
    """A sequence as far as it is indexed.

    Attributes:
        own: prompt and output; ``own_end`` is the place of its last token.
        shared: what holds its outputs for others; another one after it was dropped. ``shared_end`` is as above.
        num_filed: output tokens given to ``shared``.
    """

    own: SuffixIndex
    own_end: int
    shared: SuffixIndex
    shared_end: int
    num_filed: int = 0


class SuffixDrafter:
    """A ``Drafter`` that looks up the longest stretch of newest tokens that occurred before.

    It looks in two places and takes the guess that promises more: the sequence's own prompt and output, and the outputs
    of all sequences under the same ``cache_salt``, running or finished. Under another salt nothing is seen, and nothing
    is forgotten because of it, unless there are more salts than are kept: then the one that was used longest ago loses
    its whole index.

    Args:
        config: its ``suffix_`` fields.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._sizes = _sizes(config.suffix_longest, config.suffix_shortest)
        self._known: dict[Seq, _Known] = {}
        self._shared: OrderedDict[str | None, SuffixIndex] = OrderedDict()

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        for job in jobs:  # first all of them, so that equal requests of a step learn from each other
            self._file(job.seq, self._index(job.seq))
        return [self._guess(job).tokens for job in jobs]

    def evidence(self, seq: Seq) -> int:
        """See ``Evidence``: of the longer match in both places."""
        known = self._index(seq)
        context = self._context(seq)
        return class_of(max(known.own.match(context, known.own_end), known.shared.match(context)))

    def forget(self, seq: Seq) -> None:
        """The whole output stays for others."""
        if seq in self._known or seq.output_token_ids:
            self._file(seq, self._known.get(seq) or self._index(seq))
        self._known.pop(seq, None)

    def _index(self, seq: Seq) -> _Known:
        known = self._known.get(seq)
        if known is None:
            shared = self._shared_of(seq.request.cache_salt)
            known = self._known[seq] = _Known(self._make(None), NONE, shared, self._context_of(seq, shared))
        known.own_end = known.own.extend(seq.token_ids(len(known.own), seq.num_tokens), known.own_end)
        return known

    def _file(self, seq: Seq, known: _Known) -> None:
        shared = self._shared_of(seq.request.cache_salt)
        if shared is not known.shared:
            known.shared, known.shared_end = shared, NONE
        news = seq.output_token_ids[known.num_filed :]
        known.shared_end = shared.extend(news, known.shared_end)
        known.num_filed += len(news)

    def _context_of(self, seq: Seq, shared: SuffixIndex) -> int:
        """Files the end of the prompt, or the first tokens of an output would follow nothing."""
        return shared.extend(seq.request.prompt_token_ids[-self._sizes[0] :])

    def _guess(self, job: DraftJob) -> Guess:
        known, context = self._known[job.seq], self._context(job.seq)
        own = known.own.guess(context, job.limit, known.own_end)
        shared = known.shared.guess(context, job.limit)
        return shared if shared.score > own.score else own

    @staticmethod
    def _context(seq: Seq) -> list[int]:
        return seq.token_ids(max(0, seq.num_tokens - MAX_MATCH), seq.num_tokens)

    def _shared_of(self, salt: str | None) -> SuffixIndex:
        shared = self._shared.get(salt)
        if shared is None:
            while len(self._shared) >= self._config.suffix_salts:
                self._shared.popitem(last=False)
            shared = self._shared[salt] = self._make(self._config.suffix_tokens)
        self._shared.move_to_end(salt)
        return shared

    def _make(self, capacity: int | None) -> SuffixIndex:
        config = self._config
        return SuffixIndex(self._sizes, capacity, config.suffix_min_probability, config.suffix_factor)


def _sizes(longest: int, shortest: int) -> tuple[int, ...]:
    """The longest, half of it, and so on down to the shortest."""
    sizes = []
    while longest > shortest:
        sizes.append(longest)
        longest //= 2
    return (*sizes, shortest)
