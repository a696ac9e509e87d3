import hashlib
import importlib.util
import sys
from pathlib import Path

import pytest

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.references import resolve_reference


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """The distribution ``tiny-model`` (import package ``tiny_model_data``) in a directory on sys.path."""
    site = tmp_path / "site"
    package = site / "tiny_model_data"
    info = site / "tiny_model-1.0.dist-info"
    for folder in (package / "sub", info):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the code of a model package must not run')")
    (package / "weights.gguf").write_bytes(b"GGUF")
    (package / "sub" / "weights.gguf").write_bytes(b"GGUF2")
    (package / "unlisted.gguf").write_bytes(b"GGUF3")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    files = ["__init__.py", "weights.gguf", "sub/weights.gguf", "gone.gguf"]
    (info / "RECORD").write_text("".join(f"tiny_model_data/{file},,\n" for file in files))
    monkeypatch.syspath_prepend(str(site))
    return package


def test_paths(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_reference(str(tmp_path)) == tmp_path
    assert resolve_reference(str(file)) == file


def test_missing_path_says_what_was_tried(tmp_path):
    with pytest.raises(CheckpointError, match=r"tried .*/nothing.gguf"):
        resolve_reference(str(tmp_path / "nothing.gguf"))
    with pytest.raises(CheckpointError, match=r"write hf:some-org/some-name"):
        resolve_reference("some-org/some-name")


def test_digest(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert resolve_reference(str(file), sha256=digest.upper()) == file
    with pytest.raises(CheckpointError, match=f"digest is {digest}, expected {'0' * 64}"):
        resolve_reference(str(file), sha256="0" * 64)
    with pytest.raises(CheckpointError, match="single file"):
        resolve_reference(str(tmp_path), sha256=digest)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("package:tiny-model/tiny_model_data/weights.gguf", "weights.gguf"),
        ("package:tiny_model/sub/weights.gguf", "sub/weights.gguf"),
        ("package:tiny_model_data/unlisted.gguf", "unlisted.gguf"),
        ("package:tiny_model_data/sub", "sub"),
    ],
)
def test_package_files_without_running_the_package(installed, reference, expected):
    assert resolve_reference(reference) == installed / expected
    assert "tiny_model_data" not in sys.modules
    assert importlib.util.find_spec("tiny_model_data") is not None


def test_ambiguous_package_file(installed):
    with pytest.raises(CheckpointError, match="ambiguous"):
        resolve_reference("package:tiny-model/weights.gguf")


def test_missing_package_file_says_what_was_tried(installed):
    with pytest.raises(
        CheckpointError, match=r"'tiny-model' 1.0 \(lists no such file\); import package 'tiny-model'"
    ):
        resolve_reference("package:tiny-model/gone.gguf")
    with pytest.raises(
        CheckpointError, match=r"distribution 'absent' \(not installed\).*Is the package installed"
    ):
        resolve_reference("package:absent/weights.gguf")
    with pytest.raises(CheckpointError, match=r"tried .*tiny_model_data/nothing.gguf"):
        resolve_reference("package:tiny_model_data/nothing.gguf")


@pytest.mark.parametrize(
    "reference", ["package:tiny", "package:/x", "package:a/../b", "package:a//b", "package:"]
)
def test_malformed_package_reference(reference):
    with pytest.raises(CheckpointError, match="is not package:NAME/FILE"):
        resolve_reference(reference)


@pytest.mark.parametrize("reference", ["hf:name", "hf:", "hf:org/", "hf:/name"])
def test_malformed_hub_reference(reference):
    with pytest.raises(CheckpointError, match="is not hf:ORG/NAME"):
        resolve_reference(reference)


def hub_cache(folder: Path, *files: str) -> Path:
    """Fills a Hugging Face cache with a snapshot of ``org/name``."""
    repository = folder / "models--org--name"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def test_hub_without_network(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"hf:org/name.*cannot be reached.*HF_HUB_OFFLINE"):
        resolve_reference("hf:org/name")
    with pytest.raises(CheckpointError, match=r"hf:org/name/m.gguf.*cannot be reached"):
        resolve_reference("hf:org/name/m.gguf")


def test_hub_cache_serves_without_network(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    snapshot = hub_cache(tmp_path, "config.json", "m.gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve_reference("hf:org/name/m.gguf") == snapshot / "m.gguf"
    assert resolve_reference("hf:org/name") == snapshot
    assert resolve_reference("hf:org/name@main") == snapshot
