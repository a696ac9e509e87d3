"""The dashboard in a headless Chromium."""

import re
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.browser import ENTER, MISSING, Browser, browser
from tests.support.servers import Server, running_server
from tests.support.talker import ANSWER, FAIL, GO_ON, put_load, talker

pytestmark = [
    pytest.mark.feature("http", "dashboard"),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(talker()) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def page(chromium, server) -> Browser:
    chromium.emulate(1440, 900)
    chromium.open("about:blank")
    chromium.console()
    chromium.requests()
    chromium.open(f"{server.url}/dashboard")
    return chromium


PAINTED = """[...document.querySelectorAll("canvas")].map((canvas) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(data.buffer)).size;
})"""
"""Different colours on each canvas."""


def test_page_draws_without_errors_or_outside_requests(page, server):
    put_load(server)
    page.wait("page.rows.some((row) => row.output_rate > 0) && page.state.steps.length > 0")
    page.wait("page.rows[page.rows.length - 1].itl_p50 !== null")
    colours = page.run(f"draw(); return {PAINTED}")
    assert len(colours) == 9
    assert min(colours) >= 3
    assert re.fullmatch(r"[\d.]+ %", page.text("#tile-kv").replace("%", " %"))
    for tile in ("output", "running", "ttft", "itl", "step", "finished"):
        assert re.search(r"\d", page.text(f"#tile-{tile}"))
    assert page.text("#status") in ("Ready", "Serving")
    assert page.console() == []
    asked = [url for url in page.requests() if not url.startswith("data:")]
    assert asked
    assert all(url.startswith(f"{server.url}/dashboard") for url in asked)


WATCH_CHAT = """
window.seen = [];
const answer = () => document.querySelector(".assistant .content")?.textContent ?? "";
const note = () => window.seen.push([answer().length, byId("chat-send").textContent]);
new MutationObserver(note).observe(byId("chat-messages"), { childList: true, subtree: true });
"""
"""Notes how the answer grows, and what the button says meanwhile."""


def test_chat_streams_an_answer(page):
    page.wait("page.state")
    page.run(WATCH_CHAT)
    page.type("#chat-input", f"What?{ENTER}")
    page.wait("chat.history.length === 2 && byId('chat-send').textContent === 'Send'")
    lengths, buttons = zip(*page.run("return seen"))
    assert len(set(lengths)) > 5, "the answer came as a whole"
    assert sorted(lengths) == list(lengths)
    assert "Stop" in buttons
    assert page.text(".assistant .content") == ANSWER
    readout = page.text("#chat-readout")
    assert re.fullmatch(r"TTFT [\d.]+ ms · [\d.,]+ tokens/s · \d+ tokens · prompt \d+ · stop", readout)
    assert abs(int(re.findall(r"(\d+) tokens", readout)[-1]) - len(ANSWER)) <= 1
    page.type("#chat-input", f"Again?{ENTER}")
    page.wait(
        "document.querySelectorAll('.assistant').length === 2 && byId('chat-send').textContent === 'Send'"
    )
    assert page.run("return chat.history.map((m) => m.role)") == ["user", "assistant", "user", "assistant"]
    assert page.console() == []


def test_chat_is_stopped(page, server):
    page.wait("page.state")
    page.run("byId('chat-max').value = 500")
    page.type("#chat-input", f"{GO_ON}{ENTER}")
    page.wait("document.querySelector('.assistant .content')?.textContent.length > 5")
    page.click("#chat-send")
    page.wait("byId('chat-readout').textContent.endsWith('stopped')")
    page.wait("page.state.finished.abort > 0")
    assert server.call(server.engine_client.snapshot).running == 0
    assert page.text("#chat-send") == "Send"


def test_chat_shows_errors(page):
    page.wait("page.state")
    page.run("byId('chat-temperature').value = 2; chat.model = 'unknown'")
    page.type("#chat-input", f"hi{ENTER}")
    message = page.wait("document.querySelector('.message.error')?.textContent")
    assert "unknown" in message
    page.click("#chat-clear")
    assert page.run("return document.querySelectorAll('.message').length") == 0


POINT = """
const box = arguments[0].getBoundingClientRect();
const at = { clientX: box.left + arguments[1] * box.width, clientY: box.top + 4, bubbles: true };
arguments[0].dispatchEvent(new PointerEvent("pointermove", at));
"""


def point(page: Browser, selector: str, across: float) -> None:
    """Moves the pointer to a place near the upper edge of an element; ``across`` from 0 (left) to 1."""
    page.run(f"(function () {{ {POINT} }})(document.querySelector({selector!r}), {across})")


def test_pointing_tells_values(page, server):
    put_load(server)
    page.wait("page.rows.length > 2 && page.state.steps.length > 0")
    assert page.text("#blocks-readout") == "255 blocks of 4 tokens"
    point(page, "#blocks", 0.002)
    assert re.fullmatch("Block 1: (free|held by|shared by).*", page.text("#blocks-readout"))
    assert page.text("#steps-readout").startswith("Newest step ")
    point(page, "#steps", 0.98)
    kinds = r"\d+ decode \+ \d+ prefill \+ \d+ padding tokens"
    described = rf"Step [\d,]+ · .* · \d+ sequences? · {kinds} · device .* · host .*"
    assert re.match(described, page.text("#steps-readout"))
    point(page, "#charts-load canvas", 0.9)
    assert page.run("return page.hover !== null")
    page.click('#range button[data-seconds="60"]')
    assert page.run("return page.seconds") == 60


def test_polling_rests_while_the_page_is_hidden(page):
    page.wait("page.rows.length > 1")
    hide = "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }});"
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    page.run(hide.format("true") + tell)
    time.sleep(1.3)
    page.requests()
    time.sleep(1.5)
    assert page.requests() == []
    page.run(hide.format("false") + tell)
    page.wait("page.state.now > page.rows[0].time")
    time.sleep(0.5)
    assert page.requests()


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_layout_fits_and_does_not_jump(page, server, width):
    boxes = "[...document.querySelectorAll('.card, .tile')].map((card) => card.getBoundingClientRect())"
    places = f"{boxes}.map((box) => Math.round(box.top + scrollY))"
    page.emulate(width, 900, "dark")
    before = page.run(f"return {places}")
    page.wait("page.rows.length > 1")
    put_load(server)
    page.wait("page.rows[page.rows.length - 1].itl_p50 !== null")
    assert page.run(f"return {places}") == before
    assert page.run("return document.documentElement.scrollWidth") <= width


def test_dark_and_light_differ_and_are_readable(page):
    page.wait("page.state")
    grounds = []
    for scheme in ("light", "dark"):
        page.emulate(1200, 900, scheme)
        assert page.screenshot().startswith(b"\x89PNG")
        colours = page.run(
            "const s = getComputedStyle(document.querySelector('.tile'));"
            "const m = getComputedStyle(document.querySelector('.sub'));"
            "return [s.backgroundColor, s.color, m.color]"
        )
        ground, text, muted = (luminance(colour) for colour in colours)
        grounds.append(ground)
        assert contrast(ground, text) > 7
        assert contrast(ground, muted) > 4.5
    assert grounds[0] > 0.8
    assert grounds[1] < 0.05


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


def test_a_server_without_traffic_says_so(chromium):
    with running_server(talker(chat=False)) as fresh:
        chromium.emulate(1440, 900)
        chromium.open(f"{fresh.url}/dashboard")
        chromium.wait("page.rows.length > 1")
        shown = chromium.run(
            "return [...document.querySelectorAll('.empty')].filter((e) => !e.hidden).length"
        )
        assert shown == 8
        assert chromium.text("#tile-ttft") == "–"
        assert chromium.text("#chat-title") == "Completion"
        chromium.type("#chat-input", f"Once{ENTER}")
        chromium.wait("byId('chat-send').textContent === 'Send' && chat.history.length === 2")
        assert chromium.text(".assistant .content") == ANSWER


def test_api_key_is_asked_for_and_kept_in_memory_only(chromium):
    with running_server(talker(), api_keys=("secret-key",)) as locked:
        chromium.open(f"{locked.url}/dashboard")
        chromium.wait("byId('lock').open")
        assert chromium.text("#status") == "Locked"
        chromium.type("#lock-key", f"wrong{ENTER}")
        chromium.wait("byId('lock-text').textContent.includes('did not accept')")
        chromium.wait("byId('lock').open")
        chromium.type("#lock-key", f"secret-key{ENTER}")
        chromium.wait("page.state !== null && !byId('lock').open")
        chromium.type("#chat-input", f"What?{ENTER}")
        chromium.wait("chat.history.length === 2")
        assert (
            chromium.run("return localStorage.length + sessionStorage.length + document.cookie.length") == 0
        )
        assert "secret-key" not in chromium.run("return document.documentElement.outerHTML")


def test_a_dead_engine_is_shown(chromium):
    with running_server(talker()) as dying:
        chromium.open(f"{dying.url}/dashboard")
        chromium.wait("page.state")
        chromium.type("#chat-input", f"{FAIL}{ENTER}")
        chromium.wait("byId('status').textContent === 'Engine dead'")
        assert "the device is lost" in chromium.text("#toast")
        assert chromium.wait("document.querySelector('.message.error')?.textContent")
        assert chromium.run("return byId('toast').hidden") is False


def test_a_lost_server_is_shown_and_found_again(chromium):
    with running_server(talker()) as server:
        chromium.open(f"{server.url}/dashboard")
        chromium.wait("page.state")
        chromium.run(
            "window.honest = window.fetch; window.fetch = () => Promise.reject(new Error('refused'))"
        )
        chromium.wait("byId('status').textContent === 'No connection'")
        assert "refused" in chromium.text("#toast")
        chromium.run("window.fetch = window.honest")
        chromium.wait("byId('status').textContent === 'Ready'")
        assert chromium.run("return byId('toast').hidden") is True
