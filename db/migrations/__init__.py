"""The schema's history, in order. A released migration is never edited: add the next one."""

from db.migrations.base import Migration
from db.migrations.m0001_initial import MIGRATION as M0001
from db.migrations.m0002_calibration_consent import MIGRATION as M0002
from db.migrations.m0003_people import MIGRATION as M0003
from db.migrations.m0004_chats import MIGRATION as M0004

MIGRATIONS: tuple[Migration, ...] = (M0001, M0002, M0003, M0004)

__all__ = ["MIGRATIONS", "Migration"]
