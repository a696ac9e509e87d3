"""From a configuration to an engine that exchanges blocks with others."""

import hashlib
from pathlib import Path

from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.inputs import InputProcessor
from jaxinfer.engine.model_setup import ModelSetup
from jaxinfer.engine.remote_kv import BlockWriter, JobQueue, RemoteKV
from jaxinfer.kv_transfer.connector import KVConnector
from jaxinfer.kv_transfer.layout import BlockLayout
from jaxinfer.kv_transfer.messages import Ask
from jaxinfer.layers.rope import frequencies
from jaxinfer.models.decoder import kv_specs
from jaxinfer.request import Sequence
from jaxinfer.runner.block_transfers import BlockTransfers
from jaxinfer.sampling_params import SamplingParams

_SAMPLED_TENSORS = 16
"""Vectors of the checkpoint that tell one model from another of the same shapes."""

_PREFILL_ONLY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
"""One token is sampled, as its logits tell whether the blocks are sound; it is not used."""


def block_layout(config: EngineConfig, setup: ModelSetup) -> BlockLayout:
    """Blocks as they travel.

    Raises:
        ValueError: they cannot be quantized in the way that the configuration asks for.
    """
    dtype = setup.stored_dtype
    if config.disaggregation.quantization != "none" and dtype.itemsize == 1:
        raise ValueError(
            f"disaggregation.quantization is {config.disaggregation.quantization!r}, but the cache is {dtype} already; "
            "allowed is none"
        )
    specs = kv_specs(setup.model)
    return BlockLayout(
        heads=tuple(spec.num_kv_heads for spec in specs),
        widths=tuple(spec.widths for spec in specs),
        groups=setup.groups,
        windows=setup.windows,
        block_size=config.cache.block_size,
        dtype=dtype.name,
    )


def block_transfers(config: EngineConfig, setup: ModelSetup) -> BlockTransfers | None:
    """The programs that read and write blocks; None if the engine is alone."""
    if config.disaggregation.role == "none":
        return None
    heads = tuple(spec.num_kv_heads for spec in kv_specs(setup.model))
    return BlockTransfers.make(setup.groups, heads, setup.layout)


def fingerprint(setup: ModelSetup) -> str:
    """Digest of all that K and V of a prompt depend on: the model's configuration, positions, and a sample of the
    weights (vectors, which training changes too, and the form of everything else)."""
    digest = hashlib.blake2b(repr(setup.model).encode(), digest_size=16)
    for rope in setup.model.ropes:
        values, scale = frequencies(rope, setup.max_model_len)
        digest.update(values.tobytes() + repr(scale).encode())
    source = setup.files.source
    vectors = []
    for name in sorted(source.names()):
        info = source.info(name)
        digest.update(repr((name, info.shape, info.stored)).encode())
        if len(info.shape) == 1:
            vectors.append(name)
    for name in vectors[:_SAMPLED_TENSORS]:
        digest.update(source.read(name).tobytes())
    return digest.hexdigest()


def make_connector(config: EngineConfig, setup: ModelSetup) -> KVConnector | None:
    """What the role of the configuration needs; None if the engine is alone.

    Raises:
        ValueError: the cache does not go with it.
        ConfigError: the transport is not installed, or an address is not one.
    """
    if config.disaggregation.role == "none":
        return None
    from jaxinfer.kv_transfer.zmq_connector import ZmqConnector

    name = Path(config.model.reference).name
    layout = block_layout(config, setup)
    try:
        return ZmqConnector(config.disaggregation, layout, name, fingerprint(setup))
    except ImportError as error:
        raise ConfigError(
            f"disaggregation.transport {config.disaggregation.transport!r} is not installed: {error}"
        ) from error


def add_remote(
    core: EngineCore, connector: KVConnector, writer: BlockWriter, inputs: InputProcessor
) -> RemoteKV:
    """Connects an engine's core with other engines."""

    def prepare(request_id: str, ask: Ask) -> list[Sequence]:
        prompt = {"prompt_token_ids": list(ask.token_ids)}
        if ask.cache_salt is not None:
            prompt["cache_salt"] = ask.cache_salt  # type: ignore[assignment]
        return inputs.process(request_id, prompt, _PREFILL_ONLY, ask.priority)  # type: ignore[arg-type]

    remote = RemoteKV(connector, core.scheduler, writer, JobQueue(prepare, core.add, core.abort))
    core.remote = remote
    return remote
