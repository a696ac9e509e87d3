"""The OpenAPI document: what every endpoint takes and answers, with the statuses that it really uses."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REF = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
_MEANINGS = {
    400: "The request is not valid; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, or the endpoint is switched off.",
    409: "Not possible in this state.",
    413: "The body is too long.",
    429: "The queue is full; try again after `Retry-After` seconds.",
    500: "The generation failed.",
    503: "The engine is not ready or does not work any more.",
}
GENERATING = (400, 401, 404, 413, 429, 500, 503)
"""Error statuses of endpoints that generate."""

Responses = dict[int | str, dict[str, Any]]
_DEFINITIONS = "x-definitions"


def errors(*statuses: int) -> Responses:
    """Entries of ``responses`` for error statuses."""
    return {
        status: {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}},
        }
        for status in statuses
    }


def answer(struct: type[msgspec.Struct], *, stream: bool = False) -> Responses:
    """The entry of ``responses`` for status 200 with a body of that type; with ``stream`` also as events."""
    (schema,), definitions = msgspec.json.schema_components((struct,), ref_template=_REF)
    content: dict[str, Any] = {"application/json": {"schema": {**schema, _DEFINITIONS: definitions}}}
    if stream:
        content["text/event-stream"] = {
            "schema": {"description": "With stream=true: the data of events is JSON."}
        }
    return {200: {"description": "The answer.", "content": content}}


def plain(content_type: str, description: str) -> Responses:
    """The entry of ``responses`` for status 200 with a body that has no schema."""
    return {200: {"description": description, "content": {content_type: {"schema": {"type": "string"}}}}}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint that reads its body with ``read_body``."""
    schema = model.model_json_schema(ref_template=_REF.replace("{name}", "{model}"))
    definitions = {**schema.pop("$defs", {}), model.__name__: schema}
    named = {"$ref": _REF.format(name=model.__name__), _DEFINITIONS: definitions}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": named}}}}


def install(app: FastAPI, version: str) -> None:
    """Makes ``/openapi.json`` complete: definitions go to the components, and FastAPI's 422, which is a 400 here,
    goes away."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            tree = get_openapi(title="jaxinfer", version=version, routes=app.routes)
            schemas: dict[str, Any] = tree.setdefault("components", {}).setdefault("schemas", {})
            schemas["Error"] = _ERROR
            for path in tree["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
                    _hoist(operation, schemas)
            app.openapi_schema = tree
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _hoist(node: Any, schemas: dict[str, Any]) -> None:
    if isinstance(node, Mapping):
        assert isinstance(node, dict)
        schemas.update(node.pop(_DEFINITIONS, {}))
        for child in node.values():
            _hoist(child, schemas)
    elif isinstance(node, list):
        for child in node:
            _hoist(child, schemas)
