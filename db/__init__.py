"""Storage: the SQLite history of the product, behind one writer thread and independent readers.

Start with `Database` (the file, its migrations, its threads) and `Store` (what the product asks of it).
"""

from db.database import Database
from db.store import Store

__all__ = ["Database", "Store"]
