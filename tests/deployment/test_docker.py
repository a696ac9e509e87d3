"""The Dockerfiles copy what exists, and run commands that exist, as somebody who is not root. Nothing is built here."""

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.deployment.serve_arguments import serve_options

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs/docker").glob("*.Dockerfile"))
Instruction = tuple[str, str]


def instructions(path: Path) -> list[Instruction]:
    """Keyword and arguments of each instruction, lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


def arguments(path: Path, keyword: str) -> list[str]:
    return [text for name, text in instructions(path) if name == keyword]


def ignored(path: Path, name: str) -> bool:
    """Whether the file beside the Dockerfile keeps a path out of the build: the last rule that fits counts."""
    result = False
    for rule in (path.parent / f"{path.name}.dockerignore").read_text().split("\n"):
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!").removeprefix("**/")
        parts = name.split("/")
        tops = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if any(fnmatch.fnmatch(top, pattern) for top in (tops if "**/" not in rule else parts)):
            result = not rule.startswith("!")
    return result


def test_there_is_one_for_each_platform() -> None:
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
class TestDockerfile:
    def test_bases_are_pinned(self, path: Path) -> None:
        bases = {text.split()[0] for text in arguments(path, "FROM")}
        assert len(bases) == 1  # a virtual environment works with the interpreter that it was made by
        assert re.search(r":\d+\.\d+\.\d+-", bases.pop())

    def test_what_is_copied_exists_and_is_not_ignored(self, path: Path) -> None:
        copied = [text.split()[:-1] for text in arguments(path, "COPY") if not text.startswith("--from")]
        sources = [source for group in copied for source in group]
        packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
        wanted = {pattern.removesuffix("*") for pattern in packages["packages"]["find"]["include"]}
        assert set(sources) == wanted | {"pyproject.toml", "setup.py", "README.md"}
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not ignored(path, source), source

    def test_nothing_else_gets_into_the_build(self, path: Path) -> None:
        kept_out = (
            ".git",
            ".venv/bin/python",
            "tests/conftest.py",
            "docs/parallel.md",
            "heads/a.safetensors",
        )
        weights = ("jaxinfer/model.gguf", "serve/model.safetensors", "jaxinfer/__pycache__/a.pyc")
        for name in (*kept_out, *weights, "pallas_kernels/native/old.so"):
            assert ignored(path, name), name
        for name in (
            "jaxinfer/planning/models.json",
            "pallas_kernels/native/src/linear.cc",
            "serve/dashboard/page.css",
        ):
            assert (ROOT / name).is_file()
            assert not ignored(path, name), name

    def test_extras_exist(self, path: Path) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        (installed,) = [
            re.search(r"\.\[([^\]]+)\]", text) for text in arguments(path, "RUN") if "pip install" in text
        ]
        assert installed is not None
        assert set(installed[1].split(",")) <= set(extras)

    def test_it_serves_as_somebody_else_than_root(self, path: Path) -> None:
        (user,) = arguments(path, "USER")
        assert user == "10001:10001"
        assert f"--uid {user.split(':')[0]}" in " ".join(arguments(path, "RUN"))
        (entry,), (command,) = arguments(path, "ENTRYPOINT"), arguments(path, "CMD")[-1:]
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        assert json.loads(entry) == ["jaxinfer"]
        assert "jaxinfer" in scripts
        options = serve_options(json.loads(command))
        assert (options["host"], str(options["port"])) == ("0.0.0.0", arguments(path, "EXPOSE")[0])
        (check,) = arguments(path, "HEALTHCHECK")
        assert f"http://127.0.0.1:{options['port']}/health" in check

    def test_compiled_programs_and_weights_lie_on_the_volume(self, path: Path) -> None:
        (volume,) = arguments(path, "VOLUME")
        settings = dict(re.findall(r"(\w+)=(\S+)", " ".join(arguments(path, "ENV"))))
        assert settings["JAXINFER_COMPILE__CACHE_DIR"].startswith(f"{volume}/")
        assert settings["HF_HOME"].startswith(f"{volume}/")
