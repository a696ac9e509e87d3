"""Configuration of prefill and decode in different engines; see ``config`` for the whole."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from jaxinfer.config_values import Bytes, Scope

MAX_SECONDS = 86400.0
"""Longest ``timeout`` and ``heartbeat``."""

_ADDRESS = re.compile(r"(tcp://[^\s/]+:\d+|ipc://\S+)")
_HERE = re.compile(r"(tcp://)?(127\.[\d.]+|localhost|lo|\[?::1\]?)(:\d+)?|ipc://.*")
"""Addresses that only processes of the same machine can reach."""


class DisaggregationConfig(Scope):
    """Prefill and decode in different engines; see docs/disaggregation.md.

    Attributes:
        role: ``prefill`` computes prompts for others, ``decode`` lets others compute long prompts, ``both`` does both.
            Each of them also serves requests alone.
        bind: where a prefill engine listens: "tcp://ADDRESS:PORT", or "ipc://FILE". Whoever can connect can have
            prompts computed and read K and V: there is no authentication, so keep it inside a trusted network.
        peers: prefill engines that a decode engine asks; the one with the fewest fetches in progress is taken.
        transport: how blocks travel: ``host`` (inside the messages), ``jax`` (``jax.experimental.transfer``) or
            ``nixl`` (package nixl). All engines that talk to each other use the same one.
        data_host: address at which either engine listens for the ``jax`` transport; the other one must reach it.
        quantization: of blocks on their way. ``int8``: a scale per block and head; lossy, so that tokens may differ
            from those of one engine, also of later requests that hit these blocks. Not with 1-byte caches.
        min_tokens: prompts that lack fewer tokens of full blocks are computed by the decode engine itself.
        max_fetches: sequences whose blocks are on their way at the same time.
        timeout: seconds until a decode engine gives up waiting for a prompt, and computes it.
        heartbeat: seconds between two signs of life of a decode engine, which a prefill engine answers; who is silent
            for three of them counts as lost.
        connect_timeout: seconds that a starting decode engine waits for its peers, to tell that they do not fit.
        max_buffered: bytes of a decode engine's blocks that a prefill engine keeps until they are taken; more end
            the fetch.
    """

    role: Literal["none", "prefill", "decode", "both"] = "none"
    bind: str = "tcp://127.0.0.1:5600"
    peers: tuple[str, ...] = ()
    transport: Literal["host", "jax", "nixl"] = "host"
    data_host: str = "127.0.0.1"
    quantization: Literal["none", "int8"] = "none"
    min_tokens: int = Field(default=256, ge=1)
    max_fetches: int = Field(default=8, ge=1)
    timeout: float = Field(default=30.0, gt=0, le=MAX_SECONDS)
    heartbeat: float = Field(default=1.0, gt=0, le=MAX_SECONDS)
    connect_timeout: float = Field(default=5.0, ge=0)
    max_buffered: Bytes = Field(default=1 << 30, gt=0)

    @property
    def prefills(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        return self.role in ("decode", "both")

    @field_validator("bind", "peers")
    @classmethod
    def _addresses(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for address in (value,) if isinstance(value, str) else value:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"{address!r} is no address; write tcp://HOST:PORT or ipc://FILE")
        return value

    @model_validator(mode="after")
    def _peers_of_the_role(self) -> Self:
        if self.decodes and not self.peers:
            raise ValueError(
                f"role is {self.role!r}, but peers names no prefill engine; write for example "
                "[tcp://127.0.0.1:5600]"
            )
        if self.peers and not self.decodes:
            raise ValueError(f"peers are asked by the roles decode and both, but role is {self.role!r}")
        if len(set(self.peers)) < len(self.peers):
            raise ValueError(f"peers names an engine twice: {list(self.peers)}")
        if self.quantization != "none" and self.transport == "jax":
            raise ValueError(
                f"quantization is {self.quantization!r}, which happens on the host, but transport 'jax' goes from "
                "device to device; allowed are host and nixl"
            )
        return self

    @model_validator(mode="after")
    def _data_can_be_reached(self) -> Self:
        if self.transport != "jax" or not _HERE.fullmatch(self.data_host):
            return self
        ends = [*((("bind", self.bind),) if self.prefills else ()), *(("peers", peer) for peer in self.peers)]
        for name, address in ends:
            if not _HERE.fullmatch(address):
                raise ValueError(
                    f"{name} is {address}, but data_host is {self.data_host}, which engines elsewhere cannot reach; "
                    "write an address of this host that they can"
                )
        return self
