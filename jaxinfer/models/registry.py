"""Model families by the architecture name of their checkpoints."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.family import Family

FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": deepseek_v2.FAMILY,
    "DeepseekV3ForCausalLM": deepseek_v3.FAMILY,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma3ForConditionalGeneration": gemma3.MULTIMODAL,
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}


def family(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        ValueError: the architecture is not supported; the message lists those that are.
    """
    if architecture not in FAMILIES:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def parse_config(hf: Mapping[str, Any]) -> TransformerConfig:
    """Reads a ``config.json`` by the first name of its ``architectures``.

    Raises:
        ValueError: no architecture, or one that is not supported, or what ``Family.parse`` says.
    """
    architectures = hf.get("architectures")
    if not isinstance(architectures, list | tuple) or not architectures:
        raise ValueError(f"config.json: 'architectures' must be a list with a name, not {architectures!r}")
    return family(architectures[0]).parse(hf)
