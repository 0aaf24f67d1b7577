"""The schema's history, in order. A released migration is never edited: add the next one."""

from db.migrations.base import Migration
from db.migrations.m0001_initial import MIGRATION as M0001

MIGRATIONS: tuple[Migration, ...] = (M0001,)

__all__ = ["MIGRATIONS", "Migration"]
