"""A quick look at whether the engine still finds details: facts that look alike, and questions about them.

No measure of quality (benchmarks/accuracy is one): it tells a profile that ruins recall, or an engine that
answers nonsense, from one that works, within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import secrets
import time
from dataclasses import dataclass

from app.errors import AppError
from app.supervisor import EngineSupervisor
from tangram.client import CompletionRequest
from tangram.errors import TangramError

QUESTIONS = 6
LINES = 64
"""About a thousand tokens: more than a chunk and its window, so that something is sealed."""
ANSWER_TOKENS = 12
TIMEOUT_SECONDS = 180.0
_SEED = 20260606
_PLACES = (
    "the archive",
    "the bakery",
    "the cellar",
    "the dairy",
    "the engine room",
    "the forge",
    "the garage",
    "the harbour",
)


@dataclass(frozen=True)
class ProbeResult:
    """right: questions of ``asked`` whose answer had the number. error: why there was no answer."""

    right: int = 0
    asked: int = 0
    seconds: float = 0.0
    error: str = ""

    def told(self) -> str:
        """In words."""
        return self.error or f"{self.right} of {self.asked}"


def worse(before: ProbeResult | None, after: ProbeResult | None) -> bool:
    """Whether a change must be taken back: the engine does not answer, or finds less than half of before."""
    if after is None:
        return False
    return bool(after.error) or (before is not None and not before.error and 2 * after.right < before.right)


def probed_text(found: tuple[ProbeResult | None, ProbeResult | None]) -> str:
    """What a change did to it, as a sentence to follow another; "" where nothing was asked."""
    before, after = found
    if after is None:
        return ""
    earlier = f", before the change {before.told()}" if before is not None else ""
    return f" Details found in a quick check: {after.told()}{earlier}."


class Probe:
    """Asks the engine that runs."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self._supervisor = supervisor

    async def __call__(self) -> ProbeResult | None:
        """None where there is no engine to ask, or its context is too short."""
        if not self._supervisor.status.ready:
            return None
        began = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await self._ask(began)
        except (AppError, TangramError, TimeoutError) as error:
            took = time.monotonic() - began
            return ProbeResult(seconds=took, error=f"no answer: {str(error) or 'it took too long'}")

    async def _ask(self, began: float) -> ProbeResult | None:
        engine, templating = self._supervisor.client, self._supervisor.templating
        text, questions = facts()
        salt, names, right = secrets.token_hex(8), [], 0
        for question, number in questions:
            message = {"role": "user", "content": f"{text}\n\n{question} Answer with the number only."}
            prompt = await asyncio.to_thread(templating.render, [message], [])
            if len(prompt) + ANSWER_TOKENS > self._supervisor.status.max_model_len:
                return None
            names.append(secrets.token_hex(12))
            request = CompletionRequest(
                self._supervisor.status.model,
                prompt,
                ANSWER_TOKENS,
                temperature=0.0,
                stop_token_ids=templating.stop_token_ids,
                cache_salt=salt,
                request_id=names[-1],
                rank=0 if self._supervisor.ranks > 1 else None,  # where the text is in the cache already
            )
            async with contextlib.aclosing(engine.stream(request)) as chunks:
                answer = "".join([chunk.text async for chunk in chunks])
            right += re.search(rf"\b{number}\b", answer) is not None
        with contextlib.suppress(TangramError):
            for row in (await engine.memory()).get("sequences", []):
                if any(name in row["id"] for name in names):
                    await engine.evict(sequence=row["id"])
        return ProbeResult(right, len(questions), time.monotonic() - began)


def facts() -> tuple[str, list[tuple[str, int]]]:
    """A text of facts that differ in little, and questions with their answers, spread over it."""
    chance = random.Random(_SEED)
    numbers = chance.sample(range(1000, 10000), LINES)
    what = [(_PLACES[line % len(_PLACES)], line // len(_PLACES) + 1) for line in range(LINES)]
    lines = [
        f"The code of door {door} of {place} is {number}."
        for (place, door), number in zip(what, numbers, strict=True)
    ]
    asked = [round((index + 0.5) * LINES / QUESTIONS) for index in range(QUESTIONS)]
    questions = [
        (f"What is the code of door {what[line][1]} of {what[line][0]}?", numbers[line]) for line in asked
    ]
    return "\n".join(lines), questions
