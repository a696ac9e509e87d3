import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.loader import load_params
from jaxinfer.checkpoints.safetensors_source import SafetensorsSource
from jaxinfer.checkpoints.tensor_source import CHUNK_ELEMENTS
from jaxinfer.checkpoints.weight_map import Source, WeightMap, concat, stack, tensor

REPOSITORY = Path(__file__).parents[2]


def shapes_of(dtype=jnp.float32, **shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def source_of(folder: Path, **tensors: np.ndarray) -> SafetensorsSource:
    save_file(tensors, folder / "weights.safetensors")
    return SafetensorsSource(folder / "weights.safetensors")


def load(shapes, weight_map: WeightMap, source, **options) -> dict[str, np.ndarray]:
    placed = load_params(shapes, weight_map, source, lambda _, array: jnp.asarray(array), **options)
    return {name: np.asarray(array) for name, array in placed.items()}


def random(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def test_joins_stacks_adds_and_fills(tmp_path):
    tensors = {name: random(2 + i, 3) for i, name in enumerate(("q", "k", "v"))}
    experts = {f"e{i}.{name}": random(4, 3) + i for i in range(3) for name in ("gate", "up")}
    source = source_of(tmp_path, **tensors, **experts, norm=random(5), scalar=np.array(3.0, np.float32))
    weight_map = {
        "qkv": concat("q", "k", "v"),
        "experts": stack([(f"e{i}.gate", f"e{i}.up") for i in range(3)]),
        "norm": tensor("norm", add=1.0),
        "scalar": tensor("scalar"),
        "bias": Source((("b1", "b2"),), optional=True, fill=2.0),
    }
    shapes = shapes_of(qkv=(9, 3), experts=(3, 8, 3), norm=(5,), scalar=(), bias=(4,))
    params = load(shapes, weight_map, source)
    np.testing.assert_array_equal(params["qkv"], np.concatenate(list(tensors.values())))
    expected = np.stack([np.concatenate([experts[f"e{i}.gate"], experts[f"e{i}.up"]]) for i in range(3)])
    np.testing.assert_array_equal(params["experts"], expected)
    np.testing.assert_array_equal(params["norm"], random(5) + 1)
    assert params["scalar"] == 3.0
    np.testing.assert_array_equal(params["bias"], np.full(4, 2.0))


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_casts_round_to_nearest(tmp_path, stored, wanted):
    stored_dtype, wanted_dtype = (np.dtype(getattr(ml_dtypes, n, n)) for n in (stored, wanted))
    values = random(70, 50).astype(stored_dtype)
    params = load(shapes_of(wanted_dtype, w=(70, 50)), {"w": tensor("w")}, source_of(tmp_path, w=values))
    assert params["w"].dtype == wanted_dtype
    np.testing.assert_array_equal(params["w"], values.astype(wanted_dtype))


def test_add_is_in_float32_before_the_cast(tmp_path):
    values = np.full(4, 2.0**-9, ml_dtypes.bfloat16)
    params = load(shapes_of(w=(4,)), {"w": tensor("w", add=1.0)}, source_of(tmp_path, w=values))
    np.testing.assert_array_equal(params["w"], np.full(4, 1 + 2.0**-9, np.float32))


def test_tensors_of_several_blocks(tmp_path):
    rows = 3 * CHUNK_ELEMENTS // 1024 + 5
    values = random(rows, 1024)
    shapes = shapes_of(w=(2 * rows, 1024))
    params = load(shapes, {"w": concat("a", "b")}, source_of(tmp_path, a=values, b=-values))
    np.testing.assert_array_equal(params["w"], np.concatenate([values, -values]))


def test_all_problems_are_reported_before_anything_is_placed(tmp_path):
    source = source_of(
        tmp_path,
        narrow=random(4, 3),
        a=random(4, 3),
        b=random(4, 5),
        ints=np.zeros((2, 2), np.int8),
        surplus=random(2),
    )
    weight_map = {
        "missing": tensor("not.there"),
        "narrow": tensor("narrow"),
        "joined": concat("a", "b"),
        "ints": tensor("ints"),
        "no_parameter": tensor("narrow"),
    }
    shapes = shapes_of(missing=(2,), narrow=(4, 4), joined=(8, 3), ints=(2, 2), unmapped=(2,))

    def place(path: str, array: np.ndarray) -> jax.Array:
        raise AssertionError(f"{path} was placed")

    with pytest.raises(CheckpointError) as error:
        load_params(shapes, weight_map, source, place)
    text = str(error.value)
    for part in (
        "7 problems",
        "'not.there' is missing in",
        "parameter 'narrow' has shape [4, 4]",
        "parameter 'joined'",
        "'ints' in",
        "stored as I8",
        "'no_parameter'",
        "'unmapped' has no source",
        "'surplus' in",
        "weights.safetensors",
    ):
        assert part in text


def test_an_optional_parameter_must_be_absent_as_a_whole(tmp_path):
    weight_map = {"bias": Source((("b1", "b2"),), optional=True)}
    with pytest.raises(CheckpointError, match="'b2' is missing"):
        load(shapes_of(bias=(4,)), weight_map, source_of(tmp_path, b1=random(2)))


def test_useless_tensors_are_skipped(tmp_path):
    useless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": random(4),
        "vision_tower.patch.weight": random(4, 4),
    }
    load(shapes_of(w=(2,)), {"w": tensor("w")}, source_of(tmp_path, w=random(2), **useless))


def test_lod_08_cast_to_infinity_names_the_tensor(tmp_path):
    big, fine = np.ones((3, 4), ml_dtypes.bfloat16), np.ones((3, 4), ml_dtypes.bfloat16)
    big[1, 2] = 1e5
    source = source_of(tmp_path, big=big, fine=fine)
    weight_map = {"w": concat("fine", "big")}
    with pytest.raises(
        CheckpointError,
        match=r"'big' in .*weights.safetensors: values up to 9.984e\+04 become infinite in float16",
    ) as e:
        load(shapes_of(jnp.float16, w=(6, 4)), weight_map, source)
    assert "'fine'" not in str(e.value)
    load(shapes_of(jnp.bfloat16, w=(6, 4)), weight_map, source)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_non_finite_values_are_all_reported(tmp_path, value, dtype):
    bad = random(5, 6)
    bad[4, 1] = value
    source = source_of(tmp_path, bad1=bad, good=random(5, 6), bad2=bad)
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    shapes = shapes_of(wanted, a=(5, 6), b=(5, 6), c=(5, 6))
    with pytest.raises(CheckpointError, match="2 problems") as error:
        load(shapes, {"a": tensor("bad1"), "b": tensor("good"), "c": tensor("bad2")}, source)
    assert "'bad1' in" in str(error.value)
    assert "'bad2' in" in str(error.value)
    assert "NaN or infinite" in str(error.value)


def test_largest_finite_values_pass(tmp_path):
    values = np.array([65504.0, -65504.0, 6e-8], np.float32)
    params = load(shapes_of(jnp.float16, w=(3,)), {"w": tensor("w")}, source_of(tmp_path, w=values))
    np.testing.assert_array_equal(params["w"], values.astype(np.float16))


def test_progress_counts_parameter_bytes(tmp_path):
    calls: list[tuple[int, int]] = []
    shapes = shapes_of(a=(2, 3), b=(5,))
    source = source_of(tmp_path, a=random(2, 3), b=random(5))
    load(shapes, {"a": tensor("a"), "b": tensor("b")}, source, progress=lambda *call: calls.append(call))
    assert calls == [(24, 44), (44, 44)]


MEMORY_SCRIPT = """
    import sys
    from pathlib import Path
    import jax, jax.numpy as jnp, ml_dtypes, numpy as np
    from jaxinfer.checkpoints.loader import load_params
    from jaxinfer.checkpoints.safetensors_source import SafetensorsSource
    from jaxinfer.checkpoints.weight_map import concat, tensor

    def peak():
        return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

    source = SafetensorsSource(Path(sys.argv[1]))
    shapes = {f"p{i}": jax.ShapeDtypeStruct((4 * 1024, 2048), jnp.bfloat16) for i in range(4)}
    shapes |= {"big": jax.ShapeDtypeStruct((24 * 1024, 2048), jnp.bfloat16)}
    names = {"big": concat("q", "k", "v"), **{f"p{i}": tensor(f"p{i}") for i in range(4)}}
    place = lambda _, array: jax.device_put(array)
    load_params({"x": jax.ShapeDtypeStruct((2,), jnp.float32)}, {"x": tensor("x")}, SafetensorsSource(
        Path(sys.argv[2])), place)
    before = peak()
    params = load_params(shapes, names, source, place)
    weights = sum(a.nbytes for a in params.values())
    print((peak() - before - weights) / params["big"].nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_peak_host_memory(tmp_path):
    """Above the weights themselves, the peak stays below 1.3 times the largest parameter."""
    block = np.ones((8 * 1024, 2048), np.float32)
    tensors = dict.fromkeys(("q", "k", "v"), block) | {f"p{i}": block[: 4 * 1024] for i in range(4)}
    save_file(tensors, tmp_path / "big.safetensors")
    save_file({"x": np.ones(2, np.float32)}, tmp_path / "small.safetensors")
    del tensors, block
    command = [sys.executable, "-c", textwrap.dedent(MEMORY_SCRIPT)]
    paths = [str(tmp_path / "big.safetensors"), str(tmp_path / "small.safetensors")]
    result = subprocess.run(
        [*command, *paths], capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1.3
