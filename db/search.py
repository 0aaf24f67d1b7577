"""Finding conversations by what was said in them. The query is literal text: it has no operators."""

from typing import Any

from sqlalchemy import ColumnElement, Select, literal_column, or_, select
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql import column, table

from db.models import Conversation, Message
from db.views import OPEN_STATUSES

_TRIGRAM = 3


def matches(owner_id: str, query: str) -> ColumnElement[bool]:
    """Whether a conversation's title or one of the owner's finished messages in it contains `query`.

    From three characters on the trigram index answers; it knows nothing shorter, such as a word of two
    Chinese characters, for which the owner's own texts are read.
    """
    said = select(Message.conversation_id).where(Message.user_id == owner_id)
    if len(query) >= _TRIGRAM:
        return or_(
            Conversation.seq.in_(_indexed("conversations_search", query)),
            Conversation.id.in_(said.where(Message.seq.in_(_indexed("messages_search", query)))),
        )
    finished = said.where(Message.status.not_in(OPEN_STATUSES))
    return or_(
        _contains(Conversation.title, query),
        Conversation.id.in_(finished.where(_contains(Message.content, query))),
    )


def _indexed(index: str, query: str) -> Select[Any]:
    phrase = '"' + query.replace('"', '""') + '"'
    return select(literal_column("rowid")).select_from(table(index)).where(column(index).op("MATCH")(phrase))


def _contains(text: InstrumentedAttribute[str], query: str) -> ColumnElement[bool]:
    # SQLite's LIKE folds ASCII letters only, so the other cases are spelled out.
    cases = sorted({query, query.lower(), query.upper()})
    return or_(*(text.contains(case, autoescape=True) for case in cases))
