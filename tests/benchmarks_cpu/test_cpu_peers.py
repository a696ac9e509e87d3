"""The comparison with other engines measures; what it measures is not asked here."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks are scripts and find each other beside themselves."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_smoke(tmp_path):
    plot = tmp_path / "x.png"
    script = ROOT / "benchmarks" / "cpu_peers.py"
    command = [sys.executable, str(script), "--smoke", "--repetitions", "2", "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "idle 1" in done.stdout.splitlines()[-3]
    assert plot.stat().st_size > 1000
    record = json.loads(plot.with_suffix(".json").read_text())
    assert set(record["rates"]) == {"idle 1", "idle 2"}
    assert all(len(r) == 2 for rates in record["rates"].values() for r in rates.values())
    assert min(record["limits"].values()) > 1e6


class Chat(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"usage": {"completion_tokens": body["max_tokens"]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.usefixtures("benchmarks")
def test_load_over_http():
    from cpu_peers_http import cell, run_load

    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        load = run_load(f"http://127.0.0.1:{server.server_port}", "m", 3, 7, 5, seed=0)
    finally:
        server.shutdown()
        server.server_close()
    assert len(load.latencies) == 7
    assert 0 < load.percentile(0) <= load.percentile(0.5) <= load.percentile(1)
    assert cell([load]).startswith(f"{load.rate:.0f} (")
    assert cell([]) == "-"


@pytest.mark.usefixtures("benchmarks")
def test_shares_of_the_limits():
    from cpu_limits import Limits
    from cpu_peers import shares

    limits = Limits(read=1e9, products=1e12)
    found = shares({"single stream": [4.0, 5.0, 9.0], "prefill 1024": [1000.0]}, 10**8, 10**8, limits)
    assert found == pytest.approx({"decode": 0.5, "prefill": 0.2})
    assert shares({"single stream": []}, 1, 1, limits) == {}
