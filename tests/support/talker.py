"""A slow engine with something to say, for tests that look at a server while it works."""

import time
from dataclasses import replace

import numpy as np

from jaxinfer.engine.build import Engine
from jaxinfer.request import Request
from jaxinfer.tokenization.chat import ChatTemplate
from tests.support.engines import EOS, VOCAB, config, one_hot, scripted
from tests.support.servers import Server
from tests.support.tokenizers import ByteTokenizer

ANSWER = "Prague is the capital.\nA second line & <b>no markup</b>."
GO_ON, FAIL = "go on", "die"
"""In a prompt: an answer without end, and the end of the engine."""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
STEP = 0.004
"""Seconds that each sequence of a step takes at least."""


def say(request: Request, index: int, position: int) -> np.ndarray:
    time.sleep(STEP)
    prompt = bytes(token for token in request.prompt_token_ids if token < 256).decode()
    if FAIL in prompt:
        raise RuntimeError("the device is lost")
    at = position - len(request.prompt_token_ids)
    if GO_ON in prompt:
        return one_hot(ord("x"), VOCAB)
    return one_hot(ord(ANSWER[at]) if at < len(ANSWER) else EOS[0], VOCAB)


def talker(chat: bool = True) -> Engine:
    """255 blocks of 4 tokens.

    Args:
        chat: whether there is a chat template.
    """
    made = scripted(say, config(num_blocks=256, block_size=4), tokenizer=ByteTokenizer(), max_model_len=600)
    return replace(made, chat_template=ChatTemplate({"default": TEMPLATE} if chat else {}))


def put_load(server: Server, calls: int = 3) -> None:
    for i in range(calls):
        body = {"prompt": f"hello {i}", "max_tokens": 20, "temperature": 0}
        server.client.post("/v1/completions", json=body).raise_for_status()
