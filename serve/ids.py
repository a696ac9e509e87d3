"""Ids of answers and of the engine's requests."""

import uuid


def new_id(prefix: str, request_id: str | None = None) -> str:
    """An id that no other answer has; it shows the client's own id, if there is one."""
    unique = uuid.uuid4().hex
    return f"{prefix}-{unique}" if request_id is None else f"{prefix}-{request_id}-{unique[:12]}"


def engine_request_id(request_id: str, prompt: int) -> str:
    """The engine's id of a call's prompt. All endpoints use it, so that an id which is used twice at the same time is
    found; the number at the end keeps ids of different calls apart."""
    return f"{request_id}-{prompt}"
