"""Finding conversations by what was said in them, on PostgreSQL. The query is literal text, as on SQLite.

ILIKE decides; with the extension pg_trgm an index of trigrams answers from three characters on. For shorter
queries, and without the extension, the owner's own texts are read.
"""

from sqlalchemy import ColumnElement, literal_column, or_, select
from sqlalchemy.orm import InstrumentedAttribute

from db.models import Conversation, Message

EXTENSION = "CREATE EXTENSION IF NOT EXISTS pg_trgm"
INDEXES = (
    """
    CREATE INDEX IF NOT EXISTS messages_trigrams ON messages USING gin (content gin_trgm_ops)
    WHERE status NOT IN ('pending', 'streaming')
    """,
    "CREATE INDEX IF NOT EXISTS conversations_trigrams ON conversations USING gin (title gin_trgm_ops)",
)
INDEX_NAMES = ("messages_trigrams", "conversations_trigrams")

# Written as the index's condition is: with parameters in it, the planner might not see that they are the
# same.
_FINISHED: ColumnElement[bool] = literal_column("messages.status NOT IN ('pending', 'streaming')")


def matches(owner_id: str, query: str) -> ColumnElement[bool]:
    """Whether a conversation's title or one of the owner's finished messages in it contains `query`."""
    said = select(Message.conversation_id).where(Message.user_id == owner_id, _FINISHED)
    return or_(
        _contains(Conversation.title, query),
        Conversation.id.in_(said.where(_contains(Message.content, query))),
    )


def _contains(text: InstrumentedAttribute[str], query: str) -> ColumnElement[bool]:
    # In a database of the locale C, ILIKE folds ASCII letters only, so the other cases are spelled out.
    cases = sorted(case for case in {query, query.lower(), query.upper()} if len(case) == len(query))
    return or_(*(text.icontains(case, autoescape=True) for case in cases))
