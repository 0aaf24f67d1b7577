"""The accuracy benchmark's samples: what is asked can be answered from the text, and only by reading it."""

import re
from random import Random

import pytest

from benchmarks.accuracy.chat import Conversation
from benchmarks.accuracy.loss import SCORED, loss_sample
from benchmarks.accuracy.samples import DIALOGUE, TALK, Writer
from benchmarks.accuracy.scoring import score
from benchmarks.accuracy.tasks import TASKS
from benchmarks.accuracy.text import LOSS_KINDS, ROOT, real_text, words
from tests.benchmarks.accuracy_fakes import Words

FACTS = ("single", "multi_key", "many_keys", "near_keys", "multi_value", "tracking", "people")
CODE = r"code of the (\w+) (\w+) is (\d{4})\b"


def made(task: str, seed: int, length: int = 2048) -> tuple[Conversation, list[str], Writer]:
    """A conversation, the texts of its users' messages, and who wrote it."""
    tokenizer = Words()
    writer = Writer(tokenizer.encode, tokenizer.template())
    one = writer.make(task, seed, length)
    return one, [tokenizer.decode(turn.user) for turn in one.turns], writer


def asked(one: Conversation, texts: list[str]) -> tuple[str, str, tuple[str, ...]]:
    """Text of the first turn, the question, and what is expected."""
    question = one.turns[-1].question
    assert question is not None
    return texts[0], texts[-1], question.expected


@pytest.mark.parametrize("task", [*TASKS, DIALOGUE])
def test_a_seed_makes_one_conversation_and_another_another(task: str) -> None:
    assert made(task, 3)[0] == made(task, 3)[0]
    assert made(task, 3)[0] != made(task, 4)[0]


@pytest.mark.parametrize("task", [*TASKS, DIALOGUE])
@pytest.mark.parametrize("length", [2048, 5000])
def test_lengths_are_right_within_a_hundredth(task: str, length: int) -> None:
    one, _, writer = made(task, 0, length)
    assert len(one.history(writer.template, len(one.turns) - 1)) == pytest.approx(length, rel=0.01)


@pytest.mark.parametrize("task", TASKS)
def test_all_of_the_text_is_sealed_when_the_question_comes(task: str) -> None:
    one, _, writer = made(task, 1)
    text_ends = len(one.history(writer.template, 1))
    prompt = len(one.prompt(writer.template, len(one.turns) - 1))
    assert (prompt - 128) // 512 * 512 >= text_ends
    assert TALK >= 512 + 128


def test_prompts_only_ever_grow() -> None:
    one, _, writer = made(DIALOGUE, 0)
    before: list[int] = []
    for turn in range(len(one.turns)):
        history = one.history(writer.template, turn)
        assert history[: len(before)] == before
        before = [*history, *one.turns[turn].user]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("task", ["single", "multi_key", "many_keys", "near_keys", "multi_value"])
def test_codes_follow_from_the_text_and_others_look_alike(task: str, seed: int) -> None:
    text, question, expected = asked(*made(task, seed)[:2])
    told: dict[tuple[str, str], list[str]] = {}
    for a, b, value in re.findall(CODE, text):
        told.setdefault((a, b), []).append(value)
    ((a, b),) = re.findall(r"codes? of the (\w+) (\w+)[?.]", question)
    assert sorted(told[a, b]) == sorted(expected)
    alike = [name for name in told if (name[0] == a) != (name[1] == b)]
    assert len(alike) == {"near_keys": 4, "multi_value": 2}.get(task, 0)
    every = [value for values in told.values() for value in values]
    assert len({value[:2] for value in every}) == len(every)
    counts = {"single": 3, "multi_key": 8, "many_keys": 32, "near_keys": 8, "multi_value": 4}
    assert len(told) == counts[task]


@pytest.mark.parametrize("seed", range(4))
def test_variables_lead_to_their_number(seed: int) -> None:
    text, question, expected = asked(*made("tracking", seed)[:2])
    numbers = dict(re.findall(r"Variable (\w+) is (\d{4})\b", text))
    same = dict(re.findall(r"Variable (\w+) equals variable (\w+)", text))
    name = re.findall(r"variable (\w+) have", question)[0]
    hops = 0
    while name in same:
        name, hops = same[name], hops + 1
    assert (numbers[name],) == expected
    assert hops == 1
    assert len(numbers) == 3


@pytest.mark.parametrize("seed", range(6))
def test_people_can_be_told_apart_by_their_whole_names_only(seed: int) -> None:
    text, question, expected = asked(*made("people", seed)[:2])
    who = re.findall(r"(?:of|does) (\w+ \w+)(?:\?| have)", question)[0]
    verb = {"home": "lives in", "profession": "works as a", "pet": "keeps a"}[
        re.findall("home|profession|pet", question)[0]
    ]
    told = dict(re.findall(rf"(\w+ \w+) {verb} (\w+)", text))
    assert told[who] == expected[0]
    assert len(told) == len(set(told.values())) == 4
    first, last = who.split()
    assert sum(name.startswith(first) != name.endswith(last) for name in told) == 2


def test_common_words_are_the_most_common() -> None:
    text, _, expected = asked(*made("common_words", 0)[:2])
    said = re.findall(r"[a-z]+", text.partition("\n\n")[2])
    counts = sorted(((said.count(word), word) for word in set(said)), reverse=True)
    assert {word for _, word in counts[:5]} == set(expected)
    assert counts[4][0] > 2 * counts[5][0]


@pytest.mark.parametrize("seed", range(3))
def test_a_dialogue_asks_for_what_was_said_before_by_either(seed: int) -> None:
    one, texts, writer = made(DIALOGUE, seed)
    assert len(one.turns) == 10
    decode = writer.encode.__self__.decode  # type: ignore[attr-defined]
    user = dict(re.findall(r"code of the (\w+ \w+) is (\d{4})", texts[0]))
    assistant = dict(re.findall(r"number of the (\w+ \w+) is (\d{4})", decode(one.turns[1].reply)))
    assert len(user) == len(assistant) == 12
    questions = [(number, turn) for number, turn in enumerate(one.turns, 1) if turn.question]
    assert [number for number, _ in questions] == [5, 6, 7, 8, 9, 10]
    asked_for = set()
    for number, turn in questions:
        assert turn.question is not None
        told = {"user": user, "assistant": assistant}[turn.question.about]
        word, name = re.findall(r"what is the (\w+) of the (\w+ \w+)\?", texts[number - 1])[0]
        assert (told[name],) == turn.question.expected
        assert set(turn.question.rivals) == set(told.values()) - {told[name]}
        asked_for.add((word, name))
        assert turn.question.expected[0] not in decode(turn.lead)
    assert len(asked_for) == 6, "no answer is in the history but as a fact"


@pytest.mark.parametrize("task", [*FACTS, DIALOGUE])
def test_the_expected_answer_is_right_and_rivals_are_wrong(task: str) -> None:
    for seed in range(3):
        for turn in made(task, seed)[0].turns:
            if turn.question:
                assert score(f"It is {', '.join(turn.question.expected)}.", turn.question) == 1.0
                assert score(f"It is {', '.join(turn.question.rivals)}.", turn.question) == 0.0


def test_too_little_room_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        made("multi_key", 0, 800)


def test_words_suffice_for_the_longest_list() -> None:
    assert len(words()) >= 5 + 16384 // 8
    assert TASKS["common_words"](Random(0), 16384).words


def test_loss_is_taken_on_the_text_itself() -> None:
    tokenizer = Words()
    for seed, kind in enumerate(LOSS_KINDS):
        one = loss_sample(seed, 1500, tokenizer.encode, tokenizer.template())
        assert (one.kind, len(one.tokens), one.first) == (kind, 1500 + SCORED, 1500)
        text = real_text(kind)
        assert tokenizer.decode(one.tokens[one.first :]) in text
        assert one == loss_sample(seed, 1500, tokenizer.encode, tokenizer.template())
    with pytest.raises(ValueError, match="fewer than"):
        loss_sample(0, 10**6, tokenizer.encode, tokenizer.template())


def test_the_prose_is_small() -> None:
    assert (ROOT / "benchmarks" / "accuracy" / "prose.txt").stat().st_size < 200_000
