"""A Llama-family GGUF file, written out as a directory that vLLM and transformers load.

Only what the bundled model needs is read: a dense Llama decoder with tied embeddings and a byte-level BPE
vocabulary. Weights are de-quantised to float32 and rounded to bfloat16, to nearest, ties to even.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import ModelUnusable

Array = npt.NDArray[Any]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL_TOKEN = 3  # GGUF's token type of special tokens
_DIGIT_SPLITTING = "smollm"  # GGUF's name of "each digit alone, then GPT-2's byte-level rule"


class UnsupportedGGUF(ModelUnusable):
    """The GGUF file is not of the one kind that is read here; the message says what is different."""


def expand(gguf_file: Path, out: Path) -> None:
    """Write config, tokenizer, chat template and ``model.safetensors`` of `gguf_file` to the directory `out`.

    Raises UnsupportedGGUF when the file holds another architecture, vocabulary or tensor than expected.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        found = meta.get("general.architecture")
        raise UnsupportedGGUF(f"{gguf_file.name}: its architecture is {found!r}, not 'llama'")
    if meta.get("tokenizer.ggml.model") != "gpt2" or meta.get("tokenizer.ggml.pre") != _DIGIT_SPLITTING:
        raise UnsupportedGGUF(f"{gguf_file.name}: its vocabulary is not SmolLM's byte-level BPE")
    _write_json(out / "config.json", _config(meta))
    _write_json(out / "generation_config.json", _generation_config(meta))
    _write_tokenizer(meta, out)
    _write_weights(reader, meta, out / "model.safetensors")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # GGUF holds it in float32; the number that was published is the shortest one that rounds to it.
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def _generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(meta: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))

    def named(role: str) -> str:
        return tokens[int(meta[f"tokenizer.ggml.{role}_token_id"])]

    _write_json(
        out / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": named("bos"),
            "eos_token": named("eos"),
            "pad_token": named("padding"),
            "unk_token": named("unknown"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (out / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")


def _write_weights(reader: Any, meta: dict[str, Any], path: Path) -> None:
    tensors = {t.name: t for t in reader.tensors}
    names = {name: _published_name(name) for name in tensors}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, published in names.items():
        shape = [int(n) for n in reversed(tensors[name].shape)]  # GGUF lists the fastest dimension first
        size = 2 * int(np.prod(shape))
        header[published] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for name in names:
            for block in _bfloat16_blocks(tensors[name], _rotary_heads(name, meta)):
                out.write(block)


def _published_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    raise UnsupportedGGUF(f"the tensor {name!r} is not one of a dense Llama with tied embeddings")


def _rotary_heads(name: str, meta: dict[str, Any]) -> int:
    """Number of heads whose rows GGUF keeps in the interleaved rotary order; 0 for the other tensors."""
    if ".attn_q." in name:
        return int(meta["llama.attention.head_count"])
    if ".attn_k." in name:
        return int(meta["llama.attention.head_count_kv"])
    return 0


def _bfloat16_blocks(tensor: Any, rotary_heads: int, rows: int = 8192) -> Iterator[bytes]:
    """The tensor's bfloat16 bytes, row-major, a block of rows at a time to bound memory."""
    from gguf.quants import dequantize

    data: Array = tensor.data
    if rotary_heads:
        weight = dequantize(data, tensor.tensor_type)
        half = weight.shape[0] // rotary_heads // 2
        pairs = weight.reshape(rotary_heads, half, 2, weight.shape[1])
        yield _bfloat16(pairs.swapaxes(1, 2).reshape(weight.shape)).tobytes()
        return
    for start in range(0, data.shape[0], rows):
        yield _bfloat16(dequantize(data[start : start + rows], tensor.tensor_type)).tobytes()


def _bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """Finite float32 values as the bits of bfloat16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + rounding) >> 16).astype(np.uint16)
