"""JSON bodies: read, decoded and validated, with errors that say what is wrong."""

import asyncio
import json
import re
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from jaxinfer.tokenization.tokenizer import without_surrogates
from serve.errors import bad_request

Model = TypeVar("Model", bound=BaseModel)

LARGE = 256 * 1024
"""Bytes from which a body is decoded beside the event loop."""
MAX_PROBLEMS = 5
_MAX_SHOWN = 200
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, model: type[Model]) -> Model:
    """The body of a request.

    Raises:
        APIError: 400 with the field; 413 while it is read.
    """
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise bad_request(f"the content type is {kind[:_MAX_SHOWN]!r}; it must be application/json")
    data = await request.body()
    if len(data) > LARGE:
        return await asyncio.to_thread(_parse, data, model)
    return _parse(data, model)


def json_answer(value: msgspec.Struct | dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _parse(data: bytes, model: type[Model]) -> Model:
    tree = _decode(data)
    if not isinstance(tree, dict):
        raise bad_request(f"the body must be a JSON object, not {type(tree).__name__}")
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise _invalid(error) from None


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        # JSON can spell half a surrogate pair; a client that cuts a text inside an emoji sends that.
        if _SURROGATE.search(data):
            return _decode_with_surrogates(data)
        raise bad_request(f"the body is not valid JSON: {error}") from None


def _decode_with_surrogates(data: bytes) -> Any:
    try:
        return _without_surrogates(json.loads(data, parse_constant=_no_constant))
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def _without_surrogates(tree: Any) -> Any:
    if isinstance(tree, str):
        return without_surrogates(tree)
    if isinstance(tree, dict):
        return {without_surrogates(name): _without_surrogates(value) for name, value in tree.items()}
    return [_without_surrogates(item) for item in tree] if isinstance(tree, list) else tree


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _invalid(error: ValidationError) -> Exception:
    """The first few problems, each with its field; values are not repeated."""
    problems: list[str] = []
    first: str | None = None
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        field = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if first is None and problem["loc"]:
            first = str(problem["loc"][0])
        problems.append(_describe(field, problem["type"], message)[:_MAX_SHOWN])
        if len(problems) == MAX_PROBLEMS:
            break
    return bad_request("; ".join(problems), first)


def _describe(field: str, kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return f"{field}: this field is not supported"
    if kind == "missing":
        return f"{field}: this field is required"
    return f"{field}: {message}" if field else message
