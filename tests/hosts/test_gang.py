"""Several processes give what one gives; a process that is lost ends all, and the next gang serves.

Processes of a busy machine start slowly, and each compiles for itself: minutes.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from jaxinfer.config import EngineConfig
from serve.launch import free_ports
from tests.models.tiny_checkpoints import save
from tests.support.serve_process import is_gone
from tests.support.text_models import save_text_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BOUND = 1e-4
NOTICED = 5.0
STARTED = 1500.0
SMALL: dict[str, Any] = {
    "model.dtype": "float32",
    "model.max_model_len": 64,
    "cache.block_size": 4,
    "cache.num_blocks": 28,
    "scheduler.max_num_seqs": 4,
    "scheduler.max_num_batched_tokens": 16,
    "compile.warm_up": "lazy",
    "hosts.lost_after": 60,
}
CACHE = {"compile.cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"]}
"""See ``tests/conftest.py``: programs of an earlier run are read."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_text_model(folder / "llama")
    save("mixtral", folder / "mixtral")
    return {"llama": folder / "llama", "mixtral": folder / "mixtral"}


def run_gang(folder: Path, count: int, model: Path, **values: Any) -> dict[str, Any]:
    """What rank 0 of so many processes writes; all of them end without an error."""
    folder.mkdir()
    config = EngineConfig.load(str(model), {**SMALL, **CACHE, **values})
    (folder / "config.json").write_text(config.model_dump_json(exclude_unset=True))
    arguments = [sys.executable, "-m", "tests.support.gang_rank", str(folder / "config.json")]
    address = f"127.0.0.1:{free_ports(3)}"
    ranks = []
    for rank in range(count):
        where = {"COUNT": count, "RANK": rank, "COORDINATOR": address} if count > 1 else {}
        environment = os.environ | {f"JAXINFER_HOSTS__{name}": str(value) for name, value in where.items()}
        ranks.append(subprocess.Popen([*arguments, str(folder / "results.json")], env=environment))
    try:
        statuses = [rank.wait(STARTED) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert statuses == [0] * count
    return json.loads((folder / "results.json").read_text())


def assert_same(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    for turn, wanted in zip(seen["turns"], expected["turns"], strict=True):
        for output, want in zip(turn, wanted, strict=True):
            for choice, other in zip(output, want, strict=True):
                assert (choice["tokens"], choice["text"]) == (other["tokens"], other["text"])
                assert_close(choice["logprobs"], other["logprobs"])
    assert_close(seen["scores"], expected["scores"])
    assert sum(seen["cached"]) > 0


def assert_close(positions: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for mine, theirs in zip(positions, expected, strict=True):
        both = mine.keys() & theirs.keys()
        assert len(both) >= len(mine) - 1
        for token in both:
            assert abs(mine[token] - theirs[token]) <= BOUND


@pytest.mark.feature(
    "several hosts", "tensor parallel", "chunked prefill", "prefix cache", "preemption", "structured output",
    "seeds", "logprobs",
)  # fmt: skip
def test_two_processes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    alone = run_gang(tmp_path / "one", 1, checkpoints["llama"])
    two = run_gang(tmp_path / "two", 2, checkpoints["llama"], **{"parallel.tensor": 2})
    assert_same(two, alone)
    assert two["preemptions"] > 0


@pytest.mark.feature(
    "several hosts", "tensor parallel", "expert parallel", "chunked prefill", "prefix cache", "seeds", "logprobs",
    "n-gram speculation",
)  # fmt: skip
def test_four_processes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    drafts = {"speculative.drafter": "ngram", "speculative.max_drafts": 3, "speculative.ngram_shortest": 1}
    shared = {"parallel.tensor": 2, "parallel.expert": 2}
    alone = run_gang(tmp_path / "one", 1, checkpoints["mixtral"], **{"model.tokenizer": "none"})
    four = run_gang(
        tmp_path / "four", 4, checkpoints["mixtral"], **{"model.tokenizer": "none"}, **drafts, **shared
    )
    assert_same(four, alone)
    assert four["drafted"] > 0


@dataclass
class Launched:
    """``jaxinfer launch``: how often it has announced its address, and what it wrote."""

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.fullmatch(r"serving \S+ at (http://\S+)\n", line):
                self.urls.append(found[1])

    def url(self, start: int) -> str:
        """The address after so many starts."""
        end = time.monotonic() + STARTED
        while len(self.urls) < start:
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() < end, "".join(self.lines)
            time.sleep(0.1)
        return self.urls[start - 1]

    def complete(self, start: int, **values: Any) -> Any:
        body = {"prompt": "the quick brown fox", "max_tokens": 6, "temperature": 0, **values}
        answer = httpx.post(self.url(start) + "/v1/completions", json=body, timeout=STARTED)
        assert answer.status_code == 200, answer.text + "".join(self.lines)
        return answer.json()["choices"][0]

    def ranks(self) -> list[psutil.Process]:
        """Rank 0 first: they are started in this order."""
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda child: (child.create_time(), child.pid))

    def family(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def said(self, text: str) -> None:
        end = time.monotonic() + 30
        while text not in "".join(self.lines):
            assert time.monotonic() < end, "".join(self.lines)
            time.sleep(0.05)


@contextlib.contextmanager
def launched(model: Path) -> Iterator[Launched]:
    options = SMALL | {
        "model.max_model_len": 512,
        "cache.num_blocks": 400,
        "parallel.tensor": 2,
        "server.port": 0,
        **CACHE,
    }
    arguments = [
        text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "serve.rank", "launch", "--hosts", "2", "--model", str(model), *arguments],
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    gang = Launched(process)
    reader = threading.Thread(target=gang.read, daemon=True)
    reader.start()
    try:
        yield gang
    finally:
        left = []
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait(30)


class Stream(threading.Thread):
    """A stream that is read to its end: its lines, and when it ended."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.text: list[str] = []
        self.ended = 0.0
        self._url = url
        self.start()

    def run(self) -> None:
        body = {"prompt": "it is", "max_tokens": 480, "temperature": 0, "stream": True, "ignore_eos": True}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", self._url + "/v1/completions", json=body, timeout=600) as response,
        ):
            self.text += response.iter_lines()
        self.ended = time.monotonic()


@pytest.mark.feature("several hosts")
def test_lost_processes_and_new_gangs(checkpoints: dict[str, Path]) -> None:
    """A follower is killed under load, then rank 0's server, then rank 0's engine; then all is told to stop."""
    with launched(checkpoints["llama"]) as gang:
        first = gang.complete(1)
        victims = [
            lambda: gang.ranks()[1].pid,
            lambda: gang.ranks()[0].pid,
            lambda: gang.ranks()[0].children()[0].pid,
        ]
        for start, victim in enumerate(victims, start=1):
            url, family, stream = gang.url(start), gang.family(), Stream(gang.url(start))
            assert len(family) == 3
            pid = victim()
            while len(stream.text) < 6:
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            if start != 2:
                await_unhealthy(url, killed + NOTICED)
            stream.join(60)
            assert stream.ended - killed < NOTICED
            assert start == 2 or "error" in "".join(stream.text)
            # Whoever noticed says so to the last client before it goes.
            assert all(is_gone(pid, NOTICED + 10) for pid in family)
            gang.said("rank 1 is lost" if start == 1 else "all processes are replaced")
            assert gang.complete(start + 1) == first
        family = gang.family()
        gang.process.send_signal(signal.SIGTERM)
        assert gang.process.wait(120) == 0
        assert all(is_gone(pid, 10) for pid in family)


def await_unhealthy(url: str, end: float) -> None:
    """503, or nobody answers any more."""
    while time.monotonic() < end:
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 503:
                return
        except httpx.HTTPError:
            return
        time.sleep(0.05)
    raise AssertionError("the server does not notice")


def test_a_rank_that_differs(checkpoints: dict[str, Path]) -> None:
    """Is named by every rank, and nobody waits."""
    address = f"127.0.0.1:{free_ports(3)}"
    ranks = []
    for rank in range(2):
        where = {
            "HOSTS__COUNT": 2,
            "HOSTS__RANK": rank,
            "HOSTS__COORDINATOR": address,
            "CACHE__NUM_BLOCKS": 28 + rank,
        }
        environment = os.environ | {f"JAXINFER_{name}": str(value) for name, value in where.items()}
        command = [sys.executable, "-c", "from serve.cli import main; main()", "serve"]
        options = ["--model", str(checkpoints["llama"]), "--parallel.tensor", "2", "--port", "0"]
        ranks.append(
            subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True)
        )
    said = [rank.communicate(timeout=STARTED)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    for text in said:
        assert "rank 1 differs from rank 0: cache.num_blocks is 29, not 28" in " ".join(text.split())
