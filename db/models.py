"""The tables as SQLAlchemy sees them. The migrations own the schema; a test holds the two together."""

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Dialect, ForeignKey, Integer, LargeBinary, String, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from db.values import clean_text


class StorableText(TypeDecorator[str]):
    """Text as it can be stored and compared.

    PostgreSQL refuses a NUL, and neither driver can send a lone surrogate; both may be in an id that a
    stranger asks for. The stores clean what is written; here nothing can get past that, in a condition
    neither.
    """

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else clean_text(value)


class Base(DeclarativeBase):
    """Base of all mapped tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger().with_variant(Integer, "sqlite"),  # times in milliseconds
        str: StorableText(),
    }


class User(Base):
    __tablename__ = "users"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    password_hash: Mapped[str]
    is_admin: Mapped[bool]
    cache_salt: Mapped[str]
    created_at: Mapped[int]
    disabled_at: Mapped[int | None]


class CalibrationConsent(Base):
    """A user who lets their conversations be used to calibrate the model. No row: they do not."""

    __tablename__ = "calibration_consent"

    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    given_at: Mapped[int]


class LoginSession(Base):
    """A browser sign-in. Only the token's hash is known."""

    __tablename__ = "sessions"

    token_hash: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[int]
    expires_at: Mapped[int]
    last_seen_at: Mapped[int]
    id: Mapped[str] = mapped_column(unique=True)
    address: Mapped[str]
    user_agent: Mapped[str]


class ApiKey(Base):
    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    key_hash: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[int]
    last_used_at: Mapped[int | None]
    revoked_at: Mapped[int | None]


class Link(Base):
    """A link that works once: an invitation, or a password's reset. Only its token's hash is known."""

    __tablename__ = "links"

    id: Mapped[str] = mapped_column(primary_key=True)
    token_hash: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    is_admin: Mapped[bool]
    note: Mapped[str]
    created_by: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[int]
    expires_at: Mapped[int]
    used_at: Mapped[int | None]
    revoked_at: Mapped[int | None]


class Quota(Base):
    """What one user may do at once. None is the installation's default."""

    __tablename__ = "quotas"

    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    running: Mapped[int | None]
    waiting: Mapped[int | None]
    per_minute: Mapped[int | None]
    updated_at: Mapped[int]


class Conversation(Base):
    """`seq` is the row's own number, which the search index refers to; `id` is its public name."""

    __tablename__ = "conversations"

    seq: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    title: Mapped[str]
    system_prompt: Mapped[str]
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    active_leaf_id: Mapped[str | None]
    created_at: Mapped[int]
    updated_at: Mapped[int]
    deleted_at: Mapped[int | None]
    archived_at: Mapped[int | None]


class Message(Base):
    """`seq` grows with each message, so it orders siblings and tells the newest descendant."""

    __tablename__ = "messages"

    seq: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    user_id: Mapped[str]
    conversation_id: Mapped[str]
    parent_id: Mapped[str | None]
    role: Mapped[str]
    content: Mapped[str]
    token_ids: Mapped[bytes] = mapped_column(LargeBinary)
    status: Mapped[str]
    finish_reason: Mapped[str | None]
    error: Mapped[str | None]
    stats: Mapped[dict[str, Any]] = mapped_column(JSON)
    model: Mapped[str | None]
    created_at: Mapped[int]
    updated_at: Mapped[int]
    rating: Mapped[int | None]


class Setting(Base):
    __tablename__ = "settings"

    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[Any] = mapped_column(JSON)
    updated_at: Mapped[int]


class Audit(Base):
    __tablename__ = "audit"

    id: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    action: Mapped[str]
    before: Mapped[Any] = mapped_column(JSON)
    after: Mapped[Any] = mapped_column(JSON)
    created_at: Mapped[int]
    address: Mapped[str | None]
    request_id: Mapped[str | None]
