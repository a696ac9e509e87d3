"""Resolves what a user writes as a model to a file or directory."""

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path, PurePosixPath

from jaxinfer.checkpoints.errors import CheckpointError

_HUB = "hf:"
_PACKAGE = "package:"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_FORMS = "a directory, a .gguf file, hf:ORG/NAME[@REVISION], hf:ORG/NAME/FILE.gguf, package:NAME/FILE"


def resolve_reference(reference: str, sha256: str | None = None) -> Path:
    """Finds the local path of a model.

    Args:
        reference: a directory; a ``.gguf`` file; ``hf:ORG/NAME`` (downloaded to the Hugging Face cache if it
            is not there), optionally with ``@REVISION``, or ``hf:ORG/NAME/FILE.gguf``; ``package:NAME/FILE``,
            a data file of an installed distribution or importable package. The code of the package is not
            run.
        sha256: expected digest of the file, in hexadecimal.

    Raises:
        CheckpointError: not found (the message lists where it was looked for), or another digest.
    """
    if reference.startswith(_HUB):
        path = _from_hub(reference)
    elif reference.startswith(_PACKAGE):
        path = _from_package(reference)
    else:
        path = _from_disk(reference)
    if sha256 is not None:
        check_digest(path, sha256)
    return path


def check_digest(path: Path, sha256: str) -> None:
    """Raises CheckpointError unless ``path`` is a file with this SHA-256 digest (hexadecimal, any case)."""
    if not path.is_file():
        raise CheckpointError(f"{path}: a digest can be checked for a single file only, not for a directory")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256.strip().lower():
        raise CheckpointError(f"{path}: the SHA-256 digest is {found}, expected {sha256.strip().lower()}")


def _from_disk(reference: str) -> Path:
    path = Path(reference).expanduser()
    if path.is_dir() or path.is_file():
        # Not resolved: files of the Hugging Face cache are links whose targets have no suffix.
        return path.absolute()
    hint = ""
    if reference.count("/") == 1 and not reference.startswith((".", "/", "~")):
        hint = f"; for a model of the Hugging Face hub write hf:{reference}"
    raise CheckpointError(f"no model at {reference!r}: tried {path.absolute()}{hint}. A model is {_FORMS}")


def _from_hub(reference: str) -> Path:
    name, _, revision = reference.removeprefix(_HUB).partition("@")
    parts = name.split("/")
    if len(parts) < 2 or not all(parts):
        raise CheckpointError(f"{reference!r} is not hf:ORG/NAME[@REVISION] or hf:ORG/NAME/FILE.gguf")
    # Imported here: slow, and most starts do not need it.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository = "/".join(parts[:2])
    try:
        if len(parts) > 2:
            return Path(
                huggingface_hub.hf_hub_download(repository, "/".join(parts[2:]), revision=revision or None)
            )
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=_HUB_PATTERNS
            )
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{reference!r}: not in the local Hugging Face cache, and the hub cannot be reached "
            f"(no network, or HF_HUB_OFFLINE is set): {error}"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"{reference!r}: the Hugging Face hub refused: {error}") from error


def _from_package(reference: str) -> Path:
    name, _, file = reference.removeprefix(_PACKAGE).partition("/")
    wanted = PurePosixPath(file)
    if not name or not file or wanted.is_absolute() or ".." in wanted.parts:
        raise CheckpointError(f"{reference!r} is not package:NAME/FILE")
    tried: list[str] = []
    found = _in_distribution(name, wanted, tried) or _in_import_package(name, wanted, tried)
    if not found:
        raise CheckpointError(f"{reference!r} not found: tried {'; '.join(tried)}. Is the package installed?")
    if len(found) > 1:
        raise CheckpointError(f"{reference!r} is ambiguous: {', '.join(map(str, found))}; give a longer path")
    return found[0].absolute()


def _in_distribution(name: str, wanted: PurePosixPath, tried: list[str]) -> list[Path]:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        tried.append(f"distribution {name!r} (not installed)")
        return []
    files = [file for file in distribution.files or [] if file.parts[-len(wanted.parts) :] == wanted.parts]
    paths = [path for path in (Path(str(distribution.locate_file(file))) for file in files) if path.is_file()]
    if not paths:
        tried.append(f"distribution {name!r} {distribution.version} (lists no such file)")
    return paths


def _in_import_package(name: str, wanted: PurePosixPath, tried: list[str]) -> list[Path]:
    # Looking up a top-level name does not run it; a dotted one would import its parents.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        tried.append(f"import package {name!r} (there is none)")
        return []
    paths = []
    for location in spec.submodule_search_locations:
        tried.append(str(Path(location) / wanted))
        if (Path(location) / wanted).exists():
            paths.append(Path(location) / wanted)
    return paths
