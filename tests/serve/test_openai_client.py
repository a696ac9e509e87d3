"""The official ``openai`` client against our server: what people use works, unchanged.

Every test runs on a scripted model that repeats the user (and says anything where a form is asked for), and, as a slow
test, on SmolLM2 with the configuration that people start with.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import build_engine
from tests.support.parrot import parrot_engine
from tests.support.servers import running_server

KEY = "secret"
ROOM = 1000
"""Tokens: JSON by a model that says anything has much white space."""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "enum": [1, 2, 3]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Paint(BaseModel):
    model_config = ConfigDict(extra="forbid")

    color: Literal["red", "green"]
    coats: int = Field(ge=0, le=9)


@dataclass(frozen=True)
class Api:
    """Attributes:
    model: name of the model.
    ask: what makes the model write whatever a form allows.
    """

    client: openai.OpenAI
    url: str
    model: str
    ask: str

    def chat(self, content: str, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model=self.model, messages=messages, **fields)

    def with_async_client(self, use: Callable[[openai.AsyncOpenAI], Any]) -> Any:
        async def run() -> Any:
            async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0) as client:
                return await use(client)

        return asyncio.run(run())


def _parrot() -> tuple[Any, str]:
    return parrot_engine(), "<anything>"


def _smollm2() -> tuple[Any, str]:
    return build_engine(
        EngineConfig.load("configs/smollm2-135m.yaml")
    ), "What is the weather in Oslo, and paint it"


@pytest.fixture(
    scope="module",
    params=[_parrot, pytest.param(_smollm2, marks=pytest.mark.slow)],
    ids=["parrot", "smollm2"],
)
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    engine, ask = request.param()
    parser = "hermes" if request.param is _parrot else "auto"
    with running_server(engine, api_keys=(KEY,), served_model_names=("tiny",), tool_parser=parser) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)
        yield Api(client, server.url, "tiny", ask)


pytestmark = pytest.mark.feature("http", "openai client")


def test_models(api):
    assert [model.id for model in api.client.models.list()] == ["tiny"]
    assert api.client.models.retrieve("tiny").id == "tiny"


def test_chat(api):
    answer = api.chat("Say hello", temperature=0, max_tokens=12)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


def test_chat_stream_equals_the_whole_answer(api):
    whole = api.chat("Say hello", temperature=0, max_tokens=12)
    chunks = list(
        api.chat(
            "Say hello", temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_stream_helper(api):
    """The client's own accumulation of a stream; it raises if the length limit ended it."""
    messages: Any = [{"role": "user", "content": "Say hello"}]
    with api.client.chat.completions.stream(
        model=api.model, messages=messages, temperature=0, max_tokens=ROOM
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    whole = api.chat("Say hello", temperature=0, max_tokens=ROOM)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_async_chat_and_stream(api):
    messages: Any = [{"role": "user", "content": "Say hello"}]
    fields: Any = {"model": api.model, "messages": messages, "temperature": 0, "max_tokens": 12}

    async def use(client: openai.AsyncOpenAI) -> tuple[str, list[str]]:
        whole, *streams = await asyncio.gather(
            client.chat.completions.create(**fields),
            *[_joined(await client.chat.completions.create(**fields, stream=True)) for _ in range(3)],
        )
        return whole.choices[0].message.content, streams

    whole, streams = api.with_async_client(use)
    assert whole
    assert streams == [whole] * 3


async def _joined(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_two_choices(api):
    answer = api.chat("Say hello", n=2, temperature=0, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content == answer.choices[1].message.content
    chunks = list(api.chat("Say hello", n=2, temperature=0, max_tokens=8, stream=True))
    for index in range(2):
        mine = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(mine) == answer.choices[0].message.content


def test_logprobs(api):
    answer = api.chat("Say hello", temperature=0, max_tokens=4, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob <= 0
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
def test_tools(api, choice):
    """Pinned, as OpenAI documents: a named function ends with ``stop``, the others with ``tool_calls``."""
    answer = api.chat(
        api.ask, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=ROOM
    )
    (call,) = answer.choices[0].message.tool_calls
    check_call(call.function)
    assert call.type == "function"
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert answer.choices[0].message.content is None


def check_call(function: Any) -> None:
    assert function.name == "get_weather"
    arguments = json.loads(function.arguments)
    assert arguments["city"] in ("Paris", "Oslo")
    assert arguments["days"] in (1, 2, 3)


def test_tools_in_a_stream(api):
    messages: Any = [{"role": "user", "content": api.ask}]
    with api.client.chat.completions.stream(
        model=api.model,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=ROOM,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    check_call(call.function)
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].finish_reason == "tool_calls"


def test_answers_of_tools(api):
    """The second turn of a conversation with a call."""
    call = api.chat(
        api.ask, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=ROOM
    )
    message = call.choices[0].message
    messages: Any = [
        {"role": "user", "content": "Say hello"},
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
    ]
    answer = api.client.chat.completions.create(
        model=api.model, messages=messages, tools=[WEATHER], temperature=0, max_tokens=8
    )
    assert answer.choices[0].message.content is not None


def test_json_schema(api):
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "paint", "strict": True, "schema": Paint.model_json_schema()},
    }
    answer = api.chat(api.ask, response_format=form, max_tokens=ROOM)
    Paint.model_validate_json(answer.choices[0].message.content)
    chunks = api.chat(api.ask, response_format=form, max_tokens=ROOM, stream=True)
    Paint.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def test_parse_into_a_class(api):
    messages: Any = [{"role": "user", "content": api.ask}]
    answer = api.client.chat.completions.parse(
        model=api.model, messages=messages, response_format=Paint, max_tokens=ROOM
    )
    assert isinstance(answer.choices[0].message.parsed, Paint)
    with api.client.chat.completions.stream(
        model=api.model, messages=messages, response_format=Paint, max_tokens=ROOM
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Paint)


def test_completions(api):
    fields: Any = {"model": api.model, "prompt": "<user>abc</user>", "temperature": 0, "max_tokens": 6}
    whole = api.client.completions.create(**fields, logprobs=2, echo=True)
    assert whole.choices[0].text.startswith("<user>abc</user>")
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.total_tokens
    plain = api.client.completions.create(**fields)
    streamed = "".join(
        chunk.choices[0].text for chunk in api.client.completions.create(**fields, stream=True)
    )
    assert streamed == plain.choices[0].text
    assert whole.choices[0].text.endswith(plain.choices[0].text)


def test_embeddings(api):
    """The client asks for base64 and decodes it; numbers are the same."""
    texts = ["Say hello", "and goodbye"]
    one = api.client.embeddings.create(model=api.model, input=texts)
    two = api.client.embeddings.create(model=api.model, input=texts, encoding_format="float")
    assert len(one.data) == 2
    for a, b in zip(one.data, two.data):
        assert a.embedding == pytest.approx(b.embedding, abs=1e-6)
        assert sum(x * x for x in a.embedding) == pytest.approx(1, abs=1e-4)
    assert one.usage.total_tokens > 0


def test_responses(api):
    answer = api.client.responses.create(
        model=api.model, input="Say hello", instructions="Be kind.", temperature=0, max_output_tokens=30
    )
    assert answer.output_text
    assert answer.status in ("completed", "incomplete")
    assert answer.usage.input_tokens + answer.usage.output_tokens == answer.usage.total_tokens


def test_responses_stream(api):
    fields: Any = {"model": api.model, "input": "Say hello", "temperature": 0, "max_output_tokens": 30}
    whole = api.client.responses.create(**fields)
    events = list(api.client.responses.create(**fields, stream=True))
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_responses_with_functions(api):
    tool: Any = {"type": "function", **WEATHER["function"]}
    answer = api.client.responses.create(
        model=api.model, input=api.ask, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.output
    assert call.type == "function_call"
    check_call(call)
    history: Any = [
        {"role": "user", "content": "Say hello"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    second = api.client.responses.create(model=api.model, input=history, tools=[tool], max_output_tokens=20)
    assert second.output


def test_responses_parse(api):
    answer = api.client.responses.parse(
        model=api.model, input=api.ask, text_format=Paint, max_output_tokens=ROOM
    )
    assert isinstance(answer.output_parsed, Paint)


def test_error_classes(api):
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat("x", temperature=5)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        api.client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    stranger = openai.OpenAI(base_url=f"{api.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_overload_is_a_rate_limit_error():
    """The client's class for 429; its own retries wait as long as ``Retry-After`` says."""
    messages: Any = [{"role": "user", "content": "x" * 200}]

    async def use(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            create = client.chat.completions.create
            return await asyncio.gather(
                *[create(model="test", messages=messages) for _ in range(8)], return_exceptions=True
            )

    with running_server(parrot_engine(max_num_seqs=1, max_waiting_seqs=1)) as server:
        results = asyncio.run(use(server.url))
    refused = [result for result in results if isinstance(result, Exception)]
    assert 0 < len(refused) < len(results)
    for error in refused:
        assert isinstance(error, openai.RateLimitError)
        assert int(error.response.headers["retry-after"]) >= 1
