"""The launcher: what it starts, replaces, and gives up. The processes are scripts of a few milliseconds."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from serve.launch import WRONG, Launcher, free_ports

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["JAXINFER_HOSTS__RANK"])
start = len(list(folder.glob(f"{rank}-*")))
names = ("COUNT", "RANK", "COORDINATOR", "LAUNCHER")
(folder / f"{rank}-{start}").write_text(" ".join(os.environ[f"JAXINFER_HOSTS__{name}"] for name in names))
"""


class Gang:
    """Args:
    then: what a rank does, knowing ``rank`` and ``start``, the number of starts before.
    """

    def __init__(self, folder: Path, then: str, restarts: int = 3) -> None:
        self.folder = folder
        self.slept: list[float] = []
        command = (sys.executable, "-S", "-c", SCRIPT + then)
        self.launcher = Launcher(2, restarts, [str(folder)], command)

    def run(self) -> int:
        return self.launcher.run(self.slept.append)

    def starts(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def test_ranks_know_who_they_are(tmp_path: Path) -> None:
    gang = Gang(tmp_path, "")
    assert gang.run() == 0
    said = [(tmp_path / name).read_text().split() for name in gang.starts()]
    assert [(count, rank, launcher) for count, rank, _, launcher in said] == [
        ("2", "0", "none"),
        ("2", "1", "none"),
    ]
    assert len({address for _, _, address, _ in said}) == 1
    assert said[0][2].startswith("127.0.0.1:")


def test_all_are_replaced_if_one_fails(tmp_path: Path) -> None:
    gang = Gang(tmp_path, "sys.exit(0 if start == 2 else 1 if rank else time.sleep(0.2))")
    assert gang.run() == 0
    assert gang.starts() == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert gang.slept == [0.5, 1.0]


def test_it_gives_up(tmp_path: Path) -> None:
    gang = Gang(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", restarts=2)
    assert gang.run() == 128 + signal.SIGKILL
    assert len(gang.starts()) == 6


def test_a_signal_that_comes_before_the_processes_reaches_them(tmp_path: Path) -> None:
    gang = Gang(tmp_path, "time.sleep(0.1 if rank else 600)")
    gang.launcher.on_signal(signal.SIGTERM)
    assert gang.run() == 128 + signal.SIGTERM
    assert not gang.slept


def test_what_is_wrong_is_not_tried_again(tmp_path: Path) -> None:
    gang = Gang(tmp_path, f"sys.exit({WRONG} if rank else 1)")
    assert gang.run() == WRONG
    assert not gang.slept


def test_a_rank_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.launch._GRACE", 0.2)
    gang = Gang(tmp_path, "sys.exit(1) if rank else time.sleep(600)", restarts=0)
    started = time.monotonic()
    assert gang.run() == 128 + signal.SIGKILL
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("signals", [1, 2])
def test_signals_go_to_rank_0_and_then_to_all(tmp_path: Path, signals: int) -> None:
    """Rank 0 ends with the first one, if it is not stubborn; the other rank ends after it."""
    then = """
signal.signal(signal.SIGTERM, lambda *_: (folder / "ended").touch() or (STUBBORN or sys.exit(3)))
(folder / f"ready-{rank}").touch()
while rank == 0 or not (folder / "ended").exists() or STUBBORN:
    time.sleep(0.01)
""".replace("STUBBORN", str(signals > 1))
    gang = Gang(tmp_path, then)
    statuses: list[int] = []
    running = threading.Thread(target=lambda: statuses.append(gang.run()))
    running.start()
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    for _ in range(signals):
        gang.launcher.on_signal(signal.SIGTERM)
        time.sleep(0.1)
    running.join(60)
    assert statuses == [3 if signals == 1 else 128 + signal.SIGKILL]


def test_free_ports_follow_each_other() -> None:
    first = free_ports(3)
    assert 0 < first < 65533
