"""The page as one document: style and scripts of this folder take the place of their tags."""

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_STYLE = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">')
_SCRIPT = re.compile(r'<script src="(\w+\.js)"></script>')


@dataclass(frozen=True)
class Page:
    """Attributes:
    html: needs nothing else.
    policy: its ``Content-Security-Policy``: the browser refuses everything but the page's own style and scripts,
        and calls to the server that it came from.
    """

    html: str
    policy: str


def load_page() -> Page:
    html = (FOLDER / "page.html").read_text("utf-8")
    styles = [_read(name) for name in _STYLE.findall(html)]
    scripts = [_read(name) for name in _SCRIPT.findall(html)]
    html = _STYLE.sub(lambda match: f"<style>{_read(match[1])}</style>", html)
    html = _SCRIPT.sub(lambda match: f"<script>{_read(match[1])}</script>", html)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; style-src {_hashes(styles)}; script-src {_hashes(scripts)}"
    )
    return Page(html, policy)


def _read(name: str) -> str:
    text = (FOLDER / name).read_text("utf-8")
    assert "</script" not in text
    assert "</style" not in text
    return "\n" + text


def _hashes(texts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
