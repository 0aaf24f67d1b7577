"""Conditions that the two databases have to be asked in different words to answer them from an index."""

from typing import Any

from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import NullType


class same_parent(FunctionElement[Any]):  # noqa: N801 (a function, to whoever writes a query)
    """Whether two ids of a parent are the same, or both are none."""

    name = "same_parent"
    type = NullType()  # as Boolean, SQLite would be asked for `= 1`, and would look for no index
    inherit_cache = True


@compiles(same_parent)
def _by_is(element: same_parent, compiler: SQLCompiler, **options: Any) -> str:
    left, right = (compiler.process(each, **options) for each in element.clauses)
    return f"({left} IS {right})"


@compiles(same_parent, "postgresql")
def _by_coalesce(element: same_parent, compiler: SQLCompiler, **options: Any) -> str:
    """Of IS NOT DISTINCT FROM no index of PostgreSQL knows; of these the one named messages_siblings does."""
    left, right = (compiler.process(each, **options) for each in element.clauses)
    return f"(coalesce({left}, '') = coalesce({right}, ''))"
