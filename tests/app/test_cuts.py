"""Text is whole Unicode wherever a reply is cut: by a token, a stop, a save, a client that comes back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.decoders import DecodeStream

from app.events import Event
from app.job import Job, replay
from app.sse import encode_event
from app.templating import Templating
from app.tokenizer import ModelText, load_model_text
from tangram.client import CompletionChunk
from tests.app.test_templating import PLAIN, message

HARD = [
    "👩‍👩‍👧",
    "🏳️‍🌈",
    "🇩🇪",
    "e\u0301",
    "क्षि",
    "한\u11ab",
    "漢字かな交じり文",
    "Z̸̡͇a",
    "\u202eabc",
    "﷽",
    "𒀀",
    "\r\n",
    " ",
    "the ",
]
hard_text = st.lists(st.sampled_from(HARD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3))
texts = hard_text.map("".join).map(
    lambda text: text.replace("\0", "").replace("\N{REPLACEMENT CHARACTER}", "")
)


def byte_fallback() -> Tokenizer:
    """A tokenizer of the SentencePiece kind: words with a mark for spaces, and single bytes for the rest."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [
        "<s>",
        "▁",
        "t",
        "h",
        "e",
        "th",
        "the",
        "▁the",
        "漢",
    ]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<s>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


@pytest.fixture(scope="module", params=["bundled", "byte fallback"])
def templating(request: pytest.FixtureRequest, bundled_model_dir: Path) -> Templating:
    found = load_model_text(str(bundled_model_dir))
    if request.param == "bundled":
        return Templating("m", found)
    own = replace(
        found, tokenizer=byte_fallback(), special_tokens={}, eos_ids=frozenset(), chat_template=PLAIN
    )
    return Templating("m", own)


def spoken(text: ModelText, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """What an engine sends with each token: characters that are not whole are held back."""
    stream = DecodeStream(skip_special_tokens=True)
    for token in before:
        stream.step(text.tokenizer, token)
    return [stream.step(text.tokenizer, token) or "" for token in ids]


@settings(max_examples=60, deadline=None)
@given(said=texts, data=st.data())
def test_a_cut_reply_goes_on_without_a_seam(templating: Templating, said: str, data: st.DataObject) -> None:
    text = templating.text
    ids = text.encode(said)
    whole = text.decode(ids)
    assume(whole == said)  # a small vocabulary lacks some bytes of rare planes
    cut = data.draw(st.integers(0, len(ids)))
    first = "".join(spoken(text, (), ids[:cut]))
    kept = templating.settle(ids[:cut])
    assert whole.startswith(first)
    assert "\N{REPLACEMENT CHARACTER}" not in first
    assert text.decode(kept) == first, "ids and text say the same"
    rest = "".join(spoken(text, kept, ids[len(kept) :]))
    assert first + rest == whole


@settings(max_examples=60, deadline=None)
@given(said=texts)
def test_the_bytes_of_tokens_make_up_the_text(templating: Templating, said: str) -> None:
    text = templating.text
    ids = text.encode(said)
    assume(text.decode(ids) == said)
    assert b"".join(map(templating.spell, ids)).decode() == said


@settings(max_examples=40, deadline=None)
@given(said=texts.filter(bool), data=st.data())
def test_a_client_resumes_at_any_place(templating: Templating, said: str, data: st.DataObject) -> None:
    text = templating.text
    ids = text.encode(said)
    parts = spoken(text, (), ids)
    whole = "".join(parts)
    after = data.draw(st.integers(0, len(whole)))
    begun = data.draw(st.integers(0, len(parts)))

    async def watched() -> list[Event]:
        job = Job("u", "c", "r", 1)
        for token, part in zip(ids[:begun], parts[:begun], strict=True):
            job.take(CompletionChunk(part, (token,)))
        have = min(after, len(job.text))
        events: list[Event] = []

        async def watch() -> None:
            async for event in job.watch(have):
                events.append(event)

        watching = asyncio.create_task(watch())
        for token, part in zip(ids[begun:], parts[begun:], strict=True):
            await asyncio.sleep(0)
            job.take(CompletionChunk(part, (token,)))
        job.settled.set()
        job.notify()
        await watching
        return [Event("delta", whole[:have], "", have), *events]

    async def replayed() -> list[Event]:
        stored = message("assistant", whole)
        return [Event("delta", whole[:after], "", after)] + [event async for event in replay(stored, after)]

    for events in (asyncio.run(watched()), asyncio.run(replayed())):
        shown = ""
        for event in events:
            sent = encode_event(event.kind, {"text": event.text}, event.seq).decode()
            (data_line,) = re.findall(r"^data: (.*)$", sent, flags=re.M)
            assert sent.split("\n\n")[1:] == [""], "one event, whatever the text holds"
            received = json.loads(data_line)["text"]
            if event.kind != "queued":
                shown = shown + received if event.kind == "delta" else received
                assert len(shown) == event.seq
        assert shown == whole
