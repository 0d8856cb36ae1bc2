"""Descriptions from files: GGUF headers (whole, split, huge, damaged), config.json, safetensors headers."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.errors import ModelFileError
from redraft.plan import PlanSettings, open_spec, plan
from redraft.plan.hf import spec_from_config
from redraft.plan.spec import WeightGroup


def write_gguf(
    path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, int] | None = None
) -> Path:
    """A GGUF file with metadata; `tensors` maps names to float32 counts."""
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = f"{architecture}.{key}"
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(name, value)
    for name, count in (tensors or {}).items():
        writer.add_tensor(name, np.zeros(count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


QWEN35 = {
    "block_count": 64, "context_length": 262144, "embedding_length": 5120, "vocab_size": 248320,
    "attention.head_count": 24, "attention.head_count_kv": 4, "attention.key_length": 256,
    "attention.value_length": 256, "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 128,
    "ssm.group_count": 16, "ssm.time_step_rank": 48, "ssm.inner_size": 6144,
}  # fmt: skip
KIMI = {
    "block_count": 27, "context_length": 1048576, "embedding_length": 2304, "vocab_size": 163840,
    "attention.head_count": 32, "attention.head_count_kv": [0, 0, 0, 1] * 6 + [0, 0, 1],
    "attention.key_length": 576, "attention.value_length": 72,  # a published file's own, misleading value
    "attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.kv_lora_rank": 512,
    "rope.dimension_count": 64, "ssm.conv_kernel": 4, "kda.head_dim": 128,
}  # fmt: skip
MAMBA2 = {
    "embedding_length": 1536, "vocab_size": 100352, "context_length": 131072, "attention.head_count": 12,
    "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1, "ssm.time_step_rank": 48,
    "ssm.inner_size": 3072,
}  # fmt: skip
GRANITE = MAMBA2 | {
    "block_count": 40,
    "attention.head_count_kv": [4 if i in (5, 15, 25, 35) else 0 for i in range(40)],
}
NEMOTRON_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON = MAMBA2 | {
    "block_count": 52, "embedding_length": 2688, "vocab_size": 131072, "context_length": 262144,
    "attention.key_length": 128, "attention.value_length": 128, "attention.head_count": 32,
    "attention.head_count_kv": [2 if kind == "*" else 0 for kind in NEMOTRON_PATTERN],
    "feed_forward_length": [1856 if kind == "E" else 0 for kind in NEMOTRON_PATTERN],
    "ssm.group_count": 8, "ssm.time_step_rank": 64, "ssm.inner_size": 4096,
}  # fmt: skip
FALCON = MAMBA2 | {
    "block_count": 24, "embedding_length": 2048, "vocab_size": 65537, "attention.head_count": 8,
    "attention.head_count_kv": 2, "attention.key_length": 128, "attention.value_length": 128,
    "ssm.state_size": 256,
}  # fmt: skip
LFM2 = {
    "block_count": 16, "embedding_length": 2048, "vocab_size": 65536, "context_length": 128000,
    "attention.head_count": 32, "shortconv.l_cache": 3,
    "attention.head_count_kv": [8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(16)],
}  # fmt: skip
RWKV = {
    "block_count": 32, "embedding_length": 2560, "vocab_size": 65536, "wkv.head_size": 64,
    "attention.head_count": 0,
}  # fmt: skip
GEMMA3 = {
    "block_count": 26, "embedding_length": 1152, "vocab_size": 262144, "context_length": 32768,
    "attention.head_count": 4, "attention.head_count_kv": 1, "attention.key_length": 256,
    "attention.value_length": 256, "attention.sliding_window": 512,
}  # fmt: skip
FALCON_MAMBA = {
    "block_count": 64, "embedding_length": 4096, "vocab_size": 65024, "ssm.conv_kernel": 4,
    "ssm.state_size": 16, "ssm.inner_size": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "keys", "name"),
    [
        ("qwen35", QWEN35, "qwen3.6-27b"),
        ("kimi-linear", KIMI, "kimi-linear-48b"),
        ("granitehybrid", GRANITE, "granite-4.0-h-tiny"),
        ("nemotron_h_moe", NEMOTRON, "nemotron-3-nano-30b-a3b"),
        ("falcon-h1", FALCON, "falcon-h1-1.5b"),
        ("lfm2", LFM2, "lfm2-1.2b"),
        ("rwkv7", RWKV, "rwkv7-2.9b"),
        ("mamba", FALCON_MAMBA, "falcon-mamba-7b"),
    ],
)
def test_a_gguf_header_says_what_the_catalogue_says(
    tmp_path: Path, architecture: str, keys: dict[str, Any], name: str
) -> None:
    read, known = open_spec(write_gguf(tmp_path / "model.gguf", architecture, keys)), open_spec(name)
    assert read.layers == known.layers
    assert (read.architecture, read.rule) == (known.architecture, known.rule)
    assert (read.hidden_size, read.vocab_size) == (known.hidden_size, known.vocab_size)


def test_blocks_of_the_draft_head_are_apart(tmp_path: Path) -> None:
    keys = QWEN35 | {"block_count": 65, "nextn_predict_layers": 1}
    tensors = {"token_embd.weight": 100, "blk.63.attn_q.weight": 30, "blk.64.attn_q.weight": 7}
    spec = open_spec(write_gguf(tmp_path / "model.gguf", "qwen35", keys, tensors))
    assert (len(spec.layers), len(spec.recurrent), len(spec.mtp_layers)) == (64, 48, 1)
    assert spec.mtp_layers[0] == spec.layers[63]
    assert (spec.weight_bytes(mtp=False), spec.weight_bytes(mtp=True)) == (520, 28)
    with_head = plan(spec, PlanSettings(engine="llama.cpp", depth=2, drafter="mtp")).group_bytes()
    assert (with_head["weights"], with_head["draft weights"]) == (520, 28)
    assert "draft weights" not in plan(spec, PlanSettings(engine="llama.cpp", drafter="ngram")).group_bytes()


def test_all_parts_of_a_split_file_are_counted(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", "qwen35", QWEN35, {"token_embd.weight": 100})
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", "qwen35", {}, {"blk.1.attn_q.weight": 30})
    assert open_spec(first).weights == open_spec(second).weights == (WeightGroup("F32", 520),)
    second.unlink()
    with pytest.raises(ModelFileError, match="part of the split model is missing"):
        open_spec(first)


def test_half_a_terabyte_is_planned_from_its_header(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen35", QWEN35, {"token_embd.weight": 8})
    header = path.read_bytes()
    name = b"token_embd.weight"
    at = header.index(name) + len(name)
    num_axes, _, kind, offset = struct.unpack_from("<IQIQ", header, at)
    count = 500 * 10**9 // 4 // 32 * 32
    patched = bytearray(header)
    struct.pack_into("<IQIQ", patched, at, num_axes, count, kind, offset)
    path.write_bytes(patched)
    try:
        os.truncate(path, len(header) + 4 * count)
    except OSError:
        pytest.skip("the file system has no sparse files of this size")
    started = time.perf_counter()
    spec = open_spec(path)
    assert spec.weights == (WeightGroup("F32", 4 * count),)
    assert time.perf_counter() - started < 2  # a machine may be busy; reading the data would take minutes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGU", "3 bytes are no GGUF file"),
        (b"", "0 bytes are no GGUF file"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 5, 9**9) + bytes(20), "ends inside its header|is unknown"),
    ],
)
def test_a_file_that_is_no_model_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        open_spec(path)


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "perceptron", {"block_count": 1})
    with pytest.raises(
        ModelFileError, match=r"architecture 'perceptron' cannot be planned; these can: .*kimi-k3"
    ):
        open_spec(path)


def write_directory(path: Path, config: dict[str, Any], tensors: dict[str, tuple[str, int]]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header, at = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)  # the data is never read
    return path


GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 1152, "vocab_size": 262144, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "sliding_window_pattern": 6, "max_position_embeddings": 32768,
    },
}  # fmt: skip


def test_a_directory_is_described_by_its_headers(tmp_path: Path) -> None:
    tensors = {"model.embed.weight": ("BF16", 640), "mtp.fc.weight": ("BF16", 40), "model.x": ("F8_E4M3", 9)}
    spec = open_spec(write_directory(tmp_path / "gemma", GEMMA, tensors))
    assert spec.weights == (
        WeightGroup("BF16", 640),
        WeightGroup("F8_E4M3", 9),
        WeightGroup("BF16", 40, True),
    )
    assert spec.weights_exact
    assert [layer.window for layer in spec.layers[:7]] == [512] * 5 + [0, 512]
    assert (len(spec.attention), spec.architecture) == (26, "gemma3")


def test_sliding_layers_keep_a_window_and_full_ones_everything(tmp_path: Path) -> None:
    spec = open_spec(write_directory(tmp_path / "gemma", GEMMA, {}))
    found = plan(spec, PlanSettings(engine="llama.cpp", slots=1, context=32768, depth=0))
    row = 256 * 2
    assert found.printed["K_MiB"] == f"{(22 * 1024 + 4 * 32768) * row / 2**20:.2f}"


def test_newer_and_older_spellings_of_kda_agree(tmp_path: Path) -> None:
    old = open_spec("kimi-linear-48b")
    config = {
        "model_type": "kimi_linear", "hidden_size": 2304, "vocab_size": 163840, "model_max_length": 1048576,
        "num_hidden_layers": 27, "num_attention_heads": 32, "head_dim": 72, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
        "layer_types": [
            "full_attention" if layer.state.attention else "linear_attention" for layer in old.layers
        ],
    }  # fmt: skip
    assert open_spec(write_directory(tmp_path / "kimi", config, {})).layers == old.layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "perceptron"}, "model type 'perceptron' cannot be planned; these can: .*kimi_k3"),
        ({}, "lacks 'model_type'"),
        ({"model_type": "lfm2", "hidden_size": 8}, "lacks 'conv_L_cache'"),
        ({"model_type": "llama", "num_attention_heads": "many"}, "must be a whole number, not 'many'"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        open_spec(write_directory(tmp_path / "model", config, {}))


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, struct.pack("<Q", 2**60), struct.pack("<Q", 4) + b"nope"]
)
def test_a_damaged_safetensors_header_is_named(tmp_path: Path, content: bytes) -> None:
    path = write_directory(tmp_path / "gemma", GEMMA, {})
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors: no valid safetensors header"):
        open_spec(path)


JUNK = st.sampled_from([0, -1, 2**40, True, None, "x", [], {}, [0], ["x"], 1.5])
CATALOGUE = resources.files("redraft.plan").joinpath("catalogue.json").read_text(encoding="utf-8")
CONFIGS = json.loads(CATALOGUE)["models"]


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(CONFIGS)), data=st.data())
def test_junk_in_a_config_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    config = dict(CONFIGS[name]["config"])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2)):
        config[key] = data.draw(JUNK)
    try:
        spec = spec_from_config(config, name=name, source="test")
    except ModelFileError:
        return
    assert plan(spec, PlanSettings(engine="llama.cpp")).total_bytes >= 0


HEADERS = {
    "qwen35": QWEN35, "kimi-linear": KIMI, "granitehybrid": GRANITE, "nemotron_h_moe": NEMOTRON,
    "falcon-h1": FALCON, "lfm2": LFM2, "rwkv7": RWKV, "mamba": FALCON_MAMBA, "gemma3": GEMMA3,
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(architecture=st.sampled_from(sorted(HEADERS)), data=st.data())
def test_junk_in_a_header_is_refused_or_harmless(architecture: str, data: st.DataObject) -> None:
    keys = dict(HEADERS[architecture])
    key = data.draw(st.sampled_from(sorted(keys)))
    keys[key] = data.draw(st.sampled_from([0, 1, 7, 2**32 - 1, [0], [1, 2, 3]]))
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "model.gguf", architecture, keys)
        try:
            spec = open_spec(path)
        except ModelFileError:
            return
        assert plan(spec, PlanSettings(engine="llama.cpp")).total_bytes >= 0


def test_a_gguf_pattern_says_which_layers_slide(tmp_path: Path) -> None:
    spec = open_spec(write_gguf(tmp_path / "model.gguf", "gemma3", GEMMA3))
    assert [layer.window for layer in spec.layers] == ([512] * 5 + [0]) * 4 + [512] * 2


@pytest.mark.parametrize("name", ["hf:Qwen/Qwen3.6-27B", "https://example.org/model.gguf"])
def test_nothing_comes_from_the_network(name: str) -> None:
    with pytest.raises(ModelFileError, match="nothing is read from the network"):
        open_spec(name)


def test_weights_can_be_given() -> None:
    assert open_spec("qwen3.6-27b", "17.5GiB").weight_bytes(mtp=False) == 35 * 2**29
    assert open_spec("qwen3.6-27b", "q8_0").weight_bytes(mtp=False) == 27 * 10**9 * 34 // 32
    assert (
        plan(open_spec("qwen3.8-flash-next"), PlanSettings())
        .notes[-1]
        .startswith("the weights are not counted")
    )
