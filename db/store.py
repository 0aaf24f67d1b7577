"""The store: everything that the product asks of its history, in one object.

Every method that takes `owner_id` sees that owner's records only, and raises `NotFound` for anybody else's
just as for missing ones. Its parts are in `accounts`, `sessions`, `api_keys`, `links`, `quotas`, `consent`,
`conversations`, `turns`, `replies`, `operations` and `transfer`.
"""

from db.accounts import AccountStore
from db.api_keys import ApiKeyStore
from db.consent import ConsentStore
from db.conversations import ConversationStore
from db.links import LinkStore
from db.operations import OperationStore
from db.quotas import QuotaStore
from db.replies import ReplyStore
from db.sessions import SessionStore
from db.transfer import TransferStore
from db.turns import TurnStore


class Store(
    AccountStore,
    SessionStore,
    ApiKeyStore,
    LinkStore,
    QuotaStore,
    ConsentStore,
    ConversationStore,
    TurnStore,
    ReplyStore,
    OperationStore,
    TransferStore,
):
    """All repositories over one `Database`, which must be migrated. Errors are those of `db.errors`."""
