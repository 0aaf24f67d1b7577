"""JSON forms of what the API hands out. Token ids, hashes and salts stay here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from app.events import Event
from app.supervisor import EngineStatus
from db.views import ApiKeyView, ConversationView, LinkView, MessageView, PersonView, SessionView


def conversation_json(conversation: ConversationView) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "title": conversation.title,
        "system_prompt": conversation.system_prompt,
        "settings": conversation.settings,
        "active_leaf_id": conversation.active_leaf_id,
        "created_at": conversation.created_at,
        "updated_at": conversation.updated_at,
        "archived": conversation.archived_at is not None,
        "cursor": conversation.cursor,
    }


def message_json(message: MessageView) -> dict[str, Any]:
    return {
        "id": message.id,
        "conversation_id": message.conversation_id,
        "parent_id": message.parent_id,
        "role": message.role,
        "content": message.content,
        "status": message.status,
        "finish_reason": message.finish_reason,
        "error": message.error,
        "stats": message.stats,
        "model": message.model,
        "rating": message.rating,
        "created_at": message.created_at,
        "updated_at": message.updated_at,
        "sibling_index": message.sibling_index,
        "sibling_count": message.sibling_count,
    }


def event_json(event: Event) -> dict[str, Any]:
    body: dict[str, Any] = {"text": event.text, "status": event.status}
    if event.kind == "queued":
        body["position"] = event.position
    if event.kind in ("snapshot", "done"):
        body |= {"stats": dict(event.stats), "error": event.error}
    return body


def key_json(key: ApiKeyView) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "revoked_at": key.revoked_at,
    }


def session_json(session: SessionView, current: str) -> dict[str, Any]:
    return {
        "id": session.id,
        "created_at": session.created_at,
        "last_seen_at": session.last_seen_at,
        "expires_at": session.expires_at,
        "address": session.address,
        "user_agent": session.user_agent,
        "current": session.id == current,
    }


def person_json(person: PersonView) -> dict[str, Any]:
    return asdict(person)


def link_json(link: LinkView) -> dict[str, Any]:
    return {
        "id": link.id,
        "kind": link.kind,
        "user_id": link.user_id,
        "is_admin": link.is_admin,
        "note": link.note,
        "created_by": link.created_by,
        "created_at": link.created_at,
        "expires_at": link.expires_at,
    }


def engine_json(status: EngineStatus) -> dict[str, Any]:
    return {
        "state": status.state.value,
        "phase": status.phase,
        "detail": status.detail,
        "model": status.model,
        "max_model_len": status.max_model_len,
        "since": status.since,
        "restarts": status.restarts,
        "ready_seconds": status.ready_seconds,
    }
