"""Which request the running code works for: what logs and the audit trail say of it."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass
class RequestInfo:
    """id: the client's `X-Request-ID` or one of ours. address: the client's, "" when unknown."""

    id: str
    address: str = ""
    user_id: str | None = None


CURRENT: ContextVar[RequestInfo | None] = ContextVar("request", default=None)


def request_id() -> str | None:
    """The id of the request that is being answered, or None outside of one."""
    info = CURRENT.get()
    return info.id if info is not None else None


def new_request_id(asked: str | None) -> str:
    """The id that the client gave if it can stand in a log, else a random one."""
    return asked if asked is not None and _NAME.fullmatch(asked) else secrets.token_hex(8)
