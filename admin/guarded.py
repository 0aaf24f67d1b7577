"""Every handler of the console goes through here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import gradio as gr

from admin.access import Access
from admin.errors import NotAllowed

Handler = Callable[..., Awaitable[Any]]


def guarded(
    access: Access,
    handler: Handler,
    *,
    with_request: bool = False,
    with_user: bool = False,
    with_event: bool = False,
) -> Handler:
    """``handler``, called only for an administrator; anybody else gets a short message and nothing happens.

    Its first arguments are, of those that are asked for, the request, the administrator and the event's data
    as a dictionary, in this order.
    """

    async def allowed(request: gr.Request, event: Any, values: tuple[Any, ...]) -> Any:
        try:
            user = await access.require_admin(request)
        except NotAllowed as error:
            raise gr.Error(str(error), print_exception=False) from error
        data = dict(event) if isinstance(event, dict) else {}
        wanted = ((with_request, request), (with_user, user), (with_event, data))
        return await handler(*(value for asked, value in wanted if asked), *values)

    # Gradio puts the request, and the event, into the parameters that have these annotations.
    async def checked(request: gr.Request, *values: Any) -> Any:
        return await allowed(request, None, values)

    async def checked_event(event: gr.EventData, request: gr.Request, *values: Any) -> Any:
        return await allowed(request, event._data, values)

    return checked_event if with_event else checked
