"""Cache of tokenizers that were built from another format, so that a second start only reads a
tokenizer.json.
"""

import json
import logging
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

_FORMAT = 1  # part of the key: raise it when a change of the builders changes what they build
_LOG = logging.getLogger(__name__)


def cache_root() -> Path:
    """Directory of all caches: ``JAXINFER_CACHE_DIR``, or ``~/.cache/jaxinfer``."""
    return Path(os.environ.get("JAXINFER_CACHE_DIR") or Path.home() / ".cache" / "jaxinfer")


def entry_directory(source: Path) -> Path:
    """Where the tokenizer built from ``source`` is kept; another path, size or time of change is another
    entry.
    """
    status = source.stat()
    key = json.dumps([_FORMAT, str(source.resolve()), status.st_size, status.st_mtime_ns])
    return cache_root() / "tokenizers" / blake2b(key.encode(), digest_size=16).hexdigest()


def read_entry(directory: Path) -> tuple[Backend, dict[str, Any]] | None:
    """A cached tokenizer and its extra data, or None if there is none that can be read."""
    try:
        extra = json.loads((directory / "extra.json").read_text(encoding="utf-8"))
        return Backend.from_file(str(directory / "tokenizer.json")), extra
    except FileNotFoundError:
        return None
    except Exception as error:  # the tokenizers package raises bare Exception for a damaged file
        _LOG.warning("cached tokenizer %s is not readable (%s); it is built again", directory, error)
        return None


def write_entry(directory: Path, backend: Backend, extra: dict[str, Any]) -> None:
    """Caches a tokenizer. A place that cannot be written costs time at the next start, and is only logged."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace_file(directory / "tokenizer.json", backend.to_str())
        _replace_file(directory / "extra.json", json.dumps(extra))  # last: it marks the entry as complete
    except OSError as error:
        _LOG.warning("tokenizer not cached in %s: %s", directory, error)


def _replace_file(path: Path, text: str) -> None:
    """Writes by renaming, so that a reader, or a second writer, never sees half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
