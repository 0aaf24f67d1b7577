"""Around every handler: who asks, and from an exception to a sentence above the input."""

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import gradio as gr

from app.errors import AppError, NotSignedIn
from app.ui.render import notice
from db.errors import Conflict, DbError, InvalidInput, NotFound
from tangram.errors import TangramError

log = logging.getLogger(__name__)

GONE = "This conversation is not here any more."
NO_HISTORY = "The history cannot be read or written now."
BROKEN = "Something went wrong on the server. Your text is still here; try again."


def owner_of(request: gr.Request) -> str:
    """The id of the user who asks. Raises NotSignedIn."""
    if not request.username:
        raise NotSignedIn
    return str(request.username)


def session_of(request: gr.Request) -> str:
    """Gradio's name of the open page."""
    return request.session_hash or ""


def told(error: AppError | DbError | TangramError) -> str:
    """What a reader is told of an error. Where the database is and why it failed is for the log alone."""
    if isinstance(error, NotFound):
        return GONE
    if isinstance(error, DbError) and not isinstance(error, Conflict | InvalidInput):
        log.error("storage: %s", error)
        return NO_HISTORY
    return str(error)


Handler = Callable[..., Awaitable[dict[Any, Any]]]


def guarded(handler: Handler) -> Handler:
    """Turn what a handler raises into a message above the input; the input keeps its text. What it shows
    replaces what a reply that is followed has painted.

    The handler's last argument is the request.
    """

    @functools.wraps(handler)
    async def guarding(self: Any, *args: Any) -> dict[Any, Any]:
        page = self.pages.of(session_of(args[-1]))
        page.touch()
        try:
            update = await handler(self, *args)
            if self.parts.live in update:
                await page.change(update[self.parts.live])
            return update
        except (AppError, DbError, TangramError) as error:
            text = told(error)
        except Exception:
            log.exception("chat page: %s failed", handler.__name__)
            text = BROKEN
        finally:
            page.touch()
        return {self.parts.notice: notice(text)}

    return cast(Handler, guarding)
