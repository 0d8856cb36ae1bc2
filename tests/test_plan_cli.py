"""`redraft plan` as a user meets it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from gguf import GGUFWriter
from typer.testing import CliRunner, Result

from redraft.cli import app as cli
from redraft.cli.plan import plan
from redraft.errors import RedraftError

app = typer.Typer(pretty_exceptions_enable=False)
app.command("plan")(plan)


def run(*arguments: str, columns: int = 120) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def run_json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


DOCS = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(\$ redraft plan .*?)```", DOCS, re.DOTALL)


@pytest.mark.parametrize("example", [block for block in BLOCKS if "--check" not in block])
def test_the_documented_output_is_the_real_one(example: str) -> None:
    command, *lines = example.splitlines()
    output = " ".join(run(*shlex.split(command)[3:], columns=108).stdout.split())
    for line in lines:
        part = " ".join(line.split("(…)")[0].replace("…", "").split())
        assert part in output


@pytest.mark.parametrize(("depth", "printed"), [(0, "1772.44"), (7, "14179.50")])
def test_the_published_figures_of_kimi_k3(depth: int, printed: str) -> None:
    found = run_json("kimi-k3", "--engine", "llama.cpp", "--slots", "4", "--depth", str(depth))
    assert found["printed"]["RS_MiB"] == printed
    held = [term for term in found["terms"] if term["group"] in ("recurrent state", "conv", "rollback")]
    assert sum(term["bytes"] for term in held) == {0: 1772.4375, 7: 14179.5}[depth] * 2**20
    assert all(term["accuracy"] == "exact" for term in held)


def test_json_has_one_object_with_terms_that_add_up() -> None:
    found = run_json("qwen3.6-27b", "--engine", "vllm", "--tp", "2", "--draft", "mtp", "--budget", "80GB")
    assert found["total_bytes"] == sum(t["bytes"] for t in found["terms"] if t["place"] == "device")
    assert {item["engine"] for item in found["comparison"]} == {"vllm", "sglang"}
    assert found["frontier"]["margin_percent"] == 8.0
    assert found["frontier"]["points"]
    assert "more slots without it" in found["trade"]["sentence"]


def test_the_table_names_formulas_accuracy_and_the_trade() -> None:
    result = run("kimi-k3", "--engine", "llama.cpp", "--ctx", "256")
    assert result.exit_code == 0
    for part in (
        "rollback planes", "12407.06", "RS_MiB 14179.50", "n_rs_seq × (R + S + P)", "estimate",
        "gives the logged 304.00 MiB",
        "12.1 GiB on llama.cpp: 27 more slots without it", "0.6 GiB here: 1 slot",
        "llama-server -m kimi-k3 -c 1024 -np 4", "redraft serve --model kimi-k3 --slots 4",
        "vllm serve kimi-k3", "sglang.launch_server", "R rollback",
    ):  # fmt: skip
        assert part in " ".join(result.stdout.split()), part


def test_solving_names_the_margin_and_launches_what_fits() -> None:
    arguments = (
        "qwen3.6-27b",
        "--weights",
        "q4_k",
        "--engine",
        "llama.cpp",
        "--ctx",
        "32768",
        "--depth",
        "3",
    )
    text = " ".join(run(*arguments, "--draft", "mtp", "--budget", "24GiB", "--solve").stdout.split())
    assert "usable 22.1 GiB after a safety margin of 8 %" in text
    assert "what fits on llama.cpp" in text
    assert "llama-server -m qwen3.6-27b -c 65536 -np 2" in text
    wider = " ".join(run(*arguments, "--budget", "24GiB", "--margin", "0").stdout.split())
    assert "usable 24.0 GiB after a safety margin of 0 %" in wider


def test_our_own_launch_line_is_one_that_serve_takes() -> None:
    lines = re.findall(r"redraft serve [^\n]*", run("mini-k3", "--depth", "3", columns=400).stdout)
    assert lines
    words = shlex.split(lines[0])[2:]
    known = {o for p in typer.main.get_command(cli).commands["serve"].params for o in p.opts}  # type: ignore[attr-defined]
    assert {word for word in words if word.startswith("--")} <= known
    assert words[words.index("--depth") + 1] == "3"


def test_depths_can_be_compared() -> None:
    text = run("kimi-k3", "--engine", "llama.cpp", "--compare", "depths").stdout
    assert [f"depth {depth} " in text for depth in (0, 1, 3, 7)] == [True] * 4


ABSURD = [
    (("kimi-k3", "--slots", "-3"), "slots must be 1 to 1048576, not -3"),
    (("kimi-k3", "--ctx", "0"), "context must be 1 to"),
    (("kimi-k3", "--ctx", "2000000"), "more than the 1048576 tokens that 'kimi-k3' allows"),
    (("kimi-k3", "--depth", "-1"), "depth must be 0 to 64"),
    (("kimi-k3", "--engine", "ollama"), "engine must be one of redraft, llama.cpp, vllm, sglang"),
    (("kimi-k3", "--policy", "hope"), "policy on redraft must be one of"),
    (("kimi-k3", "--kv-type", "q8_0"), "KV type on redraft must be one of"),
    (("kimi-k3", "--tp", "2"), "does not split heads over devices"),
    (("kimi-k3", "--budget", "24GiB", "--solve"), "but weights take 1.4 TiB; use a larger budget"),
    (("kimi-k3", "--budget", "plenty"), "'plenty' is no size"),
    (("kimi-k3", "--budget", "2TiB", "--margin", "100"), "the safety margin must be 0 to below 100 %"),
    (("kimi-k3", "--solve"), "--solve needs a --budget"),
    (("kimi-k3", "--compare", "apples"), "--compare takes engines or depths, not 'apples'"),
    (("kimi-k3", "--draft", "mtp"), "'kimi-k3' has no MTP layers"),
    (
        ("kimi-k3", "--draft", "no-such-file"),
        "'no-such-file' is neither a file, a directory nor a known model",
    ),
    (("kimi-k3", "--draft", "model"), "--draft takes mtp, ngram"),
    (("kimi-k3", "--weights", "heavy"), "'heavy' is no size"),
    (("qwen3.8-flash-next", "--weights", "q4_k"), "is not known; give a size like 17GiB"),
    (("kimi-k4",), "'kimi-k4' is neither a file, a directory nor a known model; these are known: falcon"),
    (("kimi-k3", "--check"), "--check needs a model's files; 'kimi-k3' is only a description"),
    (("kimi-k3", "--plot", "picture.gif"), "'picture.gif': a picture's name must end in .svg, .png, .pdf"),
    (("kimi-k3", "--plot", "/no/such/folder/picture.svg"), "cannot write '/no/such/folder/picture.svg'"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), ABSURD, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_a_mistake_is_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    """The command line turns a `RedraftError` into one line on stderr and exit code 2."""
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    error = run(*arguments).exception
    assert isinstance(error, RedraftError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        assert run("kimi-k3", "--plot", str(tmp_path / name)).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert all(
        word in text for word in ("rollback", "recurrent state", "llama.cpp, KV f16", "GiB, without weights")
    )


def test_a_picture_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = run("kimi-k3", "--plot", str(tmp_path / "a.svg")).exception
    assert isinstance(error, RedraftError)
    assert str(error) == "a picture needs matplotlib: pip install 'redraft[plot]'"


def write_llama(path: Path) -> Path:
    """A llama of two layers with random weights."""
    rng, hidden, inner, vocab = np.random.default_rng(0), 32, 64, 96
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.vocab_size", vocab)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm": (hidden,), f"blk.{i}.attn_q": (hidden, hidden),
            f"blk.{i}.attn_k": (hidden // 2, hidden), f"blk.{i}.attn_v": (hidden // 2, hidden),
            f"blk.{i}.attn_output": (hidden, hidden), f"blk.{i}.ffn_norm": (hidden,),
            f"blk.{i}.ffn_gate": (inner, hidden), f"blk.{i}.ffn_up": (inner, hidden),
            f"blk.{i}.ffn_down": (hidden, inner),
        }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_check_loads_the_model_and_agrees(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    result = run(str(model), "--ctx", "128", "--slots", "3", "--check")
    assert result.exit_code == 0, result.output
    planned = mib(3 * 128 * 2 * (2 * 8) * 2 * 4)
    assert f"state     planned {planned} MiB, allocated {planned} MiB" in result.stdout
    assert "resident  grew by" in result.stdout


def mib(count: int) -> str:
    return f"{count / 2**20:.2f}"
