"""The command line, as a person meets it: help, text, figures, and one clear line when something is wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from conftest import FIXTURES, heed_interrupts
from redraft import __version__
from redraft.cli.report import summary_table
from redraft.decide import Summary

MODEL = str(FIXTURES / "kimi_k3.gguf")
TASKS = "\n".join(
    json.dumps(
        {
            "id": f"t{i}",
            "kind": kind,
            "turns": [
                {"content": "the thin end of the wedge " * 2, "max_tokens": 6},
                {"content": "in the end", "max_tokens": 5, "latency_s": 0.2},
            ],
        }
    )
    for i, kind in enumerate(("coding", "rewriting", "knowledge"))
)


def redraft(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "redraft", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "100"} | environment,
        timeout=120,
    )


def test_version() -> None:
    assert redraft("--version").stdout == f"redraft {__version__}\n"


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["decide"], ["serve"], ["plan"], ["verify"], ["fetch"]]
)
def test_help(command: list[str]) -> None:
    done = redraft(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_generate_streams_text_and_reports() -> None:
    plain = redraft("generate", "the thin the thin", "-m", MODEL, "-n", "20")
    drafted = redraft(
        "generate", "the thin the thin", "-m", MODEL, "-n", "20", "--draft", "ngram", "--depth", "3"
    )
    modelled = redraft("generate", "the thin the thin", "-m", MODEL, "-n", "20", "--draft", MODEL)
    for done in (plain, drafted, modelled):
        assert done.returncode == 0, done.stderr
        assert done.stdout == plain.stdout
        assert "tokens/s" in done.stderr
        assert "weights" in done.stderr
    assert "rollback" not in plain.stderr
    assert "accepted" in drafted.stderr
    assert "rollback" in drafted.stderr
    assert "draft weights" in modelled.stderr


def test_generate_as_json(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("the thin")
    done = redraft(
        "generate", "-f", str(tmp_path / "prompt"), "--json", "-m", MODEL,
        "-n", "9", "-t", "0.8", "--seed", "3",
        "--draft", MODEL, "--depth", "2", "--policy", "snapshot", "--chat",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert len(report["tokens"]) == 9
    assert report["finish_reason"] == "length"
    assert report["drafted"] >= report["accepted"] > 0
    assert report["bytes"]["recurrent state"] > 0
    assert report["policy"] == "snapshot"


def test_generate_reads_stdin() -> None:
    by_pipe = redraft("generate", "-f", "-", "-m", MODEL, "-n", "5", stdin="the thin")
    assert by_pipe.stdout == redraft("generate", "-p", "the thin", "-m", MODEL, "-n", "5").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "-m", MODEL], "no prompt"),
        (["generate", "x", "-p", "y", "-m", MODEL], "the prompt is given twice"),
        (["generate", "", "-m", MODEL], "the prompt is empty"),
        (
            ["generate", "x", "-m", "nowhere.gguf"],
            "'nowhere.gguf' is neither a file, a directory nor a known model",
        ),
        (["generate", "x", "-m", __file__], "not a GGUF file"),
        (["generate", "x", "-m", "smollm2"], "run 'redraft fetch smollm2' once"),
        (["generate", "x", "-m", MODEL, "--draft", "nowhere"], "'nowhere' is neither a file"),
        (["generate", "x", "-m", MODEL, "--ctx", "9999"], "context 9999 exceeds the model's 512"),
        (["generate", "x" * 300, "-m", MODEL, "--ctx", "64"], "leave no room in the context of 64"),
        (["generate", "x", "-m", MODEL, "-t", "-1"], "temperature must be 0 to 100, not -1"),
        (["generate", "x", "-m", MODEL, "--depth", "-2", "--draft", "ngram"], "depth must be 0 to 64"),
        (["generate", "x", "-m", MODEL, "--logit-bias", "a=b"], "logit bias 'a=b' must look like 42=-5.0"),
        (
            ["generate", "x", "-m", MODEL, "--logit-bias", "999=1"],
            "token 999 is outside the model's vocabulary",
        ),
        (["generate", "-f", "/no/such/file", "-m", MODEL], "cannot be read"),
        (["decide", "-m", MODEL, "--depth", "0"], "nothing to decide without speculation"),
        (["decide", "-m", MODEL, "--slots", "0"], "slots must be 1 to 4096, not 0"),
        (["decide", "-m", MODEL, "--limit", "0"], "limit must be at least 1 task, not 0"),
        (["decide", "-m", MODEL, "--budget", "many"], "'many' is no size; write it like 24GiB"),
        (["decide", "-m", MODEL, "--tasks", "/no/such/file"], "cannot be read"),
        (["decide", "-m", MODEL, "--json", "/no/such/folder/x"], "cannot write"),
        (["decide", "-m", MODEL], "can reach"),
        (["verify", "-m", MODEL, "--policy", "hope"], "policy must be all or one of replay"),
        (["verify", "-m", MODEL, "--slots", "1"], "slots must be at least 2 to compare neighbours, not 1"),
        (["verify", "-m", MODEL, "--depth", "0"], "depth must be at least 1"),
        (["verify", "-m", MODEL, "--off", "{}"], "--baseline and --off are about a server"),
        (["verify", "--server", "http://127.0.0.1:9", "--off", "no"], "--off takes a JSON object"),
        (["verify", "--server", "nowhere"], "'nowhere' is no URL of a server"),
        (["verify", "-m", MODEL, "--json", "/no/such/folder/x"], "cannot write"),
        (["serve", "--port", "70000"], "port must be 0 to 65535, not 70000"),
        (["serve", "--host", "no.such.host.invalid"], "cannot listen at no.such.host.invalid, port 8080"),
        (["serve", "--port", "0", "--max-requests", "0"], "max requests must be 1 or more, not 0"),
        (
            ["serve", "--port", "0", "--prefix-mib", "-1"],
            "prefix bytes must be 0 (off) or more, not -1048576",
        ),
        (["serve", "--port", "0", "--api-key", ""], "the API key is empty"),
        (["serve", "-m", MODEL, "--port", "0", "--ctx", "9999"], "context 9999 exceeds the model's 512"),
        (["fetch", "mini-k3"], "model 'mini-k3' comes with redraft: there is nothing to fetch"),
        (["fetch", "nothing"], "model 'nothing' is unknown; these can be fetched: smollm2"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = redraft(*arguments, REDRAFT_CACHE=str(tmp_path), COLUMNS="300")
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in done.stderr


def test_the_built_in_model_needs_no_argument(tmp_path: Path) -> None:
    """Every command on a machine that has nothing else, with the draft that comes with it."""
    alone = {"REDRAFT_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    plain = redraft("generate", "def read_lines(path):", "-n", "24", **alone)
    assert plain.returncode == 0, plain.stderr
    drafted = redraft("generate", "def read_lines(path):", "-n", "24", "-d", "mini-k3-draft", **alone)
    assert drafted.stdout == plain.stdout
    assert "drafted" in drafted.stderr
    decided = redraft("decide", "--limit", "1", "--json", "-", **alone)
    assert decided.returncode == 0, decided.stderr
    assert json.loads(decided.stdout)["model"] == "mini-k3"


@pytest.mark.parametrize("value", ["--policy=hope", "--kv-type=int3", "--depth=many", "--unknown"])
def test_unknown_values_are_refused(value: str) -> None:
    done = redraft("generate", "x", "-m", MODEL, value)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_decide_from_start_to_verdict(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    done = redraft(
        "decide", "-m", MODEL, "--tasks", str(tmp_path / "tasks.jsonl"), "--slots", "2", "--depth", "3",
        "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "verdict:" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert [run["num_completed"] for run in report["runs"]] == [3] * 6
    assert report["extra_bytes"] > 0
    assert report["verdict"]["decision"] in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"tasks.jsonl", "out.json"}


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    summary = Summary(
        arm="no speculation", concurrency=4, num_slots=4, depth=0, num_tasks=26, num_completed=26,
        failures={}, tasks_per_hour=16447.0, wall_s=9.0,
        task_s_median=0.65, task_s_p90=2.07, ttft_s_median=0.01,
        tpot_s_median=0.0016, num_tokens=999, num_drafted=2976, num_accepted=2369, tokens_per_step=4.19,
        accepted_by_kind={}, peak_bytes={}, resident_bytes=0,
    )  # fmt: skip
    console = Console(width=width, file=io.StringIO())
    console.print(summary_table([summary], width))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\u2026" not in text
    assert ("TTFT s" in text) == (width == 120)
    assert "2369 (80%)" in text


def test_decide_prints_json_alone_on_stdout(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    done = redraft(
        "decide", "-m", MODEL, "--tasks", str(tmp_path / "tasks.jsonl"), "--limit", "1", "--json", "-"
    )
    assert json.loads(done.stdout)["num_tasks"] == 1
    assert "verdict:" in done.stderr


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    many = [json.loads(line) for line in TASKS.splitlines()]
    tasks = [many[i % 3] | {"id": f"t{i}"} for i in range(3000)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(task) for task in tasks))
    process = subprocess.Popen(
        [sys.executable, "-m", "redraft", "decide", "-m", MODEL, "--tasks", str(tmp_path / "tasks.jsonl"),
         "--json", str(tmp_path / "out.json")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    while "more slots" not in process.stdout.readline():  # the plan is printed: the measurement begins
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted: no verdict from part of the queue" in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["verdict"] is None
    assert report["runs"][0]["num_completed"] < 3000
