"""A chat engine for HTTP tests that says what the last user message holds, token by token, and then EOS.

So one server serves every script: the test writes the model's answer as the user's message. Some literals in it are not
said but done, see ``CONTROLS``.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.engine.build import Engine
from jaxinfer.request import Request
from jaxinfer.tokenization.chat import ChatTemplate
from tests.support import engines
from tests.support.tokenizers import ByteTokenizer

BYTES = tuple(f"<0x{byte:02x}>" for byte in (0xF0, 0x9F, 0x98, 0xE6, 0x80))
"""Literals for bytes that no JSON text can hold."""
CONTROLS = ("<next choice>", "<fail>", "<anything>", "<crash>", "<wait>")
"""What follows is said by the next choice; logits that are not numbers; all tokens are equally likely from here on;
the model fails as a whole; the step takes 20 ms, and another token ``x`` is said."""
MARKS = ("<user>", "</user>", "<think>", "</think>", "<tool_call>", "</tool_call>", *BYTES, *CONTROLS)

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def parrot_engine(template: str | None = TEMPLATE, **scheduler: Any) -> Engine:
    """Few words, a context of 2,048 tokens; ``scheduler`` as in ``engines.config``."""
    tokenizer = ByteTokenizer(literals=MARKS)
    ids = {mark: tokenizer.encode(mark)[0] for mark in MARKS}
    raw = {ids[mark]: int(mark[3:5], 16) for mark in BYTES}
    settings = engines.config(**{"num_blocks": 1024, "max_num_batched_tokens": 256, **scheduler})

    def script(request: Request, index: int, position: int) -> np.ndarray:
        said = _last_message(list(request.prompt_token_ids), ids)
        answers = _split(said, ids["<next choice>"])
        tokens = answers[min(index, len(answers) - 1)]
        at = position - len(request.prompt_token_ids)
        if ids["<anything>"] in tokens[: at + 1]:
            return np.zeros(engines.VOCAB, np.float32)
        token = tokens[at] if 0 <= at < len(tokens) else engines.EOS[0]
        if token == ids["<crash>"]:
            raise RuntimeError("the device is gone")
        if token == ids["<wait>"]:
            time.sleep(0.02)
            return engines.one_hot(ord("x"))
        if token == ids["<fail>"]:
            return np.full(engines.VOCAB, np.nan, np.float32)
        return engines.one_hot(raw.get(token, token))

    engine = engines.scripted(script, settings, tokenizer=tokenizer, max_model_len=2048)
    return replace(engine, chat_template=ChatTemplate({} if template is None else {"default": template}))


def _last_message(prompt: list[int], ids: dict[str, int]) -> list[int]:
    if ids["<user>"] not in prompt:
        return []
    start = len(prompt) - prompt[::-1].index(ids["<user>"])
    end = prompt.index(ids["</user>"], start) if ids["</user>"] in prompt[start:] else len(prompt)
    return prompt[start:end]


def _split(tokens: list[int], separator: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
