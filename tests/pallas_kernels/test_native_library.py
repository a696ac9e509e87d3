"""The compiled library: the build, and what happens without one."""

import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.native import library
from pallas_kernels.native.compile import (
    SIMD_LEVELS,
    CompileError,
    compile_library,
    ffi_version,
    find_compiler,
    library_name,
)

needs_library = pytest.mark.skipif(not library.available()[0], reason=library.available()[1])
DRIVERS = sorted(Path(__file__).parent.glob("native_*_driver.cc"))


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize(
    ("driver", "sanitizers"),
    [(path, "address,undefined") for path in DRIVERS]
    + [(path, "thread") for path in DRIVERS if "helpers" in path.stem],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_kernels_under_sanitizers(driver: Path, sanitizers: str, tmp_path: Path) -> None:
    """Addresses and undefined behaviour, for every kernel that has a driver; races between the threads that help."""
    program = tmp_path / "driver"
    flags = ("-O1", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    unused = tuple(name for name in SIMD_LEVELS if name != f"v{library.cpu_level()}")
    compile_library(program, Path(jax.ffi.include_dir()), flags, program=driver, plain_levels=unused)
    command = ["setarch", "-R", str(program)] if sanitizers == "thread" else [str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases" in done.stdout


def test_the_library_is_there_where_it_can_be_built() -> None:
    """Or every test of the native kernels would be left out, and nobody would know."""
    try:
        find_compiler()
    except CompileError as error:
        pytest.skip(str(error))
    ok, reason = library.available()
    assert ok or "AVX2" in reason, reason


@needs_library
def test_probe_runs_on_the_pool() -> None:
    def probe(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("jaxinfer_probe", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    assert jax.jit(probe)(jnp.arange(1000, dtype=jnp.int32)).tolist() == list(range(1, 1001))


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(CompileError, match="/bin/false"):
        compile_library(tmp_path / "x.so", tmp_path)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(CompileError, match="cannot be run"):
        compile_library(tmp_path / "x.so", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_processors_are_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(CompileError, match="aarch64"):
        find_compiler()


def test_a_missing_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "DIRECTORY", tmp_path)
    ok, reason = library._load.__wrapped__()
    assert not ok
    assert "not built" in reason
    own = ffi_version(Path(jax.ffi.include_dir()))
    (tmp_path / library_name((own[0], own[1] + 1))).write_bytes(
        b"for a newer XLA, which this one must not load"
    )
    ok, reason = library._load.__wrapped__()
    assert "not built" in reason
    (tmp_path / library_name((own[0], own[1] - 1))).write_bytes(b"not a library")
    ok, reason = library._load.__wrapped__()
    assert not ok
    assert "does not load" in reason
