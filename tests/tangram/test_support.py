"""Every refusal, on vLLM's own configuration objects of real (tiny) models, and what the user reads."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config.logging import LoggingConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import configure_logging
    from vllm.model_executor.models import ModelRegistry

    from tangram import launch, own_classes
    from tangram.argument_support import ASKED_BY
    from tangram.errors import TangramError, UnsupportedError
    from tangram.layer_support import LAYER_FEATURES, check_layer, check_shape
    from tangram.plugin import CPU_WORKER, SCHEDULER
    from tangram.reasons import STARTERS, VARIABLE, listen, reason, told, why
    from tangram.runtime import Runtime
    from tangram.scheduler import TangramScheduler
    from tangram.support import REFUSALS, check_supported

from tests.tiny_models import LLAMA, write_config

Configure = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
COMMON: dict[str, Any] = LLAMA | {"num_hidden_layers": 2}
GPT: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "torch_dtype": "float32"}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "an encoder-decoder model": (
        "whisper",
        "WhisperForConditionalGeneration",
        {"model_type": "whisper", "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "is_encoder_decoder": True}
        | {"vocab_size": 60000, "torch_dtype": "float32"},
    ),
    "a pooling model (embeddings, rewards, classification)": (
        "bert",
        "BertModel",
        GPT | {"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "a model without attention layers": (
        "mamba",
        "MambaForCausalLM",
        GPT | {"model_type": "mamba", "state_size": 8, "num_hidden_layers": 2},
    ),
    "a model with Mamba or linear-attention layers": (
        "jamba",
        "JambaForCausalLM",
        COMMON | {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1},
    ),
    "multi-head latent attention (MLA)": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        COMMON
        | {"model_type": "deepseek_v2", "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16}
        | {"qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 2}
        | {"num_key_value_heads": 4, "head_dim": 16},
    ),
    "ALiBi": ("bloom", "BloomForCausalLM", GPT | {"model_type": "bloom", "n_layer": 2, "n_head": 4}),
    "KV sharing between layers": (
        "gemma3n",
        "Gemma3nForCausalLM",
        COMMON
        | {"model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        | {"layer_types": ["full_attention"] * 4, "vocab_size_per_layer_input": 128}
        | {"activation_sparsity_pattern": [0.0] * 4},
    ),
    "attention in local chunks": (
        "llama4",
        "Llama4ForCausalLM",
        COMMON
        | {"model_type": "llama4_text", "attention_chunk_size": 64, "num_local_experts": 1}
        | {"intermediate_size_mlp": 128, "no_rope_layers": [1, 0]},
    ),
    "images, video and sound in a prompt": (
        "qwen2_audio",
        "Qwen2AudioForConditionalGeneration",
        {"model_type": "qwen2_audio", "text_config": COMMON | {"model_type": "qwen2"}, "vocab_size": 128}
        | {"audio_config": {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2}},
    ),
}
"""What is refused, and a model that has it: vLLM's module, its class, the configuration."""

OUTSIDE = "data parallelism with a balancer outside the engine"
HOSTS = "data parallelism over several hosts"
TOGETHER = "data parallelism of a mixture-of-experts model"

OPTIONS: list[tuple[str, list[str]]] = [
    ("tensor parallelism that does not divide the KV heads", ["--tensor-parallel-size", "4"]),
    ("an engine that is spread over several hosts", ["-tp=2", "--nnodes", "2"]),
    ("an engine that is spread over several hosts", ["-tp=2", "--distributed-executor-backend", "ray"]),
    ("pipeline parallelism", ["-pp", "2"]),
    ("context parallelism", ["--decode-context-parallel-size", "2"]),
    ("dual-batch overlap", ["--enable-dbo"]),
    ("sleep mode", ["--enable-sleep-mode"]),
    ("returning routed experts", ["--enable-return-routed-experts"]),
    ("a pooling model (embeddings, rewards, classification)", ["--runner", "pooling"]),
    ("KV sharing between layers", ["--kv-sharing-fast-prefill"]),
    ("an encoder cache connector", ["--ec-transfer-config", '{"ec_connector": "x", "ec_role": "ec_both"}']),
    (OUTSIDE, ["-dp", "2", "--data-parallel-external-lb"]),
    (OUTSIDE, ["--data-parallel-size=2", "--data-parallel-rank", "0"]),
    (OUTSIDE, ["-dp=2", "--data-parallel-hybrid-lb", "--data-parallel-size-local", "1"]),
    (OUTSIDE, ["-dp=2", "--data-parallel-start-rank", "1"]),
    (OUTSIDE, ["-dp=2", "--data-parallel-multi-port-external-lb", "--data-parallel-size-local", "2"]),
    (HOSTS, ["-dp=2", "--data-parallel-size-local", "1"]),
    (HOSTS, ["-dp=2", "--data-parallel-backend", "ray"]),
    ("an engine that is spread over several hosts", ["-dp=2", "--nnodes", "2"]),
    (HOSTS, ["-dp=2", "--headless"]),
    ("a KV cache of another type than the model", ["--kv-cache-dtype", "fp8"]),
    ("a KV cache of another type than the model", ["--kv-cache-dtype", "float16"]),
    ("prefix hashes finer than a page", ["--block-size", "16", "--prefix-match-unit", "8"]),
    (
        "a KV connector or KV offloading",
        ["--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'],
    ),
    ("a KV connector or KV offloading", ["--kv-offloading-size", "1"]),
    (
        "this kind of speculative decoding",
        ["--speculative-config", '{"model": "no/such-draft", "num_speculative_tokens": 3}'],
    ),
    ("this kind of speculative decoding", ["--spec-method", "eagle", "--spec-model", "no/such-draft"]),
    ("KV cache events", ["--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "null"}']),
    (
        "this kind of speculative decoding",
        ["--speculative-config", '{"method": "ngram_gpu", "num_speculative_tokens": 3}'],
    ),
]
"""What is refused, and how a user asks for it on the command line."""

SET: list[tuple[str, str, Any]] = [
    ("a diffusion language model", "model_config.is_diffusion", True),
    ("KV sharing between layers", "cache_config.kv_sharing_fast_prefill", True),
    ("an engine that is spread over several hosts", "parallel_config.nnodes", 2),
    ("an engine that is spread over several hosts", "parallel_config.distributed_executor_backend", "ray"),
    (OUTSIDE, "parallel_config.data_parallel_external_lb", True),
    (OUTSIDE, "parallel_config.data_parallel_hybrid_lb", True),
    (HOSTS, "parallel_config.data_parallel_size", 2),
    ("context parallelism", "parallel_config.prefill_context_parallel_size", 2),
    ("context parallelism", "parallel_config.decode_context_parallel_size", 2),
    ("dual-batch overlap", "parallel_config.enable_dbo", True),
    ("dual-batch overlap", "parallel_config.ubatch_size", 2),
    ("an encoder cache connector", "ec_transfer_config", object()),
    ("returning routed experts", "aux_output_config.enable_return_routed_experts", True),
    ("sleep mode", "model_config.enable_sleep_mode", True),
    ("another scheduler than Tangram's", "scheduler_config.scheduler_cls", None),
    (
        "another scheduler than Tangram's",
        "scheduler_config.scheduler_cls",
        "vllm.v1.core.sched.scheduler.Scheduler",
    ),
]
"""What vLLM does not accept on this machine, or only with hardware: the field that would ask for it."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """vLLM warns while it configures itself, and writes to the environment."""
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_config(tmp_path_factory.mktemp("models") / "llama", **LLAMA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _know("llama", "LlamaForCausalLM")
    return folder


def _know(module: str, name: str) -> None:
    """Have vLLM look at a model's class here and not in a process of its own, which takes seconds."""
    ModelRegistry.register_model(name, getattr(import_module(f"vllm.model_executor.models.{module}"), name))


def configured(model: Path, **options: Any) -> Any:
    """vLLM's complete configuration for a model directory, without its tokenizer or weights."""
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, **{"scheduler_cls": SCHEDULER} | options
    ).create_engine_config()


def refusal(config: Any) -> str:
    with pytest.raises(UnsupportedError) as error:
        check_supported(config)
    return str(error.value)


def sentence_of(feature: str) -> str:
    (found,) = [row for row in REFUSALS if row.feature == feature]
    return found.sentence()


@pytest.mark.parametrize("feature", MODELS)
def test_models_that_are_refused(feature: str, tmp_path: Path) -> None:
    module, architecture, config = MODELS[feature]
    _know(module, architecture)
    folder = write_config(tmp_path, **config | {"architectures": [architecture]})
    assert refusal(configured(folder)) == sentence_of(feature)


@pytest.mark.parametrize(("feature", "arguments"), OPTIONS)
def test_options_that_are_refused(feature: str, arguments: list[str], llama: Path) -> None:
    """As the API server's process does it, before it starts an engine."""
    with pytest.raises(UnsupportedError) as error:
        launch.check([*plain_options(llama), *arguments])
    assert str(error.value) == sentence_of(feature)


def plain_options(model: Path) -> list[str]:
    return ["--model", str(model), "--skip-tokenizer-init", "--scheduler-cls", SCHEDULER]


EXPERTS: dict[str, Any] = {
    "model_type": "mixtral",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "architectures": ["MixtralForCausalLM"],
}


def test_several_engines_on_one_host_are_served(llama: Path, said: list[str]) -> None:
    for arguments in (["--data-parallel-size", "2"], ["-dp=3", "--data-parallel-size-local", "3"]):
        launch.check([*plain_options(llama), "--worker-cls", CPU_WORKER, *arguments])
    told = [line.rpartition("; ")[2] for line in said if "uncompressed" in line]
    assert told == [f"{engines} engines, each with a cache of its own" for engines in (2, 3)]


def test_experts_are_served_by_one_engine_only(tmp_path: Path) -> None:
    _know("mixtral", "MixtralForCausalLM")
    folder = write_config(tmp_path, **COMMON | EXPERTS)
    check_supported(configured(folder))
    assert refusal(configured(folder, data_parallel_size=2)) == sentence_of(TOGETHER)


@pytest.mark.parametrize(("feature", "field", "value"), SET)
def test_fields_that_are_refused(feature: str, field: str, value: Any, llama: Path) -> None:
    config = configured(llama)
    check_supported(config)
    *path, name = field.split(".")
    owner = config
    for part in path:
        owner = getattr(owner, part)
    owner.__dict__[name] = value  # past vLLM's own checks, which this machine would not pass
    assert refusal(config) == sentence_of(feature)


def test_a_scheduler_derived_from_ours_is_ours(llama: Path) -> None:
    class Mine(TangramScheduler):
        pass

    check_supported(configured(llama, scheduler_cls=Mine))


def test_another_worker_on_a_cpu_is_warned_of(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(own_classes.logger, "warning_once", lambda text, *names: warned.append(text % names))
    check_supported(configured(llama, worker_cls=CPU_WORKER))
    assert warned == []
    check_supported(configured(llama))
    assert f"without --worker-cls {CPU_WORKER}" in warned[0]


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged; vLLM's own loggers do not pass it on to pytest's, and lose their handlers to vLLM."""
    lines: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.tangram")
    logger.addFilter(note)
    yield lines
    logger.removeFilter(note)


def test_the_log_says_how_the_cache_is_cut_and_what_to_mind(llama: Path, said: list[str]) -> None:
    ours = {"tangram": {"retention": 0.25, "scope": "layer", "group_size": 5}}
    more = ["--kv-cache-memory-bytes", "100000000", "--additional-config", json.dumps(ours)]
    launch.check([*plain_options(llama), "--worker-cls", CPU_WORKER, *more])
    (line,) = [line for line in said if "retention 0.25" in line]
    own = Runtime.from_vllm(configured(llama, additional_config=ours))
    held = own.geometry.bytes(2048)
    for part in (
        f"{own.geometry.num_tiers} tiers, groups of 2 heads, ",
        f" kernels, pages of {own.geometry.page_bytes} bytes",
        f"a conversation of 2048 tokens takes {held / 2**20:.1f} MiB, {100000000 // held} fit into 95 MiB",
    ):
        assert part in line
    assert any("in scope layer a group holds at most" in warning for warning in said)
    assert any("no calibrated profile" in warning for warning in said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense (see tangram serve --help"),
        (
            ["--max-model-len", "9999999"],
            "vLLM refuses this: User-specified max_model_len (9999999) is greater",
        ),
        (["--enable-auto-tool-choice"], "vLLM refuses this: --enable-auto-tool-choice requires"),
        (["--config", "/no/such.yaml"], "vLLM refuses this: [Errno 2] No such file"),
        (
            ["--model", "one/two/three"],
            "MODEL: one/two/three is neither a directory nor a model that the hub",
        ),
        (["--additional-config", '{"tangram": {"group_size": 99}}'], "--tangram-group-size: must be at most"),
        (
            ["--additional-config", '{"tangram": {"scorer": "keyvalue_query"}}'],
            "the scorer keyvalue_query needs a profile's mean queries, and no profile decides (none",
        ),
    ],
)
def test_what_vllm_refuses_is_one_line_too(
    arguments: list[str], says: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TangramError) as error:
        launch.check([*plain_options(llama), *arguments])
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)
    assert "Traceback" not in capsys.readouterr().err


def test_a_fault_of_vllm_s_shows_its_stack_and_ends_in_a_line(
    monkeypatch: pytest.MonkeyPatch, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(launch.AsyncEngineArgs, "create_engine_config", broken)
    monkeypatch.setattr(sys, "argv", ["launch", *plain_options(llama)])
    monkeypatch.setattr(sys, "warnoptions", [])
    assert launch.main() == launch.USAGE_ERROR
    lines = capsys.readouterr().err.strip().splitlines()
    assert "Traceback (most recent call last):" in lines
    assert lines[-1] == "tangram: error: vLLM failed: KeyError: 'lost'"


@pytest.mark.parametrize(
    ("error", "says", "status"),
    [
        (ValueError("no such\nlayout"), "vLLM refuses this: no such layout", 2),
        (UnsupportedError("because"), "because", 2),
        (ValueError("Free memory is less than desired"), "vLLM failed: ValueError: Free memory is less", 1),
        (OSError("no space"), "vLLM failed: OSError: no space", 1),
        (None, "vLLM failed: RuntimeError: see above", 1),
    ],
)
def test_only_what_can_never_work_ends_with_status_2(
    error: Exception | None, says: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Memory that is missing at a start may still be held by the engine before: that is worth another try."""

    def start() -> None:
        if error is not None:
            Path(os.environ[VARIABLE]).write_text(why(error))
        raise RuntimeError("see above")

    monkeypatch.setattr(launch, "check", lambda _: None)
    monkeypatch.setattr(launch.entry, "main", start)
    monkeypatch.setattr(sys, "warnoptions", [])
    assert launch.main() == status
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"tangram: error: {says}")


def test_the_table_of_options_names_rows_that_exist() -> None:
    assert set(ASKED_BY) <= {row.feature for row in REFUSALS}


def test_drafts_are_refused_unless_they_are_n_grams_judged_before_the_next_step(llama: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = configured(llama, speculative_config=drafts)
    check_supported(config)
    config.scheduler_config.async_scheduling = True
    assert refusal(config) == sentence_of("this kind of speculative decoding")


def test_every_refusal_was_provoked() -> None:
    provoked = {*MODELS, TOGETHER, *(feature for feature, _ in OPTIONS), *(feature for feature, *_ in SET)}
    assert provoked == {row.feature for row in REFUSALS}
    assert len({row.feature for row in REFUSALS}) == len(REFUSALS)


def test_what_works_is_not_refused(llama: Path) -> None:
    check_supported(
        configured(
            llama,
            enable_lora=True,
            enable_prefix_caching=False,
            scheduling_policy="priority",
            stream_interval=4,
            max_num_seqs=1,
            watermark=0.1,
            cpu_offload_gb=0,
            kv_cache_dtype="auto",
            tensor_parallel_size=2,
        )
    )


def test_ranks_share_the_heads_of_the_whole_model(llama: Path, said: list[str]) -> None:
    """Two KV heads a layer: one for each. The profile and the fingerprints are the whole model's."""
    alone, two = (Runtime.from_vllm(configured(llama, tensor_parallel_size=ranks)) for ranks in (1, 2))
    assert two.shape == replace(alone.shape, ranks=2)
    assert (two.geometry.kv_heads, two.geometry.rank_heads) == (2, 1)
    size = ["--kv-cache-memory-bytes", "50000000"]
    launch.check([*plain_options(llama), "--worker-cls", CPU_WORKER, "-tp", "2", *size])
    (line,) = [line for line in said if "groups of 2 heads on 2 ranks" in line]
    assert "fit into 95 MiB of cache" in line, "both ranks' together"


def test_a_model_that_reads_sound_is_served_for_text(tmp_path: Path) -> None:
    module, architecture, config = MODELS["images, video and sound in a prompt"]
    _know(module, architecture)
    folder = write_config(tmp_path, **config | {"architectures": [architecture]})
    check_supported(configured(folder, language_model_only=True))


@pytest.mark.parametrize("argument", LAYER_FEATURES)
def test_layers_that_are_refused(argument: str) -> None:
    plain: dict[str, Any] = dict.fromkeys(LAYER_FEATURES)
    check_layer("decoder", plain | {"logits_soft_cap": 0.0})
    with pytest.raises(UnsupportedError, match=re.escape(LAYER_FEATURES[argument])):
        check_layer("decoder", plain | {argument: 30.0})


def test_arguments_of_a_layer_that_nobody_knows_are_refused() -> None:
    check_layer("decoder", {"novelty": None, "other": False})
    with pytest.raises(UnsupportedError, match="attention with novelty cannot be used"):
        check_layer("decoder", {"novelty": 3})


@pytest.mark.parametrize("kind", ["encoder_only", "encoder", "encoder_decoder"])
def test_attention_other_than_a_decoder_s_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{kind.replace('_', '-')} attention"):
        check_layer(kind, {})


def test_layers_of_another_shape_are_refused() -> None:
    check_shape(2, 16, 16, (2, 16))
    with pytest.raises(UnsupportedError, match="keys of 16 and values of 8 elements"):
        check_shape(2, 16, 8, (2, 16))
    with pytest.raises(
        UnsupportedError, match="a layer of 4 KV heads of 16 elements beside layers of 2 of 16"
    ):
        check_shape(4, 16, 16, (2, 16))


def test_a_process_tells_another_why_it_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = tmp_path / "reason"
    assert reason(where) == ""
    monkeypatch.setenv(VARIABLE, str(where))
    with pytest.raises(ZeroDivisionError), told():
        _ = 1 / 0
    assert reason(where) == ""
    with pytest.raises(TangramError), told():
        raise UnsupportedError("because")
    assert reason(where) == "because"


def test_what_vllm_says_of_a_process_that_failed_to_start_is_overheard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    where = tmp_path / "reason"
    monkeypatch.setenv(VARIABLE, str(where))
    listen()
    configure_logging(LoggingConfig())  # as a process of vLLM does after that
    logger = logging.getLogger(STARTERS[0])
    try:
        for message, error in (
            ("EngineCore encountered a fatal error.", ValueError("later")),
            (
                "EngineCore failed to start.",
                ValueError("1.0 GiB KV cache is needed,\nmore than KV cache memory"),
            ),
            ("EngineCore failed to start.", ValueError("see above")),
        ):
            try:
                raise error
            except ValueError:
                logger.exception(message)
    finally:
        for name in STARTERS:
            logging.getLogger(name).filters.clear()
    assert reason(where).startswith(
        "vLLM refuses this: 1.0 GiB KV cache is needed, more than KV cache memory Instead: raise "
    )


def test_the_sentence_is_the_last_that_the_terminal_shows(llama: Path, tmp_path: Path) -> None:
    """Asked for in a file, which only vLLM reads; a traceback of others would be the worst of answers."""
    options = tmp_path / "options.yaml"
    options.write_text("tensor-parallel-size: 4\nskip-tokenizer-init: true\n")
    run = subprocess.run(
        [sys.executable, "-m", "tangram", "serve", str(llama), "--config", str(options)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        cwd=tmp_path,
    )
    assert run.returncode == 2
    lines = run.stderr.strip().splitlines()
    assert (
        lines[-1] == f"tangram: error: {sentence_of('tensor parallelism that does not divide the KV heads')}"
    )
    assert "Traceback" not in run.stderr


def test_the_documented_table_has_every_refusal() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for row in REFUSALS:
        assert f"| {row.feature} |" in page, row.feature
    for name in LAYER_FEATURES.values():
        assert f"| {name} |" in page, name
