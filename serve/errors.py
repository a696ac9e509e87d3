"""Errors as clients see them: ``{"error": {"message", "type", "param", "code"}}`` with the right status."""

import logging

import msgspec
from starlette.responses import Response

from jaxinfer.engine.client import EngineDeadError, EngineDrainingError
from jaxinfer.param_checks import InvalidParamsError
from jaxinfer.request import QueueFullError, RequestError
from jaxinfer.tokenization.chat import ChatTemplateError

logger = logging.getLogger(__name__)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""``error.type`` by status, in OpenAI's words."""


class APIError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status; also ``error.code``.
        param: the field of the request at fault, or None.
        retry_after: seconds, for the header.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 413:
            headers["Connection"] = "close"  # or the rest of the body would have to be read
        return Response(self.body(), self.status, headers, "application/json")


def bad_request(message: str, param: str | None = None) -> APIError:
    return APIError(400, message, param)


def as_api_error(error: Exception, retry_after: int) -> APIError:
    """The answer that an exception of the engine, or of a handler, stands for.

    Args:
        retry_after: seconds told to clients that are refused for overload.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError | InvalidParamsError):
        return bad_request(str(error), error.param)
    if isinstance(error, ChatTemplateError):
        return bad_request(str(error), "messages")
    if isinstance(error, EngineDrainingError):
        return APIError(503, str(error), retry_after=retry_after)
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), retry_after=retry_after)
    if isinstance(error, EngineDeadError):
        return APIError(500, f"the engine failed: {error}")
    logger.error("a request failed for a reason that is the server's fault", exc_info=error)
    return APIError(500, "the server failed to handle the request; its log says why")
