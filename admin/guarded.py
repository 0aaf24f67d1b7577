"""Every handler of the console goes through here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import gradio as gr

from admin.access import Access
from admin.errors import NotAllowed

Handler = Callable[..., Awaitable[Any]]


def guarded(access: Access, handler: Handler, *, with_user: bool = False) -> Handler:
    """``handler``, called only for an administrator; anybody else gets a short message and nothing happens.

    With ``with_user`` the administrator is the handler's first argument.
    """

    # Gradio puts the request into the parameter that has this annotation.
    async def checked(request: gr.Request, *values: Any) -> Any:
        try:
            user = await access.require_admin(request)
        except NotAllowed as error:
            raise gr.Error(str(error), print_exception=False) from error
        return await (handler(user, *values) if with_user else handler(*values))

    return checked
