"""The schema's history, in order. A released migration is never edited: add the next one."""

from db.migrations.base import Migration
from db.migrations.m0001_initial import MIGRATION as M0001
from db.migrations.m0002_people import MIGRATION as M0002

MIGRATIONS: tuple[Migration, ...] = (M0001, M0002)

__all__ = ["MIGRATIONS", "Migration"]
