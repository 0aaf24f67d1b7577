"""Which worker of pytest-xdist's is given what, and what becomes of it when a worker dies in the middle.

pytest-xdist's own scheduling by files gives the test that killed a worker to the next one, over and over, and
can wait for ever for a worker that was given a single test: workers keep the last one until they know that
nothing follows. A test that runs out of time ends its worker, so both would turn one failure into many.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

from tests.workers import unit

ENOUGH = 2
"""Tests that a worker knows of: the one that it runs, and the one that follows."""


class UnitScheduling(LoadFileScheduling):
    """Units in the order of the collection; a worker is given one as it is about to run out of tests."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def _reschedule(self, node: Any) -> None:
        if node.shutting_down:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) < ENOUGH:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()

    def remove_node(self, node: Any) -> str | None:
        """The test in which a worker died, which counts as run; others get what was left of its units."""
        given = self.assigned_work.pop(node)
        left = {name: tests for name, tests in given.items() if not all(tests.values())}
        if not left:
            return None
        crashed = next(test for tests in left.values() for test, done in tests.items() if not done)
        left[self._split_scope(crashed)][crashed] = True
        for name, tests in reversed(left.items()):
            if not all(tests.values()):
                self.workqueue[name] = tests
                self.workqueue.move_to_end(name, last=False)
        for other in self.nodes:
            self._reschedule(other)
        return crashed
