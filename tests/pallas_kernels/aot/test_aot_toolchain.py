"""What is missing is named, with what to install."""

import pytest

from pallas_kernels.aot import toolchain


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"jax": "0.11.2"}

    def version(name: str) -> str:
        if name not in found:
            raise toolchain.importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(toolchain.importlib.metadata, "version", version)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/usr/bin/{name}")
    return found


def test_nothing_is_missing(versions: dict[str, str]) -> None:
    versions["jax-cuda13-plugin"] = "0.11.2"
    assert toolchain.missing() is None
    assert toolchain.ptxas() == "/usr/bin/ptxas"


def test_no_plugin(versions: dict[str, str]) -> None:
    assert "pip install jax-cuda13-plugin==0.11.2" in (toolchain.missing() or "")


def test_plugin_of_another_version(versions: dict[str, str]) -> None:
    versions["jax-cuda13-plugin"] = "0.10.2"
    message = toolchain.missing() or ""
    assert "jax-cuda13-plugin 0.10.2 does not belong to jax 0.11.2" in message
    assert "pip install jax-cuda13-plugin==0.11.2" in message


def test_no_assembler(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    versions["jax-cuda13-plugin"] = "0.11.2"
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert "pip install nvidia-cuda-nvcc nvidia-nvvm" in (toolchain.missing() or "")
    with pytest.raises(FileNotFoundError, match="install a CUDA toolkit"):
        toolchain.ptxas()
