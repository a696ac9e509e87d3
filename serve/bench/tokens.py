"""Token sources of a benchmark: a tokenizer on this machine, or the server under test."""

from collections.abc import Mapping, Sequence

import httpx

from jaxinfer.checkpoints.references import resolve_reference
from jaxinfer.tokenization.loading import load_tokenizer
from jaxinfer.tokenization.tokenizer import Tokenizer

MARGIN = 0.05
"""Part of the vocabulary at either end that is not drawn: special, byte and added tokens usually sit there."""


def ordinary_ids(vocab_size: int) -> range:
    """Ids that random prompts are made of."""
    margin = int(vocab_size * MARGIN)
    return range(margin, vocab_size - margin)


class LocalTokens:
    """A tokenizer of this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids = ordinary_ids(tokenizer.vocab_size)

    @classmethod
    def load(cls, reference: str) -> "LocalTokens":
        """Args:
        reference: directory or file, or a model reference.

        Raises:
            TokenizerError: there is no tokenizer.
            CheckpointError: there is no such reference.
        """
        return cls(load_tokenizer(resolve_reference(reference)).tokenizer)

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


class RemoteTokens:
    """The server's own tokenizer, by ``/tokenize`` and ``/detokenize``.

    Args:
        vocab_size: asked from the server's ``/tokenizer_info`` if None.

    Raises:
        ValueError: the server does not say how large its vocabulary is.
    """

    def __init__(self, client: httpx.Client, model: str, vocab_size: int | None) -> None:
        self._client, self._model = client, model
        size = vocab_size or self._vocab_size()
        self.ids = ordinary_ids(size)

    def _vocab_size(self) -> int:
        response = self._client.get("/tokenizer_info")
        size = response.json().get("vocab_size") if response.status_code == 200 else None
        if not isinstance(size, int):
            raise ValueError(
                "the server does not tell the size of its vocabulary; give --tokenizer or --vocab-size"
            )
        return size

    def text(self, ids: Sequence[int]) -> str:
        body = {"model": self._model, "tokens": list(ids)}
        return self._post("/detokenize", body, "prompt")

    def count(self, text: str) -> int:
        return int(self._post("/tokenize", {"model": self._model, "prompt": text}, "count"))

    def _post(self, path: str, body: Mapping[str, object], key: str) -> str:
        response = self._client.post(path, json=body)
        if response.status_code != 200:
            raise ValueError(
                f"{path} answered {response.status_code}: {response.text[:200]}; give --tokenizer"
            )
        return response.json()[key]
