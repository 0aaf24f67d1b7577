"""Every error that the app raises on purpose.

Each one knows its HTTP status and a stable machine-readable ``code``; the message is written for the person
who reads it and says what to do. Storage errors (`db.errors`) and engine errors (`tangram.errors`) are mapped
to the same shape in `app.routes.failures`.
"""

from __future__ import annotations

from typing import Literal


class AppError(Exception):
    """Base class. `status` is the HTTP status, `code` a stable identifier."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(AppError):
    """The request cannot be carried out as it stands; `param` names the field."""

    status = 400
    code = "invalid_request"


TooLong = Literal["conversation", "message", "system prompt"]
_TOO_LONG: dict[TooLong, tuple[str, str]] = {
    "conversation": ("This conversation", "Start a new conversation or shorten the message."),
    "message": ("This message with the system prompt", "Shorten the message."),
    "system prompt": ("The system prompt", "Shorten the system prompt in the conversation's settings."),
}


class ContextTooLong(BadRequest):
    """The conversation and its new message do not fit the model's context."""

    code = "context_length_exceeded"

    def __init__(
        self, tokens: int, limit: int, *, what: TooLong = "conversation", at_least: bool = False
    ) -> None:
        subject, advice = _TOO_LONG[what]
        size = f"at least {tokens}" if at_least else f"{tokens}"
        super().__init__(
            f"{subject} would be {size} tokens long, and the model reads at most {limit}, "
            f"the reply included. {advice}",
            param="messages",
        )
        self.tokens = tokens
        self.limit = limit


class NotSignedIn(AppError):
    """No valid session or API key came with the request."""

    status = 401
    code = "not_signed_in"

    def __init__(
        self, message: str = "Sign in first, or send an API key as 'Authorization: Bearer KEY'."
    ) -> None:
        super().__init__(message)


class Forbidden(AppError):
    """The signed-in user may not do this."""

    status = 403
    code = "forbidden"


class Missing(AppError):
    """There is no such thing, or it belongs to somebody else."""

    status = 404
    code = "not_found"


class ModelNotFound(Missing):
    """The request names a model that is not served here."""

    code = "model_not_found"


class ConversationBusy(AppError):
    """A reply of this conversation is still being written."""

    status = 409
    code = "conversation_busy"

    def __init__(self) -> None:
        super().__init__(
            "A reply is still being written in this conversation. Stop it or wait until it is done."
        )


class AlreadyRunning(AppError):
    """Work of that kind is being done, or is in no state for what was asked."""

    status = 409
    code = "conflict"


class RequestStopped(AppError):
    """Somebody who may has ended a request that was being answered."""

    status = 409
    code = "request_stopped"

    def __init__(self, message: str = "An administrator stopped this request.") -> None:
        super().__init__(message)


class AccessEnded(RequestStopped):
    """The user was shut out while a request of theirs was being answered."""

    status = 403
    code = "access_ended"

    def __init__(self) -> None:
        super().__init__("Access was ended: this account has been disabled.")


class TooManyAttempts(AppError):
    """Too many failed sign-ins; try again in `retry_after` seconds."""

    status = 429
    code = "too_many_attempts"

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"Too many failed attempts to sign in. Try again in {retry_after} seconds.")
        self.retry_after = retry_after


class Busy(AppError):
    """The user, or everybody together, has asked for too much; ask again after `retry_after` seconds."""

    status = 429
    code = "rate_limited"

    def __init__(self, message: str, retry_after: int, *, code: str = "rate_limited") -> None:
        super().__init__(f"{message} Try again in {retry_after} second{'s' if retry_after != 1 else ''}.")
        self.retry_after = retry_after
        self.code = code


class EngineNotReady(AppError):
    """The engine is starting, restarting or down; ask again after `retry_after` seconds."""

    status = 503
    code = "engine_not_ready"

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStartFailed(AppError):
    """The engine did not come up. `rolled_back`: the previous configuration runs again."""

    status = 502
    code = "engine_start_failed"

    def __init__(self, message: str, *, rolled_back: bool = False) -> None:
        super().__init__(message)
        self.rolled_back = rolled_back


class ModelUnusable(AppError):
    """The model's tokenizer or chat template cannot be used."""

    status = 500
    code = "model_unusable"


class PortTaken(AppError):
    """The address to serve on is in use."""

    code = "port_taken"


class ReplyUnsaved(AppError):
    """The last reply of the conversation has ended, and the database still does not take it."""

    status = 503
    code = "storage_unavailable"
    retry_after = 5

    def __init__(self) -> None:
        super().__init__(
            "The last reply of this conversation could not be saved yet. Is the disk full? "
            "Make space on it, then try again."
        )
