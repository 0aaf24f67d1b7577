"""The address of a PostgreSQL database, read from a SQLAlchemy URL. Its password is in no message."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from db.errors import InvalidInput

FORM = "postgresql+pg8000://USER:PASSWORD@HOST:PORT/NAME"
_KINDS = ("postgresql", "postgres", "postgresql+pg8000")
_SSL_MODES = ("disable", "prefer", "require", "verify-ca", "verify-full")


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """host: a name or address, or a Unix socket's folder. sslrootcert: a file of trusted certificates."""

    host: str
    port: int
    user: str
    password: str | None = field(repr=False)
    database: str
    sslmode: str = "prefer"
    sslrootcert: str | None = None

    def __str__(self) -> str:
        port = "" if self.port == 5432 else f":{self.port}"
        return f"{self.database} at {self.host}{port}"

    @property
    def socket(self) -> str | None:
        """The path of the Unix socket, None for a host on the network."""
        return f"{self.host}/.s.PGSQL.{self.port}" if self.host.startswith("/") else None

    def ssl_context(self) -> ssl.SSLContext | bool | None:
        """As pg8000 wants it: False never, None where the server offers it, True or a context always.

        Raises OSError when the file of certificates cannot be read.
        """
        if self.socket or self.sslmode == "disable":
            return False
        if self.sslmode in ("prefer", "require"):
            return None if self.sslmode == "prefer" else True
        context = ssl.create_default_context(cafile=self.sslrootcert)
        context.check_hostname = self.sslmode == "verify-full"
        return context


def parse_url(text: str) -> PostgresUrl:
    """Read a URL of the form `postgresql+pg8000://user:password@host:port/name`.

    `?host=/a/folder` leads to a Unix socket; `sslmode` and `sslrootcert` mean what they mean to PostgreSQL's
    own programs. Raises InvalidInput, which never quotes the text: it holds a password.
    """
    if text.count("@") > 1:  # the rest of a password would be read as a host, which messages name
        raise _wrong("has an @ that is not written as %40, in the password or the user's name")
    try:
        url = make_url(text.strip())
    except (ArgumentError, ValueError) as error:
        raise _wrong(f"cannot be read: it has the form {FORM}") from error
    if url.drivername == "sqlite" or url.drivername.startswith("sqlite+"):
        raise _wrong(
            "names SQLite, which is what is used without it: leave it empty (the file is in TANGRAM_HOME)"
        )
    if url.drivername.startswith("postgresql+") and url.drivername not in _KINDS:
        raise _wrong(f"names the driver {url.drivername.partition('+')[2]}, and pg8000 is supported: {FORM}")
    if url.drivername not in _KINDS:
        raise _wrong(f"must begin with postgresql+pg8000://, as in {FORM}")
    options = {key: value for key, value in url.query.items() if isinstance(value, str)}
    if unknown := sorted(
        url.query.keys() - {"host", "sslmode", "sslrootcert"} | url.query.keys() - options.keys()
    ):
        raise _wrong(
            f"has the option {unknown[0]}, and only host, sslmode and sslrootcert are known, each once"
        )
    host = url.host or options.get("host", "")
    for what, value in (("a host", host), ("a user", url.username), ("the name of a database", url.database)):
        if not value:
            raise _wrong(f"does not say {what}: {FORM}")
    mode = options.get("sslmode", "prefer")
    if mode not in _SSL_MODES:
        raise _wrong(f"has an unknown sslmode: it must be one of {', '.join(_SSL_MODES)}")
    certificates = options.get("sslrootcert")
    if certificates is not None and not Path(certificates).is_file():
        raise _wrong("names a file in sslrootcert that is not there")
    return PostgresUrl(
        host.rstrip("/") if host.startswith("/") else host,
        url.port or 5432,
        url.username or "",
        None if url.password is None else str(url.password),
        url.database or "",
        mode,
        certificates,
    )


def _wrong(problem: str) -> InvalidInput:
    return InvalidInput("TANGRAM_DATABASE_URL", problem)
