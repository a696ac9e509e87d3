"""The choice of backends."""

import logging
import subprocess
import sys

import pytest

from pallas_kernels.linear import native as linear_native
from pallas_kernels.linear import xla as linear_xla
from pallas_kernels.linear import xla_cpu
from pallas_kernels.mla_attention import xla as mla_attention_xla
from pallas_kernels.native import library
from pallas_kernels.preferred import Preferred
from pallas_kernels.ragged_paged_attention import native as attention_native
from pallas_kernels.ragged_paged_attention import xla as attention_xla
from pallas_kernels.rope_kv_write import native as rope_kv_write_native
from pallas_kernels.rope_kv_write import reference, triton, xla
from pallas_kernels.select import select_ops


def test_cpu_gets_the_native_library_if_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ops = select_ops("auto", "cpu", strict=True)
    usable, why = library.available()
    assert ops.linear is (linear_native.linear if usable else xla_cpu.linear)
    assert ops.attention is (attention_native if usable else attention_xla).ragged_paged_attention
    assert ops.rope_kv_write is (rope_kv_write_native if usable else xla).rope_kv_write
    assert bool(ops.packed_formats) == usable
    assert ops.platform == "cpu"
    assert ("native (automatic choice" if usable else why) in caplog.text


def test_without_the_native_library_the_cpu_formulations_serve(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "available", lambda: (False, "there is no compiler"))
    with caplog.at_level(logging.INFO):
        ops = select_ops("auto", "cpu", strict=True)
    assert ops.linear is xla_cpu.linear
    assert ops.rope_kv_write is xla.rope_kv_write
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "there is no compiler" in caplog.text
    assert select_ops("native", "cpu", strict=False) == select_ops("xla", "cpu", strict=True) == ops
    with pytest.raises(RuntimeError, match="there is no compiler, and strict forbids"):
        select_ops("native", "cpu", strict=True)
    with pytest.raises(RuntimeError, match="native needs a CPU"):
        select_ops("native", "gpu", strict=False, generation="ampere")


def test_a_start_on_a_cpu_does_not_import_the_languages_of_gpus() -> None:
    code = (
        "import sys, jaxinfer.engine.build; from pallas_kernels.select import select_ops; "
        "select_ops('auto', 'cpu', True); print([m for m in sys.modules if m.startswith('jax.experimental.pallas')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_reference_only_when_asked() -> None:
    assert select_ops("reference", "cpu", strict=True).rope_kv_write is reference.rope_kv_write


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_gpu_gets_triton_kernels_and_the_choice_is_told_once(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ops = select_ops(backend, "gpu", strict=True, generation="ampere")
    for op in (ops.attention, ops.rope_kv_write, ops.grouped_matmul):
        assert isinstance(op, Preferred)
        assert (op.backend, op.generation, op.strict, op.interpret) == ("triton", "ampere", True, False)
    assert ops.rope_kv_write.kernel is triton.rope_kv_write
    assert ops.platform == "gpu"
    assert len(caplog.records) == 1
    assert "triton" in caplog.text
    assert "ampere" in caplog.text


def test_equal_choices_are_equal_so_that_engines_share_compiled_programs() -> None:
    assert select_ops("auto", "gpu", True, "hopper") == select_ops("triton", "gpu", True, "hopper")
    assert hash(select_ops("auto", "gpu", True, "hopper")) == hash(select_ops("auto", "gpu", True, "hopper"))


def test_triton_on_a_cpu_is_interpreted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ops = select_ops("triton", "cpu", strict=True)
    assert isinstance(ops.attention, Preferred)
    assert ops.attention.interpret
    assert ops.platform == "gpu", "kernels take pools as a GPU holds them"
    assert "slow" in caplog.text


def test_mosaic_is_triton_with_its_own_attention() -> None:
    ops, plain = (
        select_ops(backend, "gpu", strict=True, generation="hopper") for backend in ("mosaic", "triton")
    )
    assert isinstance(ops.attention, Preferred)
    assert (ops.attention.backend, ops.attention.fallback) == ("mosaic", plain.attention)
    assert ops.rope_kv_write == plain.rope_kv_write
    with pytest.raises(RuntimeError, match="mosaic needs a GPU"):
        select_ops("mosaic", "cpu", strict=False)


@pytest.mark.parametrize("backend", ["auto", "triton", "mosaic"])
def test_fallback_is_a_warning_and_under_strict_an_error(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_ops(backend, "gpu", strict=False).linear is linear_xla.linear
    assert "no kernels for this device" in caplog.text
    with pytest.raises(RuntimeError, match="strict forbids"):
        select_ops(backend, "gpu", strict=True)
    assert select_ops("xla", "gpu", strict=True).linear is linear_xla.linear


def test_shares_of_a_context_are_not_native(caplog: pytest.LogCaptureFixture) -> None:
    if select_ops("auto", "cpu", strict=True).attention is not attention_native.ragged_paged_attention:
        pytest.skip("the native library is not built")
    with caplog.at_level(logging.WARNING):
        ops = select_ops("auto", "cpu", strict=False, shared_slots=True)
    assert ops.attention_share is attention_xla.ragged_paged_attention_share
    assert "xla for attention" in caplog.text
    with pytest.raises(RuntimeError, match=r"parallel\.context.*strict forbids"):
        select_ops("native", "cpu", strict=True, shared_slots=True)
    assert select_ops("xla", "cpu", strict=True, shared_slots=True) == select_ops("xla", "cpu", strict=True)


def test_latent_shares_on_a_gpu_are_told_when_they_are_called() -> None:
    loose, strict = (select_ops("triton", "gpu", s, "hopper", shared_slots=True) for s in (False, True))
    assert isinstance(loose.mla_attention_share, Preferred)
    assert loose.mla_attention_share.fallback is mla_attention_xla.mla_attention_share
    with pytest.raises(RuntimeError, match="has no kernel; strict forbids"):
        strict.mla_attention_share()


def test_unknown_backend_names_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="auto, xla, native, triton, mosaic, reference"):
        select_ops("cuda", "gpu", strict=False)
