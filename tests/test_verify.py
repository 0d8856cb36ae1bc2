"""`redraft verify` on our own engine: quiet if it is sound; red, at the right place, for planted faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import planted_faults as faults
from conftest import FAMILIES, FIXTURES, POLICIES, REFERENCE, TABLE, heed_interrupts, model
from redraft.cli import main
from redraft.errors import ConfigError
from redraft.ops import Ops
from redraft.state.slots import StatePool
from redraft.verify import CHECKS, CheckResult, Subject, full, quick, run_check, run_checks
from redraft.verify.difference import Comparison

Plant = Callable[[pytest.MonkeyPatch], None]


def subject(family: str = "kimi_k3", *policies: str, depth: int = 3, table: Ops = REFERENCE) -> Subject:
    """The reference unless another table is given: the faults are planted there, where they can be read."""
    loaded = model(family, table=table)
    return Subject(loaded, table, depth=depth, num_slots=3, policies=policies or POLICIES)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_engine_passes(family: str) -> None:
    policies = POLICIES if family == "kimi_k3" else ("replay",)
    results = list(run_checks(subject(family, *policies, table=TABLE), quick(3)))
    assert [r.name for r in results] == list(CHECKS)
    for result in results:
        assert result.passed, result
        assert result.num_comparisons > 0
        assert result.difference is None
    limited = {r.name for r in results if r.limit}
    assert bool(limited) == (family == "llama")


def test_a_draft_model_is_among_the_drafters() -> None:
    made = Subject(
        model("kimi_k3"), TABLE, depth=3, num_slots=3, policies=("replay",), draft_model=model("kimi_linear")
    )
    effort = replace(quick(3), num_output=4)
    with_model = run_check("drafter independence", made, effort)
    assert with_model.passed
    without = run_check("drafter independence", subject("kimi_k3", "replay"), effort)
    assert with_model.num_comparisons > without.num_comparisons


def test_more_effort_compares_more() -> None:
    name = "rollback at every accept count"
    few, many = (
        run_check(name, subject("kimi_k3", "replay", depth=1), effort(1)) for effort in (quick, full)
    )
    assert few.passed
    assert many.passed
    assert many.num_comparisons > 5 * few.num_comparisons


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_slots": 1}, "slots must be at least 2"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"depth": 500}, "the model has 512"),
    ],
)
def test_what_cannot_be_checked_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Subject(model("kimi_k3"), TABLE, **settings)  # type: ignore[arg-type]


def test_bytes_are_compared_not_numbers() -> None:
    compare = Comparison()
    nan = np.full((1, 3), np.nan, np.float32)
    compare.logits(nan, nan.copy(), slot=0, position=5, case="equal NaNs")
    assert compare.first is None
    zero = np.zeros((2, 3), np.float32)
    other = zero.copy()
    other[1, 2] = -0.0
    compare.logits(zero, other, slot=4, position=5, case="minus zero")
    assert compare.first is not None
    assert (compare.first.position, compare.first.index, compare.first.slot) == (6, (2,), 4)
    assert compare.num_comparisons == 2


FAULTS: list[tuple[Plant, str, str, str]] = [  # fault, check it must turn red, policy, where
    (faults.rows_depend_on_each_other, "row independence", "replay", "layer 0, "),
    (faults.conv_history_lost_between_chunks, "split prefill", "replay", "layer 0, "),
    (faults.rows_stored_one_place_off_in_chunks, "split prefill", "replay", ", keys, slot 1, position "),
    (faults.state_written_during_verify, "verify is read-only", "replay", "layer 0, state, slot 1"),
    (faults.conv_window_not_rolled_back, "rejected tail leaves no trace", "replay", "layer 0, conv, slot 1"),
    (faults.plane_off_by_one, "rollback at every accept count", "snapshot", "layer 0, conv, slot 1"),
    (
        faults.pending_records_not_consumed,
        "rollback at every accept count",
        "replay",
        "layer 0, state, slot 1",
    ),
    (faults.fold_forgets_the_decay, "rollback at every accept count", "replay", "layer 0, state, slot 1"),
    (
        faults.consumed_tokens_not_run_again,
        "rollback at every accept count",
        "checkpoint",
        "layer 0, conv, slot 1",
    ),
    (faults.copy_not_restored_after_a_dropped_round, "dropped round", "checkpoint", "slot 1"),
    (
        faults.earlier_windows_not_replayed,
        "round extended window by window",
        "replay",
        "logits, slot 1, position ",
    ),
    (faults.attention_reads_a_row_too_many, "poisoned pools", "replay", ", slot 1"),
    (faults.conv_window_not_cleared, "poisoned pools", "replay", "layer 0, state, slot 1"),
    (faults.padding_row_writes_slot_0, "sequence isolation", "replay", "layer 0, state, slot 0"),
    (faults.state_not_cleared, "slot reuse", "replay", "layer 0, conv, slot 1"),
    (
        faults.value_written_beside_pending_records,
        "value moved to a dirty slot",
        "replay",
        "layer 0, state, slot 0",
    ),
    (faults.rows_not_moved, "value moved to a dirty slot", "replay", ", keys, slot 0, position 0"),
    (faults.restored_state_is_zero, "saved and restored", "replay", "token, slot "),
    (faults.kept_state_of_another_prefix, "prefix hit", "replay", "token, slot "),
    (faults.noise_keyed_by_step, "drafter independence", "replay", "token, slot 0, position "),
    (faults.first_draft_not_compared, "drafter independence", "replay", "token, slot 0, position "),
    (faults.whole_window_committed, "drafter independence", "replay", "token, slot 0, position "),
]


@pytest.mark.parametrize(
    ("plant", "check", "policy", "place"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_fault_turns_its_check_red(
    plant: Plant, check: str, policy: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)  # without it the check passes: see the sound engine above
    result = run_check(check, subject("kimi_k3", policy), quick(3))
    assert not result.passed
    assert result.difference is not None, result
    assert place in str(result.difference)
    assert policy in result.difference.case


def test_every_check_has_a_planted_fault() -> None:
    assert {check for _, check, _, _ in FAULTS} == set(CHECKS)


def test_an_exception_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_):
        raise IndexError("plane 9 of 8")

    monkeypatch.setattr(StatePool, "commit", failing)
    result = run_check("dropped round", subject("kimi_k3", "replay"), quick(3))
    assert result == CheckResult(
        "dropped round", False, "stopped by IndexError: plane 9 of 8", 0, seconds=result.seconds
    )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "redraft", "verify", "-m", str(FIXTURES / "kimi_k3.gguf"), *arguments]


def test_the_command_writes_a_table_and_json(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = subprocess.run(
        command("--policy", "replay", "--depth", "2", "--draft", "ngram", "--json", str(target)),
        capture_output=True, text=True, check=False, timeout=120, env=os.environ | {"COLUMNS": "160"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{len(CHECKS)} checks passed" in done.stdout
    report = json.loads(target.read_text())
    assert report["whole"]
    assert report["policies"] == ["replay"]
    assert [result["name"] for result in report["results"]] == list(CHECKS)
    assert all(result["passed"] for result in report["results"])


def test_a_failed_check_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.plane_off_by_one(monkeypatch)
    monkeypatch.setattr(sys, "argv", command("--policy", "snapshot", "--depth", "2", "--slots", "2")[2:])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "layer 0, conv, slot 1" in out


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    process = subprocess.Popen(
        command("--full", "--json", str(target)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert process.stdout is not None
    process.stdout.readline()  # what will be checked: the first check begins
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted: the rest was not verified" in out
    assert not json.loads(target.read_text())["whole"]
