"""`redraft verify` on our own engine: quiet if it is sound; red, at the right place, for planted faults."""

from __future__ import annotations

import itertools
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

from conftest import FAMILIES, FIXTURES, POLICIES, REFERENCE, TABLE, model
from redraft.cli import main
from redraft.engine import engine as engine_module
from redraft.errors import ConfigError
from redraft.ops import Ops, reference
from redraft.runner import Runner
from redraft.speculate import drafters, sampling
from redraft.state import rollback
from redraft.state.checkpoint import Checkpoint
from redraft.state.kv import KVCache
from redraft.state.replay import Replay
from redraft.state.slots import StatePool
from redraft.state.snapshot import Snapshot
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


def rows_depend_on_each_other(patch: pytest.MonkeyPatch) -> None:
    """A product of all rows at once: its summation order depends on their number."""

    def linear(x, w, bias=None):
        out = x @ w.T if len(x) < 3 else (x[:, ::-1] @ w[:, ::-1].T)
        return out if bias is None else out + bias

    patch.setattr(reference, "linear", linear)


def conv_history_lost_between_chunks(patch: pytest.MonkeyPatch) -> None:
    whole = reference.short_conv
    patch.setattr(
        reference,
        "short_conv",
        lambda x, weight, history, starts: whole(
            x, weight, history if len(x) > 1 else np.zeros_like(history), starts
        ),
    )


def rows_stored_one_place_off_in_chunks(patch: pytest.MonkeyPatch) -> None:
    whole = KVCache.attention

    def attention(self, layer, q, k, v, scale, batch):
        first = int(batch.positions[0])
        if len(batch.slots) == 1 and first and batch.advance[0]:
            batch = replace(batch, positions=batch.positions - 1)
        return whole(self, layer, q, k, v, scale, batch)

    patch.setattr(KVCache, "attention", attention)


def state_written_during_verify(patch: pytest.MonkeyPatch) -> None:
    whole = reference.delta_scan

    def delta_scan(q, k, v, decay, beta, *, state, windows, advance, **rest):
        out = whole(q, k, v, decay, beta, state=state, windows=windows, advance=advance, **rest)
        if len(q):  # not the fold of a read
            state[windows.slots] += np.float32(1e-3) * ~advance[:, None, None, None]
        return out

    patch.setattr(reference, "delta_scan", delta_scan)


def conv_window_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """The matrix of state goes back to the kept count, the conv window keeps the whole window."""

    def commit(self, slot, num_consumed, num_proposed):
        for layer in self.layers:
            self._cursor[layer][slot] = self._columns(layer, slot, num_proposed, 1)[0]
            self._pending[layer][slot] = num_consumed
        return True

    patch.setattr(Replay, "commit", commit)


def plane_off_by_one(patch: pytest.MonkeyPatch) -> None:
    whole = Snapshot.commit
    patch.setattr(
        Snapshot, "commit", lambda self, slot, kept, proposed: whole(self, slot, max(kept - 1, 1), proposed)
    )


def pending_records_not_consumed(patch: pytest.MonkeyPatch) -> None:
    """The pass folds the committed records in and forgets to say so: they are folded in twice."""
    whole = Replay.delta_rule

    def delta_rule(self, layer, *args):
        pending = self._pending[layer].copy()
        out = whole(self, layer, *args)
        self._pending[layer][:] = pending
        return out

    patch.setattr(Replay, "delta_rule", delta_rule)


def fold_forgets_the_decay(patch: pytest.MonkeyPatch) -> None:
    def fold(state, _decay, k, u):
        state += reference._outer(k, u)

    patch.setattr(reference, "_fold", fold)


def consumed_tokens_not_run_again(patch: pytest.MonkeyPatch) -> None:
    whole = Runner.commit

    def commit(self, slots, counts):
        before = self.pool._policy.commit
        self.pool._policy.commit = lambda *args: before(*args) or True
        whole(self, slots, counts)

    patch.setattr(Runner, "commit", commit)


def copy_not_restored_after_a_dropped_round(patch: pytest.MonkeyPatch) -> None:
    def begin(self, batch):
        for n, slot in enumerate(batch.slots):
            if not batch.num_before[n] and not batch.advance[n] and not self._open[slot]:
                self._move(slot, "state", "state copy")
                self._move(slot, "conv", "conv copy")
                self._open[slot] = True

    patch.setattr(Checkpoint, "begin", begin)


def earlier_windows_not_replayed(patch: pytest.MonkeyPatch) -> None:
    whole = reference.delta_scan

    def delta_scan(*args, num_replayed, **rest):
        return whole(*args, num_replayed=np.zeros_like(num_replayed), **rest)

    patch.setattr(reference, "delta_scan", delta_scan)


def attention_reads_a_row_too_many(patch: pytest.MonkeyPatch) -> None:
    whole = reference.attention
    patch.setattr(
        reference,
        "attention",
        lambda q, keys, values, *, windows, positions, scale: whole(
            q, keys, values, windows=windows, positions=positions + 1, scale=scale
        ),
    )


def conv_window_not_cleared(patch: pytest.MonkeyPatch) -> None:
    def reset(self, slot):
        for layer, arrays in self.arrays.items():
            arrays["state"][slot] = 0
            self._pending[layer][slot] = 0

    patch.setattr(Replay, "reset", reset)


def padding_row_writes_slot_0(patch: pytest.MonkeyPatch) -> None:
    whole = reference.delta_scan

    def delta_scan(q, k, v, decay, beta, *, state, **rest):
        out = whole(q, k, v, decay, beta, state=state, **rest)
        if len(q) and len(state) > 1:
            state[0] *= np.float32(0.5)
        return out

    patch.setattr(reference, "delta_scan", delta_scan)


def state_not_cleared(patch: pytest.MonkeyPatch) -> None:
    """Only the length is forgotten, as for attention rows."""
    patch.setattr(rollback.RollbackPolicy, "reset", lambda *_: None)


def value_written_beside_pending_records(patch: pytest.MonkeyPatch) -> None:
    whole = Replay.write

    def write(self, layer, slot, value):
        pending = int(self._pending[layer][slot])
        whole(self, layer, slot, value)
        self._pending[layer][slot] = pending if value.state.ndim else 0

    patch.setattr(Replay, "write", write)


def rows_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "write", lambda *_: None)


def noise_keyed_by_step(patch: pytest.MonkeyPatch) -> None:
    steps = itertools.count()
    whole = reference.gumbel_noise
    patch.setattr(reference, "gumbel_noise", lambda seed, _, size: whole(seed, next(steps) % 50 + 1, size))
    assert sampling.choose is drafters.choose  # both would use it


def first_draft_not_compared(patch: pytest.MonkeyPatch) -> None:
    whole = engine_module.accept

    def accept(draft, choose_at):
        tokens = whole(draft, choose_at)
        return [draft[0], *tokens[1:]] if draft else tokens

    patch.setattr(engine_module, "accept", accept)


def whole_window_committed(patch: pytest.MonkeyPatch) -> None:
    whole = engine_module.Engine._commit

    def commit(self, slots, counts):
        proposed = [self._runner.pool.num_proposed(slot) for slot in slots]
        whole(self, slots, [max(pair) for pair in zip(counts, proposed, strict=True)])

    patch.setattr(engine_module.Engine, "_commit", commit)


FAULTS: list[tuple[Plant, str, str, str]] = [  # fault, check it must turn red, policy, where
    (rows_depend_on_each_other, "row independence", "replay", "layer 0, "),
    (conv_history_lost_between_chunks, "split prefill", "replay", "layer 0, "),
    (rows_stored_one_place_off_in_chunks, "split prefill", "replay", ", keys, slot 1, position "),
    (state_written_during_verify, "verify is read-only", "replay", "layer 0, state, slot 1"),
    (conv_window_not_rolled_back, "rejected tail leaves no trace", "replay", "layer 0, conv, slot 1"),
    (plane_off_by_one, "rollback at every accept count", "snapshot", "layer 0, conv, slot 1"),
    (pending_records_not_consumed, "rollback at every accept count", "replay", "layer 0, state, slot 1"),
    (fold_forgets_the_decay, "rollback at every accept count", "replay", "layer 0, state, slot 1"),
    (consumed_tokens_not_run_again, "rollback at every accept count", "checkpoint", "layer 0, conv, slot 1"),
    (copy_not_restored_after_a_dropped_round, "dropped round", "checkpoint", "slot 1"),
    (earlier_windows_not_replayed, "round extended window by window", "replay", "logits, slot 1, position "),
    (attention_reads_a_row_too_many, "poisoned pools", "replay", ", slot 1"),
    (conv_window_not_cleared, "poisoned pools", "replay", "layer 0, state, slot 1"),
    (padding_row_writes_slot_0, "sequence isolation", "replay", "layer 0, state, slot 0"),
    (state_not_cleared, "slot reuse", "replay", "layer 0, conv, slot 1"),
    (value_written_beside_pending_records, "value moved to a dirty slot", "replay", "layer 0, state, slot 0"),
    (rows_not_moved, "value moved to a dirty slot", "replay", ", keys, slot 0, position 0"),
    (noise_keyed_by_step, "drafter independence", "replay", "token, slot 0, position "),
    (first_draft_not_compared, "drafter independence", "replay", "token, slot 0, position "),
    (whole_window_committed, "drafter independence", "replay", "token, slot 0, position "),
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
    assert "12 checks passed" in done.stdout
    report = json.loads(target.read_text())
    assert report["whole"]
    assert report["policies"] == ["replay"]
    assert [result["name"] for result in report["results"]] == list(CHECKS)
    assert all(result["passed"] for result in report["results"])


def test_a_failed_check_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plane_off_by_one(monkeypatch)
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
        command("--full", "--json", str(target)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # what will be checked: the first check begins
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted: the rest was not verified" in out
    assert not json.loads(target.read_text())["whole"]
