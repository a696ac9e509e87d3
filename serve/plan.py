"""``jaxinfer plan``: what will be compiled, and what will fit."""

from itertools import zip_longest

from rich.console import Console
from rich.table import Table

from jaxinfer.checkpoints.loader import num_bytes
from jaxinfer.config import EngineConfig
from jaxinfer.engine.model_setup import ModelSetup, set_up_model, size_cache
from jaxinfer.engine.pipeline_setup import size_stages, stage_setups
from jaxinfer.kv_cache.allocate import bytes_per_block, local_specs


def print_plan(config: EngineConfig) -> None:
    """Prints buckets, programs and memory without loading weights."""
    setup = set_up_model(config)
    console = Console()
    console.print(_programs(setup))
    console.print(_memory(config, setup))


def _programs(setup: ModelSetup) -> Table:
    plan = setup.plan
    table = Table("programs", "number", "sizes", title=f"{setup.plan.num_programs} programs")
    table.add_row("backbone, by tokens", str(len(plan.token_buckets)), _sizes(plan.token_buckets))
    heads = tuple(sorted({*plan.row_buckets, plan.scored_rows}))
    table.add_row("head, by rows", str(len(heads)), _sizes(heads))
    table.add_row("sampler, by rows", str(len(plan.row_buckets)), _sizes(plan.row_buckets))
    table.add_row("scoring, block copy, slot reset", "3", "")
    return table


def _memory(config: EngineConfig, setup: ModelSetup) -> Table:
    """Of the device that holds most."""
    stages = stage_setups(setup)
    blocks = size_cache(config, setup) if len(stages) == 1 else size_stages(config, setup, stages)
    size = config.cache.block_size
    per_stage = [
        bytes_per_block(local_specs(stage.specs, stage.layout), stage.groups, size, setup.cache_dtype)
        for stage in stages
    ]
    per_block = [max(sizes) for sizes in zip_longest(*per_stage, fillvalue=0)]
    shapes = setup.parts.shapes
    weights = max(sum(num_bytes(shapes[path]) for path in stage.paths) for stage in stages)
    held = f"{len(setup.forms)} as stored, others {setup.dtype}" if setup.forms else f"{setup.dtype}"
    devices = "" if setup.num_devices == 1 else f" of each of {setup.num_devices} devices"
    table = Table("memory" + devices, "MiB", "notes")
    table.add_row("weights", _mib(weights), f"{len(shapes)} tensors, {held}")
    for window, count, block_bytes in zip(setup.windows, blocks, per_block):
        name = "KV cache" if window is None else f"KV cache, window {window}"
        tokens = (count - 1) * size
        table.add_row(
            name,
            _mib(count * block_bytes),
            f"{count} blocks of {size} tokens, {setup.cache_dtype}: {tokens} tokens, "
            f"{tokens / setup.max_model_len:.1f} sequences of {setup.max_model_len}",
        )
    return table


def _sizes(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"
