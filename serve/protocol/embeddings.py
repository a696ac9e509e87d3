"""Requests and answers of ``/v1/embeddings``."""

from typing import Annotated, Any, Literal

from msgspec import Struct
from pydantic import Field, WithJsonSchema

from serve.protocol.common import Body
from serve.protocol.completions import PROMPT_SCHEMA


class EmbeddingsRequest(Body):
    """The body of an embeddings request.

    Attributes:
        input: one text, several texts, the token ids of one, or those of several.
        encoding_format: ``float`` if absent; ``base64`` is little-endian float32.
        dimensions: only the model's own number: its embeddings cannot be shortened.
        pooling: mean over all tokens if absent, or the last token.
        add_special_tokens: of the tokenizer, for texts.
    """

    model: str | None = None
    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    user: str | None = None


class Embedding(Struct):
    """A vector of length 1."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingsUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: str = "list"
