"""What the README tells a newcomer to type works."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.support.parrot import parrot_engine
from tests.support.servers import running_server

README = (Path(__file__).parents[2] / "README.md").read_text()
NAME = "smollm2-135m"

pytestmark = pytest.mark.feature("http", "chat")


def test_the_curl_of_the_readme():
    found = re.search(r"curl -s (\S+) -H 'Content-Type: application/json' \\\n\s+-d '(.*)'", README)
    assert found is not None
    path = re.sub(r"^http://[^/]+", "", found[1])
    with running_server(parrot_engine(), served_model_names=(NAME,)) as server:
        answer = server.client.post(path, json=json.loads(found[2]))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "What is the capital of France?"


def test_the_openai_client_of_the_readme():
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "OpenAI(" in block)
    printed = io.StringIO()
    with running_server(parrot_engine(), served_model_names=(NAME,)) as server, redirect_stdout(printed):
        exec(code.replace("http://127.0.0.1:8000", server.url), {})
    assert printed.getvalue() == "Name three rivers."
