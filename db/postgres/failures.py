"""What an error of PostgreSQL means. Its details, which quote rows, are dropped before anybody sees them."""

from typing import Any

from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DatabaseError, DBAPIError, IntegrityError

_CONSTRAINT = "23"
# Connection, resources, limits, state, operator, system, internal; transactions that cannot go on; no rights.
_CANNOT_WORK = ("08", "53", "54", "55", "57", "58", "XX", "25", "40", "28", "42501")
_GONE = ("08", "57P0")


def driver_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What a call of the driver raises when the server or the way to it fails, and `others`."""
    try:
        import pg8000.dbapi
    except ImportError:  # then no call was made
        return (OSError, *others)
    return (pg8000.dbapi.Error, OSError, *others)


def state_of(error: BaseException) -> str:
    """The five characters by which PostgreSQL names an error, "" where the server did not say."""
    return str(_told(error).get("C", ""))


def message_of(error: BaseException) -> str:
    """The server's own sentence, without the details that quote values."""
    return str(_told(error).get("M", "")) or (str(error.args[0]) if error.args else type(error).__name__)


def _told(error: BaseException) -> dict[str, Any]:
    told = getattr(error, "told", None) or (error.args[0] if error.args else None)
    return told if isinstance(told, dict) else {}


def is_lost(error: BaseException) -> bool:
    """Whether the connection broke."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated
    return False


def cannot_work(error: BaseException) -> str | None:
    """Why the database could not do its work, or None where the statement or its values are to blame."""
    if not isinstance(error, DBAPIError):
        return None
    if error.connection_invalidated:
        return "the connection to the server was lost"
    origin = error.orig
    if origin is None or not state_of(origin).startswith(_CANNOT_WORK):
        return None
    return message_of(origin)


def clean_up(context: ExceptionContext) -> DatabaseError | None:
    """A listener for `handle_error`: the right class for each error, and no values in any."""
    error = context.original_exception
    told = _told(error)
    if isinstance(error, OSError):  # the driver lets some of them through
        context.is_disconnect = True
        lost = DatabaseError(context.statement, None, error, hide_parameters=True)
        lost.connection_invalidated = True
        return lost
    if not told:
        return None
    error.told = {key: told[key] for key in ("S", "C", "M") if key in told}  # type: ignore[attr-defined]
    error.args = (message_of(error),)
    state = state_of(error)
    if state.startswith(_GONE):
        context.is_disconnect = True
        return None
    kind = IntegrityError if state.startswith(_CONSTRAINT) else DatabaseError
    return kind(context.statement, None, error, hide_parameters=True)
