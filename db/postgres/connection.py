"""Opening connections to PostgreSQL, and telling in a sentence why one cannot be had."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import QueuePool

from db.errors import MigrationError, StorageUnavailable
from db.postgres.failures import clean_up, driver_errors, message_of, state_of
from db.postgres.url import PostgresUrl

LEAST_VERSION = 14
TIMEOUT_SECONDS = 30.0
"""A server that is silent for so long is taken for lost; for maintenance there is no limit."""

# A dead client's connection, and with it the writer's lock, ends after about half a minute; a transaction
# that hangs does too. Search is by index, so nothing that is asked takes long.
_SESSION = (
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 4",
    "SET idle_in_transaction_session_timeout = '120s'",
    "SET statement_timeout = 0",
    "SET client_min_messages = warning",
)
READER = ("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",)
WRITER = ("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",)


def connect(url: PostgresUrl, *settings: str, timeout: float | None = TIMEOUT_SECONDS) -> Any:
    """A connection of pg8000. Raises StorageUnavailable, or MigrationError for what cannot work at all."""
    pg8000 = _driver()
    try:
        connection = _connection_class()(
            user=url.user,
            password=url.password,
            host=url.host,
            port=url.port,
            database=url.database,
            unix_sock=url.socket,
            ssl_context=url.ssl_context(),
            timeout=timeout,
            application_name="tangram-chat",
        )
    except (pg8000.dbapi.Error, OSError, UnicodeError) as error:
        raise refused(url, error) from error
    try:
        for setting in (*_SESSION, *settings):
            connection.cursor().execute(setting)
        connection.commit()
    except (pg8000.dbapi.Error, OSError) as error:
        _close(connection)
        raise refused(url, error) from error
    return connection


def make_engine(creator: Callable[[], Any], *, connections: int) -> Engine:
    """An SQLAlchemy engine over at most `connections` connections, each looked at before it is used again."""
    _driver()
    engine = create_engine(
        "postgresql+pg8000://",
        creator=creator,
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        pool_pre_ping=True,
        pool_use_lifo=True,
        # Parameters are messages and hashes; they have no place in an error's text.
        hide_parameters=True,
        json_serializer=lambda value: json.dumps(value, allow_nan=False),
    )
    # Many rows a statement; the driver itself would send one after the other.
    engine.dialect.use_insertmanyvalues_wo_returning = True
    engine.dialect.do_terminate = engine.dialect.do_close = _close  # type: ignore[method-assign, assignment]
    ping = engine.dialect.do_ping

    def still_there(connection: Any) -> bool:
        try:
            return ping(connection)
        except OSError:  # the driver lets some of them through
            return False

    engine.dialect.do_ping = still_there  # type: ignore[method-assign, assignment]
    event.listen(engine, "handle_error", clean_up, retval=True)
    return engine


def _driver() -> Any:
    try:
        import pg8000.dbapi
    except ImportError as error:
        raise MigrationError(
            "TANGRAM_DATABASE_URL names PostgreSQL, and its driver pg8000 is not installed: install it with "
            "`pip install 'tangram-chat[postgres]'`"
        ) from error
    return pg8000


@cache
def _connection_class() -> Any:
    """The driver's, which closes its socket also where the server is lost before it has answered."""

    class Connection(_driver().dbapi.Connection):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().__init__(*args, **kwargs)
            except BaseException:
                with suppress(*driver_errors(AttributeError)):  # it has none yet, or has closed it
                    self.close()
                raise

    return Connection


def _close(connection: Any) -> None:
    """Say goodbye; a connection that is broken cannot, and that is no news to anybody."""
    with suppress(*driver_errors()):
        connection.close()


def refused(url: PostgresUrl, error: Exception) -> StorageUnavailable:
    state, where = state_of(error), f"PostgreSQL ({url})"
    if state in ("28P01", "28000"):
        words = (
            f"{where} does not let the user {url.user} in: check user and password in TANGRAM_DATABASE_URL "
            "(and the server's pg_hba.conf)"
        )
    elif state == "3D000":
        words = f"there is no such database: {url}. Create it: createdb --owner={url.user} {url.database}"
    elif state == "42501":
        words = f"{where} does not let the user {url.user} connect to this database: GRANT CONNECT on it"
    elif state == "53300":
        words = f"{where} has no connection left: raise its max_connections; this app takes six"
    elif state.startswith("57"):
        words = f"{where} is starting or stopping: try again in a moment"
    elif state:
        words = f"{where} refuses the connection: {message_of(error)}"
    elif "SSL" in str(error) or "certificate" in str(error):
        words = f"no trusted connection to {where}: {_reason(error)}. See sslmode and sslrootcert"
    else:
        words = f"{where} cannot be reached ({_reason(error)}): is it running, and is the address right?"
    return StorageUnavailable(words)


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    return message_of(error)
