"""What a draft head is, read from the ``config.json`` of a published checkpoint and the target it belongs to."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.models import llama
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.hf_config import flag, optional_int, required_int

MAX_MEDUSA_HEADS = 16


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE-1/2 or EAGLE-3 head: layers of the Llama kind.

    Attributes:
        layer: the head's own layers; ``vocab_size`` is the target's, ``windows`` are None.
        feature_size: width of the target's hidden states.
        draft_vocab_size: rows of the head's own output, V of the target where it has none of its own.
        fc_bias: bias of the projection that joins feature and embedding (EAGLE-1/2).
        norm_before_residual: EAGLE-3: the residual is the normalised feature.
        own_embedding: the checkpoint has an embedding of its own.
    """

    layer: TransformerConfig
    feature_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...] = ()
    fc_bias: bool = False
    norm_before_residual: bool = False
    own_embedding: bool = False


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa heads.

    Attributes:
        num_blocks: residual blocks of each head.
        draft_vocab_size: rows of each head's output.
        block_bias: bias of the blocks.
        shared_output: all heads use the target's output head.
    """

    hidden_size: int
    num_heads: int
    num_blocks: int
    draft_vocab_size: int
    block_bias: bool = True
    shared_output: bool = False


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The target layers whose inputs EAGLE-3 reads unless a checkpoint names others: low, middle and high.

    The published rule, (2, L // 2, L - 3), is for deep models; below 6 layers the first, the middle and the last.
    """
    if num_layers < 6:
        return 0, num_layers // 2, num_layers
    return 2, num_layers // 2, num_layers - 3


def parse_eagle(hf: Mapping[str, Any], target: TransformerConfig) -> EagleConfig:
    """Reads an EAGLE-1/2 configuration.

    Raises:
        ValueError: a field is missing, malformed, or does not fit the target; the message names it.
    """
    config = EagleConfig(
        _layer(hf, target), target.hidden_size, target.vocab_size, fc_bias=flag(hf, "bias", True)
    )
    _same("hidden_size", config.layer.hidden_size, target.hidden_size)
    return config


def parse_eagle3(hf: Mapping[str, Any], target: TransformerConfig) -> EagleConfig:
    """Reads an EAGLE-3 configuration, in the spellings of its authors and of vLLM.

    Raises:
        ValueError: as ``parse_eagle``.
    """
    feature_size = optional_int(hf, "target_hidden_size", None) or target.hidden_size
    _same("target_hidden_size", feature_size, target.hidden_size)
    draft_vocab_size = optional_int(hf, "draft_vocab_size", None) or target.vocab_size
    if draft_vocab_size > target.vocab_size:
        raise ValueError(
            f"config.json: draft_vocab_size {draft_vocab_size} exceeds the target's {target.vocab_size}"
        )
    return EagleConfig(
        _layer(hf, target),
        feature_size,
        draft_vocab_size,
        _feature_layers(hf, target),
        norm_before_residual=flag(hf, "norm_before_residual", False),
    )


def parse_medusa(hf: Mapping[str, Any], target: TransformerConfig) -> MedusaConfig:
    """Reads a Medusa configuration, in the spelling of its authors (``medusa_num_heads``) or of vLLM (``num_heads``).

    Raises:
        ValueError: as ``parse_eagle``.
    """
    published = "medusa_num_heads" in hf
    heads = required_int(hf, "medusa_num_heads" if published else "num_heads")
    if heads > MAX_MEDUSA_HEADS:
        raise ValueError(f"config.json: {heads} Medusa heads; at most {MAX_MEDUSA_HEADS}")
    blocks = optional_int(hf, "medusa_num_layers" if published else "num_hidden_layers", 1) or 1
    for key, value in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if hf.get(key) is not None:
            _same(key, required_int(hf, key), value)
    draft_vocab_size = optional_int(hf, "truncated_vocab_size", None) or target.vocab_size
    if draft_vocab_size > target.vocab_size:
        raise ValueError(
            f"config.json: truncated_vocab_size {draft_vocab_size} exceeds the target's {target.vocab_size}"
        )
    shared = flag(hf, "original_lm_head", False)
    if shared and draft_vocab_size != target.vocab_size:
        raise ValueError(
            "config.json: original_lm_head does not go with a truncated_vocab_size below the target's"
        )
    bias = flag(hf, "medusa_fc_bias", published)
    return MedusaConfig(target.hidden_size, heads, blocks, draft_vocab_size, bias, shared)


def _layer(hf: Mapping[str, Any], target: TransformerConfig) -> TransformerConfig:
    """The layers of a head; fields that its configuration leaves out are the target's."""
    inherited = {
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": target.norm_eps,
    }
    given = {key: value for key, value in hf.items() if value is not None or key not in inherited}
    layer = llama.parse({**inherited, **given})
    _same("vocab_size", layer.vocab_size, target.vocab_size)
    return replace(layer, qkv_bias=flag(hf, "qkv_bias", layer.qkv_bias))


def _feature_layers(hf: Mapping[str, Any], target: TransformerConfig) -> tuple[int, ...]:
    nested = hf.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    layers = hf.get("eagle_aux_hidden_state_layer_ids", nested.get("eagle_aux_hidden_state_layer_ids"))
    if layers is None:
        return default_feature_layers(target.num_layers)
    if (
        not isinstance(layers, list | tuple)
        or len(layers) != 3
        or not all(type(layer) is int and 0 <= layer <= target.num_layers for layer in layers)
    ):
        raise ValueError(
            f"config.json: eagle_aux_hidden_state_layer_ids must be 3 numbers from 0 to {target.num_layers}, "
            f"not {layers!r}"
        )
    return tuple(layers)


def _same(key: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise ValueError(f"config.json: {key} is {given}, but the target model's is {wanted}")
