"""Around every handler: who asks, and from an exception to a sentence above the input."""

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import gradio as gr

from app.errors import AppError, NotSignedIn
from app.ui.render import notice
from db.errors import DbError, NotFound
from tangram.errors import TangramError

log = logging.getLogger(__name__)

GONE = "This conversation is not here any more."
BROKEN = "Something went wrong on the server. Your text is still here; try again."


def owner_of(request: gr.Request) -> str:
    """The id of the user who asks. Raises NotSignedIn."""
    if not request.username:
        raise NotSignedIn
    return str(request.username)


def session_of(request: gr.Request) -> str:
    """Gradio's name of the open page."""
    return request.session_hash or ""


Handler = Callable[..., Awaitable[dict[Any, Any]]]


def guarded(handler: Handler) -> Handler:
    """Turn what a handler raises into a message above the input; the input keeps its text.

    The handler's last argument is the request.
    """

    @functools.wraps(handler)
    async def guarding(self: Any, *args: Any) -> dict[Any, Any]:
        session = session_of(args[-1])
        self.epochs.touch(session)
        try:
            return await handler(self, *args)
        except NotFound:
            text = GONE
        except (AppError, DbError, TangramError) as error:
            text = str(error)
        except Exception:
            log.exception("chat page: %s failed", handler.__name__)
            text = BROKEN
        finally:
            self.epochs.touch(session)
        return {self.parts.notice: notice(text)}

    return cast(Handler, guarding)
