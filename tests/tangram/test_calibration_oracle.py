"""The oracle against whole attention matrices of transformers itself, and needs against a plain sort."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import avg_pool1d, cosine_similarity, normalize

from tangram.calibration import attention, model, oracle
from tangram.calibration.framing import CONTEXT, FROM_START, frame_of
from tangram.calibration.model import Reader, load
from tangram.calibration.oracle import judge, largest_weights, needs
from tangram.config import TangramConfig
from tangram.errors import ConfigError, UnsupportedError
from tests.tangram.calibrated import random_model
from tests.tiny_models import LLAMA, random_llama, write_config

KINDS = ("llama", "gemma2", "gpt_oss")


@pytest.fixture(scope="module")
def folders(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by kind."""
    made = {"llama": random_llama(tmp_path_factory.mktemp("llama"), bundled_model_dir)}
    for kind in KINDS[1:]:
        made[kind] = random_model(kind, tmp_path_factory.mktemp(kind), bundled_model_dir)
    return made


@pytest.fixture(scope="module")
def readers(folders: dict[str, Path]) -> dict[str, Reader]:
    return {kind: load(str(folder), device="cpu") for kind, folder in folders.items()}


def eager(folder: Path) -> Any:
    """The same model with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).get_decoder()


def weights_of(decoder: Any, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Of each layer, float32 [query_heads, tokens, tokens]: one pass, nothing cached, nothing in blocks."""
    with torch.inference_mode():
        out = decoder(input_ids=torch.tensor([list(tokens)]), output_attentions=True, use_cache=False)
    return [layer[0] for layer in out.attentions]


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(100, 40000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_worth_is_the_largest_weight_of_whole_attention_matrices(
    kind: str, folders: dict[str, Path], readers: dict[str, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "PART", 70)
    monkeypatch.setattr(model, "READ_STEP", 61)
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 20000)
    reader, context = readers[kind], some_tokens(200)
    frame = frame_of(reader.tokenizer)
    found = largest_weights(reader, frame, context)

    decoder, read = eager(folders[kind]), [*frame.before, *context]
    expected = torch.zeros_like(found)
    for start in range(0, len(context), 70):
        asked = [*frame.request(context[:start]), *context[start : start + 70]]
        layers = weights_of(decoder, [*read, *asked])
        for row, layer in enumerate(reader.kinds.full):
            by_group = layers[layer].unflatten(0, (reader.identity.kv_heads, -1))
            largest = by_group[:, :, len(read) :, : len(read)].amax(dim=(1, 2))
            expected[row] = torch.maximum(expected[row], largest)
    assert found.shape == (len(reader.kinds.full), 2, len(read))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
    assert found.std() > 1e-3, "or any constant would do"


def test_the_kinds_differ_in_what_is_calibrated(readers: dict[str, Reader]) -> None:
    assert readers["llama"].kinds.full == (0, 1, 2)
    assert readers["gemma2"].kinds.full == (1, 3)
    assert (readers["gemma2"].identity.window_layers, readers["gemma2"].identity.window_span) == (2, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_weights_exist_at_once_than_allowed(
    kind: str, readers: dict[str, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 9000)
    sizes = []
    seen = oracle.LargestWeight.see_weights

    def see(self: Any, layer: int, head: int, weights: torch.Tensor) -> None:
        sizes.append(weights.numel())
        seen(self, layer, head, weights)

    monkeypatch.setattr(oracle.LargestWeight, "see_weights", see)
    reader = readers[kind]
    largest_weights(reader, frame_of(reader.tokenizer), some_tokens(150))
    assert 0 < max(sizes) <= 9000


GEOMETRY = TangramConfig(chunk=64, window=32, sink=4, query_window=16)


def test_keydiff_judges_each_sealed_chunk_by_its_own_keys(
    folders: dict[str, Path], readers: dict[str, Reader]
) -> None:
    from transformers import DynamicCache

    reader, context = readers["llama"], some_tokens(180)
    frame = frame_of(reader.tokenizer)
    tokens = [*frame.before, *context]
    found = judge(reader, frame, context, "keydiff", GEOMETRY)
    cache = DynamicCache()
    with torch.inference_mode():
        eager(folders["llama"])(input_ids=torch.tensor([tokens]), past_key_values=cache)
    chunks = (len(tokens) - 32) // 64
    assert found.shape == (3, 2, chunks * 64)
    for layer, chunk in itertools.product(range(3), range(chunks)):
        keys = cache.layers[layer].keys[0][:, chunk * 64 : (chunk + 1) * 64]
        anchor = normalize(keys, dim=-1).mean(dim=1, keepdim=True)
        expected = -cosine_similarity(keys, anchor, dim=-1)
        torch.testing.assert_close(
            found[layer, :, chunk * 64 : (chunk + 1) * 64], expected, rtol=1e-3, atol=1e-4
        )


def test_snapkv_sees_the_last_queries_before_the_seal(
    folders: dict[str, Path], readers: dict[str, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "READ_STEP", 10)  # so that the queries come from several steps
    reader, context = readers["llama"], some_tokens(120)
    frame = frame_of(reader.tokenizer)
    found = judge(reader, frame, context, "snapkv", GEOMETRY)
    # Of the first chunk nothing lies before it, so its weights are the model's own.
    layers = weights_of(eager(folders["llama"]), [*frame.before, *context][:96])
    for layer, weights in enumerate(layers):
        mean = weights.unflatten(0, (2, -1))[:, :, 80:96, :80].mean(dim=(1, 2))
        expected = avg_pool1d(mean, 5, stride=1, padding=2)[:, :64]
        torch.testing.assert_close(found[layer, :, :64], expected, rtol=1e-3, atol=1e-5)


def test_expected_attention_knows_the_rotation(readers: dict[str, Reader]) -> None:
    reader = readers["llama"]
    found = judge(reader, frame_of(reader.tokenizer), some_tokens(180), "expected_attention", GEOMETRY)
    assert found.isfinite().all()
    assert (found >= 0).all()
    assert found[..., 4:].std() > 0


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(6, 20),
    st.floats(0.05, 0.95),
    st.sampled_from(["model", "layer"]),
    st.integers(0, 4),
    st.integers(0, 1000),
)
def test_needs_are_shares_of_the_best_tokens(
    layers: int, heads: int, tokens: int, target: float, scope: str, sink: int, seed: int
) -> None:
    # Few different values, so that many are equal.
    scores = torch.randint(
        0, 8, (layers, heads, tokens), generator=torch.Generator().manual_seed(seed)
    ).float()
    found = needs(scores, target, scope, sink)
    counts = [[0] * heads for _ in range(layers)]
    runs = [range(layers)] if scope == "model" else [[layer] for layer in range(layers)]
    for run in runs:
        every = [
            (-float("inf") if token < sink else -float(scores[layer, head, token]), layer, head, token)
            for layer in run
            for head in range(heads)
            for token in range(tokens)
        ]
        for _, layer, head, _ in sorted(every)[: round(target * len(every))]:
            counts[layer][head] += 1
    assert (found * tokens).round().int().tolist() == counts


def test_the_window_is_left_out_and_the_sink_always_wins(readers: dict[str, Reader]) -> None:
    reader, context = readers["llama"], some_tokens(150)
    frame = frame_of(reader.tokenizer)
    scores = judge(reader, frame, context, "kvzip", GEOMETRY)
    assert scores.shape[-1] == len(frame.before) + 150 - 32
    tokens = scores.shape[-1]
    assert (needs(scores, 4 / tokens, "model", 4) * tokens == 4).all()


def test_the_request_names_the_words_before_a_part(readers: dict[str, Reader]) -> None:
    tokenizer = readers["llama"].tokenizer
    frame = frame_of(tokenizer)
    assert "<|im_start|>user\n" in tokenizer.decode(list(frame.before))
    assert tokenizer.decode(frame.request([])).endswith("<|im_start|>assistant\n")
    words = tokenizer.encode(" the blue notebook lay on the table near", add_special_tokens=False)
    assert "blue notebook" in tokenizer.decode(frame.request(words))
    assert CONTEXT not in tokenizer.decode(frame.request(words))


def test_a_tokenizer_without_a_template_gets_paragraphs(readers: dict[str, Reader]) -> None:
    tokenizer = copy(readers["llama"].tokenizer)
    for template in (None, "{{ raise_exception('no') }}", "always the same"):
        tokenizer.chat_template = template
        frame = frame_of(tokenizer)
        assert tokenizer.decode(frame.request([])) == f"\n\n{FROM_START}\n\n", template


def test_models_that_cannot_be_calibrated_are_refused(tmp_path: Path, bundled_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="MODEL: there is no directory"):
        load(str(tmp_path / "none"), device="cpu")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"MODEL: .*empty cannot be read"):
        load(str(empty), device="cpu")
    bare = write_config(tmp_path / "bare", **LLAMA | {"vocab_size": 49152})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((bundled_model_dir / name).read_bytes())
    with pytest.raises(ConfigError, match=r"MODEL: .*bare cannot be loaded"):
        load(str(bare), device="cpu")


def test_a_model_whose_attention_cannot_be_watched_is_refused(readers: dict[str, Reader]) -> None:
    with pytest.raises(UnsupportedError, match="layer 1 was expected to attend with 2 KV heads"):
        model.check_watched(readers["llama"], {0: 2, 2: 2})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device: must be cpu"):
            load(".", device="cuda")
