"""What a checkpoint and a configuration make of disaggregation, without weights or programs."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.engine import build
from jaxinfer.engine.build import build_engine
from jaxinfer.engine.model_setup import ModelSetup, set_up_model
from jaxinfer.engine.remote_setup import block_layout, block_transfers, fingerprint, make_connector
from jaxinfer.engine.thread_client import ThreadClient
from jaxinfer.kv_transfer.layout import BlockLayout
from jaxinfer.kv_transfer.transports import nixl
from jaxinfer.kv_transfer.zmq_connector import ZmqConnector
from tests.support import tiny_checkpoint
from tests.support.two_engines import COMMON, complete, until_clean

pytestmark = pytest.mark.feature("disaggregation")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("model") / "tiny")


def set_up(model: Path, **values) -> tuple[EngineConfig, ModelSetup]:
    config = EngineConfig.load(
        str(model), {"cache.num_blocks": 64, "disaggregation.role": "prefill", **values}
    )
    return config, set_up_model(config)


def connector(model: Path, **values) -> ZmqConnector:
    made = make_connector(*set_up(model, **{"disaggregation.bind": "tcp://127.0.0.1:0", **values}))
    assert isinstance(made, ZmqConnector)
    return made


def test_blocks_are_described_as_the_model_has_them(model) -> None:
    config, setup = set_up(model)
    expected = BlockLayout((2, 2), ((16, 16), (16, 16)), (0, 0), (None,), 16, "float32")
    assert block_layout(config, setup) == expected
    assert block_transfers(config, setup) is not None
    alone = config.model_copy(update={"disaggregation": EngineConfig.load(str(model)).disaggregation})
    assert make_connector(alone, setup) is None
    assert block_transfers(alone, setup) is None


def test_a_fingerprint_tells_weights_and_settings_of_positions_apart(model, tmp_path) -> None:
    one = fingerprint(set_up(model)[1])
    assert one == fingerprint(set_up(model, **{"cache.block_size": 8, "model.max_model_len": 100})[1])
    other = tiny_checkpoint.write(tmp_path / "other")
    tensors = {name: np.array(x) for name, x in load_file(other / "model.safetensors").items()}
    tensors["model.norm.weight"][0] += 0.01
    save_file(tensors, str(other / "model.safetensors"), {"format": "pt"})
    assert fingerprint(set_up(other)[1]) != one


def test_a_quantized_cache_is_not_quantized_again(model) -> None:
    config, setup = set_up(model, **{"cache.dtype": "int8", "disaggregation.quantization": "int8"})
    with pytest.raises(ValueError, match="the cache is int8 already; allowed is none"):
        block_layout(config, setup)


def test_engines_of_one_checkpoint_find_each_other_and_others_are_refused(model) -> None:
    prefill = connector(model)
    prefill.start(lambda event: None)
    assert prefill.server is not None
    role = {"disaggregation.role": "decode", "disaggregation.peers": [prefill.server.address]}
    role |= {"disaggregation.connect_timeout": 60}
    try:
        decode = connector(model, **role)
        decode.start(lambda event: None)
        assert decode.available
        decode.close()
        with pytest.raises(ConfigError, match="block_size is 32 here and 16 there"):
            connector(model, **role, **{"cache.block_size": 32}).start(lambda event: None)
    finally:
        prefill.close()


def test_a_transport_that_is_missing_is_told_before_weights_are_read(model, monkeypatch) -> None:
    monkeypatch.setattr(nixl, "_PACKAGES", ("nixl_that_nobody_has",))
    monkeypatch.setattr(build, "load_weights", lambda *_: pytest.fail("weights were read"))
    config, _ = set_up(model, **{"disaggregation.transport": "nixl", "compile.cache_dir": "none"})
    with pytest.raises(
        ConfigError, match="'nixl' is not installed: there is no package nixl_that_nobody_has"
    ):
        build_engine(config)


def test_a_model_that_cannot_be_loaded_leaves_no_connector(model, monkeypatch) -> None:
    def fail(*_) -> None:
        raise ValueError("broken weights")

    made: list[ZmqConnector] = []

    def remember(*args) -> ZmqConnector:
        made.append(connector(model))
        return made[0]

    monkeypatch.setattr(build, "make_connector", remember)
    monkeypatch.setattr(build, "_load", fail)
    config, _ = set_up(model, **{"compile.cache_dir": "none"})
    with pytest.raises(ValueError, match="broken weights"):
        build_engine(config)
    assert made[0].server is not None
    assert made[0].server._context.closed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_built_from_configurations_share_a_prompt(model) -> None:
    small = {"model.max_model_len": 256, "cache.num_blocks": 64, "compile.warm_up": "lazy"}
    small |= {
        "scheduler.max_num_batched_tokens": 32,
        "scheduler.max_num_seqs": 4,
        "compile.cache_dir": "none",
    }
    small |= {f"disaggregation.{name}": value for name, value in COMMON.items()}

    def built(**values) -> ThreadClient:
        settings = {f"disaggregation.{name}": value for name, value in values.items()}
        return ThreadClient(build_engine(EngineConfig.load(str(model), {**small, **settings})))

    async def main() -> None:
        prefill = built(role="prefill", bind="tcp://127.0.0.1:0")
        server = prefill.engine.core.remote._connector.server  # type: ignore[union-attr]
        decode = built(role="decode", peers=[server.address], min_tokens=32)
        prompt = [i * 7 % 250 for i in range(100)]
        alone = await complete(prefill, "a", prompt)
        await prefill.reset_prefix_cache()
        assert await complete(decode, "b", prompt) == alone
        stats = decode.snapshot().transfers
        assert (stats.received_blocks, stats.received_bytes) == (7, 7 * 2 * 2 * 2 * 16 * 16 * 4)
        await until_clean(decode, prefill)
        await decode.shutdown()
        await prefill.shutdown()

    asyncio.run(main())
