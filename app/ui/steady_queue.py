"""Gradio's queue of events, which here outlives an error of its own."""

from __future__ import annotations

import asyncio
import logging

import gradio as gr
from gradio.queueing import Event, Queue
from gradio.server_messages import EventMessage

log = logging.getLogger(__name__)

RESTART_SECONDS = 0.2


class SteadyQueue(Queue):
    """A queue that goes on for everybody when something is wrong with one event.

    Gradio's own ends its loop at the first error in it, and answers 503 from then on.
    """

    _closed = False
    _loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to process events. A second call, which Gradio leaves open to requests, changes nothing."""
        if self._loop is not None and not self._loop.done():
            return
        self._closed = False
        super().start()

    def close(self) -> None:
        self._closed = True
        super().close()

    def send_message(self, event: Event, event_message: EventMessage) -> None:
        """Put a message into the event's session; nobody waits for those of a session that is forgotten."""
        if event.session_hash in self.pending_messages_per_session:
            super().send_message(event, event_message)

    async def start_processing(self) -> None:
        """Hand events to their functions until the queue is closed."""
        self._loop = asyncio.current_task()
        while True:
            try:
                await super().start_processing()
                return
            except Exception:
                log.exception("the page's event queue failed and is started again")
                # Without a pause before it: who looks at this in between would give up.
                self.stopped = False
            await asyncio.sleep(RESTART_SECONDS)

    def compute_analytics_summary(self, records: object) -> dict[str, object]:
        """Nothing: no page shows it, and Gradio builds a table of the last 10,000 events after each event."""
        return {}

    def _cancel_asyncio_tasks(self) -> None:
        """Events that run are ended with the queue, not when its loop begins anew."""
        if self._closed:
            super()._cancel_asyncio_tasks()


def make_steady(blocks: gr.Blocks, *, at_once: int) -> None:
    """Give ``blocks``, whose ``queue`` was called, a steady queue with the same limits.

    at_once: how many events may run at the same time, over all functions.
    """
    made = blocks._queue
    blocks._queue = SteadyQueue(
        live_updates=made.live_updates,
        concurrency_count=at_once,
        update_intervals=made.update_intervals,
        max_size=made.max_size,
        blocks=blocks,
        default_concurrency_limit=made.default_concurrency_limit,
    )
