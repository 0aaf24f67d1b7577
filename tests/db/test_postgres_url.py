"""What TANGRAM_DATABASE_URL may say, and what is said of it: never the password."""

from pathlib import Path

import pytest

from db.errors import InvalidInput
from db.postgres.url import PostgresUrl, parse_url

SECRET = "hunter2-of-the-test"


def test_a_url_is_read() -> None:
    url = parse_url("postgresql+pg8000://ann:p%40ss%2Fword@db.example:5433/chat")
    assert url == PostgresUrl("db.example", 5433, "ann", "p@ss/word", "chat")
    assert str(url) == "chat at db.example:5433"
    assert "p@ss" not in repr(url)
    for kind in ("postgresql", "postgres"):
        assert parse_url(f"{kind}://ann@db.example/chat").port == 5432


def test_a_socket_is_a_folder() -> None:
    url = parse_url("postgresql+pg8000://ann@/chat?host=/run/postgresql/")
    assert url.socket == "/run/postgresql/.s.PGSQL.5432"
    assert url.ssl_context() is False


def test_encryption_is_what_sslmode_says(tmp_path: Path) -> None:
    base = "postgresql://ann@db.example/chat"
    assert parse_url(base).ssl_context() is None
    assert parse_url(f"{base}?sslmode=disable").ssl_context() is False
    assert parse_url(f"{base}?sslmode=require").ssl_context() is True
    context = parse_url(f"{base}?sslmode=verify-full").ssl_context()
    assert context is not None
    assert not isinstance(context, bool)
    assert context.check_hostname
    with pytest.raises(InvalidInput, match="sslrootcert that is not there"):
        parse_url(f"{base}?sslmode=verify-full&sslrootcert={tmp_path}/none.pem")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{SECRET}", "cannot be read"),
        (f"postgresql+psycopg://ann:{SECRET}@h/chat", "names the driver psycopg, and pg8000 is supported"),
        (f"mysql://ann:{SECRET}@h/chat", "must begin with postgresql"),
        (f"sqlite:////tmp/{SECRET}", "names SQLite"),
        (f"postgresql://ann:{SECRET}@/chat", "does not say a host"),
        (f"postgresql://:{SECRET}@h/chat", "does not say a user"),
        (f"postgresql://ann:{SECRET}@h", "does not say the name of a database"),
        (f"postgresql://ann:{SECRET}@h:many/chat", "cannot be read"),
        (f"postgresql://ann:p@{SECRET}@h/chat", "has an @ that is not written as %40"),
        (f"postgresql://ann:p@{SECRET}@/chat?host=/run", "has an @ that is not written as %40"),
        (f"postgresql://ann:p@{SECRET}/x@h/chat", "has an @ that is not written as %40"),
        (f"postgresql://ann:{SECRET}@h/chat?sslmode=maybe", "unknown sslmode"),
        (f"postgresql://ann:{SECRET}@h/chat?passfile=x", "has the option passfile"),
        (f"postgresql://ann:{SECRET}@h/chat?host=a&host=b", "each once"),
    ],
)
def test_what_is_wrong_is_said_without_the_password(text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_url(text)
    assert words in str(caught.value)
    assert str(caught.value).startswith("TANGRAM_DATABASE_URL: ")
    assert SECRET not in str(caught.value)
