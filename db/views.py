"""What the store hands out: immutable records, detached from any connection.

Times are UTC in integer milliseconds since 1970.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Role = Literal["user", "assistant"]
Status = Literal["complete", "pending", "streaming", "stopped", "interrupted", "error"]
FinalStatus = Literal["complete", "stopped", "interrupted", "error"]
LinkKind = Literal["invite", "reset"]

OPEN_STATUSES: tuple[str, ...] = ("pending", "streaming")
FINAL_STATUSES: tuple[str, ...] = get_args(FinalStatus)


@dataclass(frozen=True, slots=True)
class UserView:
    """An account. `cache_salt` keeps one user's cached conversations from every other user."""

    id: str
    name: str
    password_hash: str = field(repr=False)
    is_admin: bool
    cache_salt: str = field(repr=False)
    created_at: int
    disabled_at: int | None


@dataclass(frozen=True, slots=True)
class ApiKeyView:
    """An API key without the key: only its hash is stored, and not even that is handed out."""

    id: str
    user_id: str
    name: str
    created_at: int
    last_used_at: int | None
    revoked_at: int | None


@dataclass(frozen=True, slots=True)
class SessionView:
    """A sign-in of a browser, without its token. `address` and `user_agent` are those of its beginning."""

    id: str
    user_id: str
    created_at: int
    expires_at: int
    last_seen_at: int
    address: str
    user_agent: str


@dataclass(frozen=True, slots=True)
class LinkView:
    """An invitation (`user_id` is who took it) or a reset (`user_id` is whose password it changes)."""

    id: str
    kind: LinkKind
    user_id: str | None
    is_admin: bool
    note: str
    created_by: str | None
    created_at: int
    expires_at: int
    used_at: int | None
    revoked_at: int | None


@dataclass(frozen=True, slots=True)
class QuotaView:
    """One user's own limits: requests at once, requests that wait, requests a minute. None: the default."""

    running: int | None = None
    waiting: int | None = None
    per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class UserChangeView:
    """What a change of a user made of what was before."""

    before: UserView
    quota_before: QuotaView
    after: UserView


@dataclass(frozen=True, slots=True)
class PersonView:
    """An account as an administrator sees it. `last_seen_at` is the latest use of a sign-in or a key."""

    id: str
    name: str
    is_admin: bool
    created_at: int
    disabled_at: int | None
    last_seen_at: int | None
    sessions: int
    api_keys: int
    quota: QuotaView


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A conversation without its messages. `updated_at` is the time of its last activity."""

    id: str
    user_id: str
    title: str
    system_prompt: str
    settings: dict[str, Any]
    active_leaf_id: str | None
    created_at: int
    updated_at: int
    deleted_at: int | None
    archived_at: int | None = None

    @property
    def cursor(self) -> str:
        """The value of `before` that lists what comes after this conversation."""
        return f"{self.updated_at}:{self.id}"


@dataclass(frozen=True, slots=True)
class MessageView:
    """A node of the message tree.

    `token_ids` are the message's own segment of the prompt. `rating` of a reply is 1 (liked), -1 (disliked)
    or None. `sibling_index` (from 0, oldest first) and `sibling_count` place it among the messages of the
    same parent.
    """

    id: str
    user_id: str
    conversation_id: str
    parent_id: str | None
    role: Role
    content: str
    token_ids: tuple[int, ...] = field(repr=False)
    status: Status
    finish_reason: str | None
    error: str | None
    stats: dict[str, Any]
    model: str | None
    created_at: int
    updated_at: int
    sibling_index: int
    sibling_count: int
    rating: int | None = None

    @property
    def is_final(self) -> bool:
        """Whether the message will not change any more."""
        return self.status not in OPEN_STATUSES


@dataclass(frozen=True, slots=True)
class AuditView:
    """One sign-in or administrative change, with the values before and after it and whose request it was."""

    id: str
    user_id: str | None
    action: str
    before: Any
    after: Any
    created_at: int
    address: str | None = None
    request_id: str | None = None
