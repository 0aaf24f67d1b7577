"""The replay of the cache in transformers, and kvpress beside it, on a small random model in float32.

That the replay gives the engine's tokens is shown in tests/engine/test_accuracy_replay.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accuracy import peer
from benchmarks.accuracy.conditions import PRESSES
from tangram.advice import shape_of
from tangram.calibration.model import load_whole
from tangram.calibration.replay import Replay
from tangram.config import TangramConfig
from tangram.profile import build_geometry
from tests.tiny_models import random_llama

SMALL = {"chunk": 64, "window": 32, "rewind": 32, "query_window": 32, "sink": 4, "group_size": 2}
PROMPT = torch.randint(100, 40000, (300,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def folder(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"), bundled_model_dir)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    return load_whole(str(folder), "cpu", "float32")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def cache(loaded: tuple[Any, Any], capacity: int = 400, dynamic: bool = False, **settings: Any) -> Replay:
    config = TangramConfig(**SMALL | settings)
    geometry = build_geometry(config, shape_of(loaded[0].identity))
    return Replay(*loaded, config, geometry, capacity, dynamic)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_with_all_kept_it_is_the_model(loaded: tuple[Any, Any], plain: Any) -> None:
    assert cache(loaded, retention=1.0).answer(PROMPT, [], 12) == greedy(plain, PROMPT, 12)


def test_loss_is_the_models_with_all_kept_and_another_with_less(loaded: tuple[Any, Any], plain: Any) -> None:
    with torch.inference_mode():
        logits = plain(torch.tensor([PROMPT])).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[199:-1], torch.tensor(PROMPT[200:]))
    assert cache(loaded, retention=1.0).loss(PROMPT, 200) == pytest.approx(float(expected), rel=1e-5)
    assert cache(loaded, retention=0.25).loss(PROMPT, 200) != pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("scorer", ["keydiff", "snapkv", "expected_attention", "tova"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_kept(loaded: tuple[Any, Any], scorer: str, dynamic: bool) -> None:
    one = cache(loaded, dynamic=dynamic, retention=0.25, scorer=scorer)
    one.read(PROMPT)
    sealed = one.geometry.sealed(300)
    assert sealed == 4
    for chunk in range(sealed):
        counts = one.kept[:, :, 64 * chunk : 64 * (chunk + 1)].sum(dim=-1)
        assert int(counts.sum()) == 16 * counts.numel()
        assert dynamic or bool((counts == 16).all())
        assert int(counts.min()) >= round(0.05 * 64), "the floor"
        assert not dynamic or scorer == "tova" or len(set(counts.flatten().tolist())) > 1
    assert bool(one.kept[:, :, 256:].all())
    assert bool(one.kept[:, :, :4].all()), "the sink"


def test_how_the_tokens_come_changes_nothing(loaded: tuple[Any, Any]) -> None:
    whole, parts = (cache(loaded, retention=0.25, scorer="snapkv") for _ in range(2))
    whole.read(PROMPT)
    for start in range(0, 300, 37):
        parts.read(PROMPT[start : start + 37])
    assert torch.equal(whole.kept, parts.kept)
    fork = whole.copy()
    fork.read(PROMPT[:100])
    assert whole.length == 300
    assert torch.equal(whole.kept, parts.kept)
    assert whole.answer([7, 8], [], 6) == parts.answer([7, 8], [], 6)


def test_an_answer_ends_at_a_stop(loaded: tuple[Any, Any]) -> None:
    said = cache(loaded, retention=0.5).answer(PROMPT, [], 6)
    stop = said[3]
    assert cache(loaded, retention=0.5).answer(PROMPT, [stop], 6) == said[: said.index(stop)]
    with pytest.raises(ValueError, match="no tokens"):
        cache(loaded).read([])


# ---- kvpress ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pressed_model(folder: Path) -> Iterator[Any]:
    """Leaves transformers' attention functions, which kvpress wraps, as they were."""
    import sys

    from transformers import modeling_utils

    functions = modeling_utils.ALL_ATTENTION_FUNCTIONS
    before, loaded = dict(functions.items()), set(sys.modules)
    yield peer.load(str(folder), "cpu", "float32")
    for name, function in before.items():
        functions[name] = function
    for name in set(sys.modules) - loaded:
        if name.partition(".")[0] == "kvpress":
            del sys.modules[name]


def test_without_a_press_it_is_the_model(pressed_model: Any, plain: Any) -> None:
    pressed = peer.Pressed(pressed_model, None, PROMPT[:192])
    assert pressed.answer(PROMPT[192:], [], 8) == greedy(plain, PROMPT, 8)


@pytest.mark.parametrize("name", PRESSES)
def test_presses_keep_the_share_that_is_asked(pressed_model: Any, plain: Any, name: str) -> None:
    pressed = peer.Pressed(pressed_model, peer.press_of(name, 0.75), PROMPT[:192])
    held = 0
    for number, layer in enumerate(pressed_model.model.layers):
        keys = pressed.cache.layers[number].keys
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        held += keys.shape[1] * keys.shape[2] - (0 if masked is None else len(masked[0]))
    heads = 3 * 2
    assert held == pytest.approx(0.25 * heads * 192, abs=heads)
    said = pressed.answer(PROMPT[192:], [], 8)
    assert len(said) == 8
    assert pressed.length == 300 + 7
    assert said != greedy(plain, PROMPT, 8), "what is left out is missed"


def test_all_kept_by_a_press_is_the_model(pressed_model: Any, plain: Any) -> None:
    pressed = peer.Pressed(pressed_model, peer.press_of("AdaKV-KeyDiff", 0.0), PROMPT[:192])
    assert pressed.answer(PROMPT[192:], [], 8) == greedy(plain, PROMPT, 8)
