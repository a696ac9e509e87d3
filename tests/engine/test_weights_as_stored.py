"""The engine with weights in the form in which a checkpoint stores them, against the same weights in float32."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import EngineConfig
from jaxinfer.engine import activations as activations_module
from jaxinfer.engine.build import load_weights, set_up_model
from pallas_kernels.linear.packed import PackedWeight
from pallas_kernels.native.library import available
from tests.checkpoints.tiny_gguf_files import TOKENIZER, write_gguf

D, F, V, H, K, LAYERS = 256, 512, 320, 4, 2, 2
SIZES = {
    "context_length": 64,
    "embedding_length": D,
    "block_count": LAYERS,
    "feed_forward_length": F,
    "attention.head_count": H,
    "attention.head_count_kv": K,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": D // H,
}
SHAPES = {
    "attn_q": (D, D),
    "attn_k": (D * K // H, D),
    "attn_v": (D * K // H, D),
    "attn_output": (D, D),
    "ffn_gate": (F, D),
    "ffn_up": (F, D),
    "ffn_down": (D, F),
}
MIXTURES = {
    "Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "embed": "Q6_K", "": "Q4_K"},
    "legacy and plain": {"ffn_up": "Q4_0", "attn_k": "F16", "ffn_down": "BF16", "embed": "Q8_0", "": "Q4_1"},
}

needs_library = pytest.mark.skipif(not available()[0], reason=available()[1])


def _tensor(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> tuple[np.ndarray, Type]:
    """Random numbers of a magnitude that keeps activations near one."""
    if not kind.endswith("_K"):
        values = (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
        return gguf.quants.quantize(values, Type[kind]), Type[kind]
    block, size = GGML_QUANT_SIZES[Type[kind]]
    raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scales = {"Q4_K": ((0, 2.0e-4), (2, 1.5e-3)), "Q6_K": ((208, 3e-5),)}[kind]
    for offset, scale in scales:
        raw[:, :, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1), Type[kind]


def save(path: Path, mixture: dict[str, str]) -> str:
    """A Llama with tied embeddings whose tensors have the types of a mixture."""
    rng = np.random.default_rng(0)

    def matrix(name: str, shape: tuple[int, int]) -> tuple[np.ndarray, Type]:
        return _tensor(rng, shape, mixture.get(name, mixture[""]))

    def norm() -> tuple[np.ndarray, Type]:
        return np.ones(D, np.float32), Type.F32

    tensors = {"token_embd.weight": matrix("embed", (V, D)), "output_norm.weight": norm()}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": matrix(name, shape) for name, shape in SHAPES.items()}
        tensors |= {f"blk.{layer}.{name}.weight": norm() for name in ("attn_norm", "ffn_norm")}
    return str(write_gguf(path / "x.gguf", "llama", {**SIZES, **TOKENIZER}, tensors))


def settings(reference: str, weights: str, backend: str, activations: str = "float") -> EngineConfig:
    return EngineConfig.load(
        reference,
        {
            "model.dtype": "float32",
            "model.weights": weights,
            "model.activations": activations,
            "model.tokenizer": "none",
            "kernel.backend": backend,
            "cache": {"block_size": 4, "num_blocks": 64},
            "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 8},
            "compile": {"warm_up": "lazy", "cache_dir": "none"},
        },
    )


@needs_library
@pytest.mark.feature("GGUF", "weights as stored", "chunked prefill", "logprobs")
@pytest.mark.parametrize("mixture", MIXTURES)
def test_same_answers_as_in_float32(tmp_path, mixture):
    """A prompt in chunks and a short one, with log-probabilities; q and k are permuted in the file."""
    reference = save(tmp_path, MIXTURES[mixture])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1)
    prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(3, V, n).tolist()} for n in (13, 4)]
    answers = []
    for weights in ("stored", "float"):
        outputs = LLM(settings(reference, weights, "native")).generate(prompts, params, progress=False)
        answers.append([output.outputs[0] for output in outputs])
    for stored, expanded in zip(*answers):
        assert stored.token_ids == expanded.token_ids
        assert stored.cumulative_logprob == pytest.approx(expanded.cumulative_logprob, abs=1e-4)
    assert len({token for answer in answers[0] for token in answer.token_ids}) > 4


@needs_library
@pytest.mark.feature("GGUF", "weights as stored")
def test_which_parameters_are_packed(tmp_path):
    setup = set_up_model(settings(save(tmp_path, MIXTURES["Q4_K_M"]), "auto", "native"))
    params = load_weights(setup)
    packed = {path for path, weight in params.items() if isinstance(weight, PackedWeight)}
    assert packed == set(setup.forms) == {path for path in params if "norm" not in path}
    assert params["layers.0.attention.qkv.weight"].formats == ("Q4_K", "Q6_K")
    assert params["layers.1.mlp.gate_up.weight"].formats == ("Q4_K",)
    assert setup.dtype == np.float32


def test_stored_needs_kernels_that_can(tmp_path):
    reference = save(tmp_path, MIXTURES["Q4_K_M"])
    with pytest.raises(ValueError, match=r"model.weights is 'stored'.*auto and float"):
        set_up_model(settings(reference, "stored", "xla"))
    assert not set_up_model(settings(reference, "auto", "xla")).forms


@needs_library
@pytest.mark.feature("GGUF", "chunked prefill", "logprobs")
@pytest.mark.parametrize(
    ("mixture", "activations"),
    [
        *(
            pytest.param(MIXTURES[name], "int8", marks=pytest.mark.feature("int8 activations"), id=name)
            for name in MIXTURES
        ),
        pytest.param({"": "BF16"}, "bfloat16", marks=pytest.mark.feature("bf16 activations"), id="BF16"),
    ],
)
def test_rounded_activations_are_near_and_do_not_depend_on_neighbours(tmp_path, mixture, activations):
    """Log-probabilities near those of exact activations; alone, and in chunks beside others: the same bits."""
    reference = save(tmp_path, mixture)
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0, logprobs=1)
    prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(3, V, n).tolist()} for n in (13, 5, 9)]

    def scores(outputs) -> list[list[float]]:
        return [
            [entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:])]
            for o in outputs
        ]

    rounded, exact = (LLM(settings(reference, "stored", "native", how)) for how in (activations, "float"))
    together = scores(rounded.generate(prompts, params, progress=False))
    alone = [scores(rounded.generate([prompt], params, progress=False))[0] for prompt in prompts]
    assert together == alone
    want = scores(exact.generate(prompts, params, progress=False))
    differences = np.abs(np.concatenate(together) - np.concatenate(want))
    assert 1e-5 < differences.max() < 0.2


@pytest.mark.parametrize(
    ("backend", "weights", "message"),
    [
        ("xla", "auto", "the kernels that were chosen do not round them"),
        pytest.param("native", "float", "model.weights is 'float'", marks=needs_library),
    ],
)
def test_int8_activations_need_quantized_weights_and_kernels(tmp_path, backend, weights, message):
    reference = save(tmp_path, MIXTURES["Q4_K_M"])
    with pytest.raises(ValueError, match=f"model.activations is 'int8', but {message}"):
        set_up_model(settings(reference, weights, backend, "int8"))


@needs_library
@pytest.mark.parametrize(("activations", "held"), [("int8", "quantized"), ("bfloat16", "in bfloat16")])
def test_rounded_activations_of_a_checkpoint_without_such_weights_are_an_error(tmp_path, activations, held):
    reference = save(tmp_path, {"": "F16"})
    with pytest.raises(ValueError, match=f"'{activations}', but no weight of this checkpoint is held {held}"):
        set_up_model(settings(reference, "auto", "native", activations))


@needs_library
@pytest.mark.parametrize("fast", [True, False])
def test_bf16_activations_warn_where_they_gain_nothing(tmp_path, monkeypatch, caplog, fast):
    monkeypatch.setattr(activations_module, "products_of_bfloat16", lambda: fast)
    set_up_model(settings(save(tmp_path, {"": "BF16"}), "auto", "native", "bfloat16"))
    assert ("no such products: float is faster" in caplog.text) == (not fast)
