"""What the processes of an engine say to each other: msgpack over TCP."""

import msgspec

from jaxinfer.request import Pooling
from jaxinfer.sampling_params import SamplingParams


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """A follower is there; repeated until it is welcome.

    Attributes:
        token: names this process, so that two with one rank, or one of an earlier gang, are told apart.
        facts: what has to be equal everywhere, see ``identity``.
    """

    token: str
    rank: int
    facts: dict[str, str]


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """A follower lives. ``digest`` is of the tokens of the first ``steps`` steps."""

    token: str
    steps: int
    digest: int


class Share(msgspec.Struct, tag="share", array_like=True):
    """A follower's part of a ``gather``."""

    token: str
    what: str
    value: msgspec.Raw


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """A follower ends."""

    token: str
    message: str


Answer = Hello | Beat | Share | Failed


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """All processes are there: those with these tokens. ``gang`` names this run of them, in all that the leader
    says."""

    gang: str
    tokens: list[str]


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """The leader lives."""

    gang: str


class Shared(msgspec.Struct, tag="shared", array_like=True):
    """What all ranks have shared, in their order."""

    gang: str
    what: str
    values: list[msgspec.Raw]


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """The last message; ``failure`` says why, if it is none of the good reasons."""

    gang: str
    failure: str | None


class Admitted(msgspec.Struct, array_like=True):
    """A sequence that got a batch slot; token ids are int32."""

    slot: int
    index: int
    key: tuple[int, int]
    prompt: bytes
    output: bytes
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...]
    pooling: Pooling | None


class Row(msgspec.Struct, array_like=True):
    """A row of a step; its sequence is the one in the slot."""

    slot: int
    start: int
    num_tokens: int
    samples: bool


class Step(msgspec.Struct, tag="step", array_like=True):
    """A step.

    Attributes:
        number: of all messages for the device, from 0 on.
        sample: the sampler is dispatched at once; else ``Masks`` follow.
        packed: see ``StepArrays``.
        samples: int32 [5, P]: index of the row, then what ``Samples`` has of each sampled token.
        copies: (group, source, target).
    """

    gang: str
    number: int
    sample: bool
    token_bucket: int
    row_bucket: int
    packed: bytes
    rows: list[Row]
    samples: bytes
    admitted: list[Admitted]
    copies: list[tuple[int, int, int]]


class Masks(msgspec.Struct, tag="masks", array_like=True):
    """Samples the step that was begun; see ``runner.protocol.Masks``."""

    gang: str
    number: int
    masks: dict[int, bytes]


class Moves(msgspec.Struct, tag="moves", array_like=True):
    """See ``Runner.move``: (group, source, target)."""

    gang: str
    number: int
    moves: list[tuple[int, int, int]]


Work = Step | Masks | Moves
Order = Welcome | Alive | Shared | Ended | Step | Masks | Moves

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_order = msgspec.msgpack.Decoder(Order).decode
