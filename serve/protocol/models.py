"""Answers about models and the server's state."""

from msgspec import Struct


class Model(Struct):
    """``root`` is the first of the served names, whichever name this is."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "jaxinfer"
    parent: str | None = None


class ModelList(Struct):
    data: list[Model]
    object: str = "list"


class Health(Struct):
    status: str


class Version(Struct):
    version: str


class Load(Struct):
    """Attributes:
    server_load: sequences in the engine, running or waiting.
    kv_cache_usage: share of the blocks that sequences hold.
    """

    server_load: int
    running: int
    waiting: int
    waiting_tokens: int
    kv_cache_usage: float


class ResetCache(Struct):
    """How many cached blocks were forgotten."""

    blocks: int


class Profile(Struct):
    """Where the profile is, or will be, on the server's disk."""

    directory: str
