"""The store: everything that the product asks of its history, in one object.

Every method that takes `owner_id` sees that owner's records only, and raises `NotFound` for anybody else's
just as for missing ones. Its parts are in `accounts`, `consent`, `conversations`, `turns`, `replies`,
`operations` and `transfer`.
"""

from db.accounts import AccountStore
from db.consent import ConsentStore
from db.conversations import ConversationStore
from db.operations import OperationStore
from db.replies import ReplyStore
from db.transfer import TransferStore
from db.turns import TurnStore


class Store(
    AccountStore, ConsentStore, ConversationStore, TurnStore, ReplyStore, OperationStore, TransferStore
):
    """All repositories over one `Database`, which must be migrated. Errors are those of `db.errors`."""
