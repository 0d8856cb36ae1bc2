"""Verify proposes, commit disposes: every policy, every accept count, on dirty memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import FILLS, RECURRENT_FAMILIES, TABLE, model, runner, tokens
from redraft.config import EngineConfig
from redraft.errors import StateError
from redraft.models import LayerSpec, ModelSpec, RecurrentSpec
from redraft.runner import Runner
from redraft.state import StatePool, Window, bytes_by_category, policy_named, state_buffers

PREFIX, TEXT = tokens(11, seed=1), tokens(40, seed=2)


def fresh(family: str, history: list[int]) -> tuple[str, np.ndarray]:
    """Digest and next logits of a sequence that only ever saw `history`."""
    made = runner(family, depth=0, num_slots=1)
    out = made.forward([Window(0, history, num_logits=1, advance=True)])[0]
    made.commit([0], [len(history)])
    return made.pool.read(0).digest(), out[0]


def prefilled(family: str, **settings: object) -> Runner:
    made = runner(family, **settings)
    made.forward([Window(1, PREFIX, num_logits=0, advance=True)])
    made.commit([1], [len(PREFIX)])
    return made


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("depth", [1, 3, 7])
def test_rollback_at_every_accept_count(family: str, policy: str, depth: int, fill: int) -> None:
    """After committing m of depth + 1 tokens, state and logits are those of a run that saw only these."""
    for count in range(1, depth + 2):
        made = prefilled(family, policy=policy, depth=depth, fill=fill)
        before = made.pool.read(1).digest()
        window = [*TEXT[:count], *tokens(depth + 1 - count, seed=9)]
        made.forward([Window(1, window, num_logits=0)])
        assert made.pool.read(1).digest() == before
        made.commit([1], [count])
        assert made.pool.read(1).digest() == fresh(family, PREFIX + TEXT[:count])[0]
        out = made.forward([Window(1, TEXT[count : count + 1], num_logits=1)])[0]
        assert np.array_equal(out[0], fresh(family, PREFIX + TEXT[: count + 1])[1])


def test_two_rejected_tails_leave_the_same_state(family: str, policy: str) -> None:
    """The prefix of a window decides; its rejected tail leaves no trace."""
    digests = set()
    for seed in (3, 4):
        made = prefilled(family, policy=policy)
        made.forward([Window(1, TEXT[:3] + tokens(5, seed=seed), num_logits=0)])
        made.commit([1], [3])
        digests.add(made.pool.read(1).digest())
    assert len(digests) == 1


def test_a_round_that_is_not_committed_never_was(family: str, policy: str) -> None:
    """An exception or a cancelled request leaves nothing to repair."""
    made = prefilled(family, policy=policy)
    made.forward([Window(1, tokens(8, seed=5), num_logits=0)])
    made.forward([Window(1, tokens(4, seed=6), num_logits=0)])
    made.forward([Window(1, TEXT[:2], num_logits=0)])
    made.commit([1], [2])
    assert made.pool.read(1).digest() == fresh(family, PREFIX + TEXT[:2])[0]


@pytest.mark.parametrize("failing_layer", [0, 2, 4])
def test_an_exception_between_layers(
    family: str, policy: str, failing_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with records pending: a pass that dies halfway has folded some layers and not others."""
    made = prefilled(family, policy=policy)
    made.forward([Window(1, TEXT[:5] + tokens(3, seed=7), num_logits=0)])
    made.commit([1], [5])
    before = made.pool.read(1).digest()
    policy_class = policy_named(policy)
    whole = policy_class.delta_rule

    def failing(self, layer, *args):
        if layer == failing_layer:
            raise MemoryError
        return whole(self, layer, *args)

    monkeypatch.setattr(policy_class, "delta_rule", failing)
    with pytest.raises(MemoryError):
        made.forward([Window(1, TEXT[5:9], num_logits=0)])
    monkeypatch.undo()
    assert made.pool.read(1).digest() == before
    out = made.forward([Window(1, TEXT[5:7], num_logits=1)])[0]
    made.commit([1], [2])
    digest, row = fresh(family, PREFIX + TEXT[:7])
    assert made.pool.read(1).digest() == digest
    assert np.array_equal(out[0], row)


def test_windows_extend_a_round(family: str, policy: str) -> None:
    """Several windows before a commit are one long window, as a draft model needs."""
    for count in range(1, 9):
        made = prefilled(family, policy=policy)
        rows = [made.forward([Window(1, TEXT[:3], num_logits=3)])[0]]
        rows += [made.forward([Window(1, [token], num_logits=1)], extend=True)[0] for token in TEXT[3:8]]
        whole = prefilled(family).forward([Window(1, TEXT[:8], num_logits=8)])[0]
        assert np.array_equal(np.concatenate(rows), whole)
        made.commit([1], [count])
        assert made.pool.read(1).digest() == fresh(family, PREFIX + TEXT[:count])[0]


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [7] * 5 + [5], [39, 1], [1, 2, 3, 4, 30]])
def test_a_prompt_may_be_cut_anywhere(family: str, policy: str, chunks: list[int]) -> None:
    made, at = runner(family, policy=policy), 0
    for size in chunks:
        out = made.forward([Window(2, TEXT[at : at + size], num_logits=1, advance=True)])[0]
        made.commit([2], [size])
        at += size
    digest, row = fresh(family, TEXT)
    assert made.pool.read(2).digest() == digest
    assert np.array_equal(out[0], row)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_prompts_shorter_than_the_conv_window(family: str, policy: str, length: int) -> None:
    """A conv window always has W − 1 columns, zeros at the old end."""
    made = runner(family, policy=policy, fill=0xFF)
    made.forward([Window(0, TEXT[:length], num_logits=0, advance=True)])
    made.commit([0], [length])
    made.forward([Window(0, TEXT[length : length + 3], num_logits=0)])
    made.commit([0], [1])
    assert made.pool.read(0).digest() == fresh(family, TEXT[: length + 1])[0]


def test_a_slot_is_as_new_after_a_reset(family: str, policy: str) -> None:
    made = prefilled(family, policy=policy, fill=0x3E)
    made.forward([Window(1, TEXT[:8], num_logits=0)])
    made.commit([1], [8])
    made.forward([Window(1, TEXT[8:12], num_logits=0)])
    made.pool.reset(1)
    made.forward([Window(1, TEXT[:6], num_logits=0)])
    made.commit([1], [4])
    assert made.pool.read(1).digest() == fresh(family, TEXT[:4])[0]


def test_a_slot_does_not_touch_another(family: str, policy: str) -> None:
    made = prefilled(family, policy=policy)
    parked = made.pool.read(1).digest()
    for step in range(6):
        made.forward(
            [Window(0, TEXT[step : step + 3], num_logits=0), Window(2, TEXT[step : step + 1], num_logits=0)]
        )
        made.commit([0, 2], [1 + step % 3, 1])
    assert made.pool.read(1).digest() == parked


def test_a_value_can_be_moved_to_a_dirty_slot(family: str, policy: str) -> None:
    made = prefilled(family, policy=policy)
    made.forward([Window(1, TEXT[:6], num_logits=0)])
    made.commit([1], [4])
    made.forward([Window(0, TEXT[20:28], num_logits=0)])
    made.commit([0], [3])
    made.forward([Window(0, TEXT[:8], num_logits=0)])
    value = made.pool.read(1)
    made.pool.write(0, value)
    assert made.pool.read(0).digest() == value.digest()
    rows = [made.forward([Window(slot, TEXT[4:6], num_logits=2)])[0] for slot in (0, 1)]
    assert np.array_equal(*rows)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_sequence_of_rounds(data: st.DataObject) -> None:
    """A random walk of prefills, rounds of any shape and accept counts, dropped rounds and neighbours."""
    name = data.draw(st.sampled_from(RECURRENT_FAMILIES))
    depth = data.draw(st.sampled_from([1, 2, 5, 7]))
    made = runner(
        name,
        policy=data.draw(st.sampled_from(["replay", "snapshot", "checkpoint"])),
        depth=depth,
        fill=data.draw(st.sampled_from(FILLS)),
    )
    history: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(data.draw(st.integers(1, 8))):
        slots = data.draw(st.sampled_from([[0], [1], [0, 1], [1, 0]]))
        windows = []
        for slot in slots:
            prompt = data.draw(st.booleans()) and len(history[slot]) < 60
            length = data.draw(st.integers(1, 20 if prompt else depth + 1))
            drawn = data.draw(st.lists(st.integers(0, 263), min_size=length, max_size=length))
            windows.append(Window(slot, drawn, num_logits=0, advance=prompt))
        made.forward(windows)
        if not any(window.advance for window in windows) and data.draw(st.booleans()):
            continue  # dropped
        counts = [len(w.tokens) if w.advance else data.draw(st.integers(1, len(w.tokens))) for w in windows]
        made.commit(slots, counts)
        for window, count in zip(windows, counts, strict=True):
            history[window.slot] += window.tokens[:count]
    for slot, seen in history.items():
        if seen:
            assert made.pool.read(slot).digest() == fresh(name, seen)[0]


def test_refusals_change_nothing(policy: str) -> None:
    made = prefilled("kimi_k3", policy=policy, depth=3, max_context=20)
    before = made.pool.read(1).digest()
    with pytest.raises(StateError, match=r"5 tokens proposed, but depth 3 allows 4"):
        made.forward([Window(1, TEXT[:5], num_logits=0)])
    with pytest.raises(StateError, match=r"21 tokens do not fit the context of 20"):
        made.forward([Window(1, TEXT[:10], num_logits=0, advance=True)])
    made.forward([Window(1, TEXT[:3], num_logits=0)])
    for count in (0, 4):
        with pytest.raises(StateError, match=f"cannot commit {count} of 3"):
            made.commit([1], [count])
    with pytest.raises(StateError, match="must be the only one of its round"):
        made.forward([Window(1, TEXT[:1], num_logits=0, advance=True)], extend=True)
    assert made.pool.read(1).digest() == before
    made.commit([1], [3])
    assert made.pool.read(1).digest() == fresh("kimi_k3", PREFIX + TEXT[:3])[0]


def test_an_interrupted_prompt_makes_its_slot_refuse(policy: str) -> None:
    made = prefilled("kimi_k3", policy=policy)
    made.forward([Window(1, TEXT[:5], num_logits=0, advance=True)])
    with pytest.raises(StateError, match="slot 1 holds no valid state"):
        made.forward([Window(1, TEXT[:5], num_logits=0)])
    made.pool.reset(1)
    made.forward([Window(1, TEXT[:5], num_logits=0, advance=True)])
    with pytest.raises(StateError, match="at least 5"):
        made.commit([1], [3])


def test_memory_that_was_never_reset_is_refused() -> None:
    made = Runner(model("kimi_k3"), EngineConfig(num_slots=2, max_context=32), TABLE)
    with pytest.raises(StateError, match="slot 0 holds no valid state"):
        made.forward([Window(0, [1], num_logits=1)])


@pytest.mark.parametrize("kv_type", ["float32", "bfloat16"])
def test_the_pool_allocates_what_it_declares(family: str, policy: str, kv_type: str) -> None:
    config = EngineConfig(num_slots=3, max_context=40, depth=5, policy=policy, kv_type=kv_type)  # type: ignore[arg-type]
    pool = StatePool(model(family).spec, config, TABLE)
    arrays = [array for layer in pool._policy.arrays.values() for array in layer.values()]
    arrays += [array for layer in pool._kv._arrays.values() for array in layer]
    declared = state_buffers(model(family).spec, config)
    assert sum(a.nbytes for a in arrays) == sum(b.num_bytes for b in declared)
    assert sorted((a.shape, a.dtype.name) for a in arrays) == sorted((b.shape, b.dtype) for b in declared)


def test_bfloat16_rows_are_exact_too(policy: str) -> None:
    """A window reads its own rows back as stored, so that verifying equals decoding here as well."""
    made = prefilled("kimi_k3", policy=policy, kv_type="bfloat16")
    whole = made.forward([Window(1, TEXT[:6], num_logits=6)])[0]
    for i in range(6):
        row = made.forward([Window(1, TEXT[i : i + 1], num_logits=1)])[0]
        made.commit([1], [1])
        assert np.array_equal(row[0], whole[i])


KIMI_K3_LAYER = RecurrentSpec(96, 96, 128, 128, 128, 3 * 96 * 128, 4)
KIMI_K3 = (
    ModelSpec(  # the 69 recurrent layers of the published configuration; attention rows are another matter
        model_type="kimi_k3",
        vocab_size=163_840,
        hidden_size=7168,
        max_context=1_048_576,
        layers=(LayerSpec(recurrent=KIMI_K3_LAYER),) * 69,
    )
)


def mebibytes(policy: str, depth: int, *, scratch: bool = False) -> float:
    """Over 4 slots; scratch, which holds nothing between steps, apart."""
    config = EngineConfig(num_slots=4, depth=depth, policy=policy)  # type: ignore[arg-type]
    totals = bytes_by_category(state_buffers(KIMI_K3, config))
    return sum(count for category, count in totals.items() if (category == "scratch") == scratch) / 2**20


def test_kimi_k3_bytes() -> None:
    """The figures llama.cpp prints without rollback and with seven drafts, and ours. Allocates nothing."""
    for policy in ("replay", "snapshot", "checkpoint"):
        assert f"{mebibytes(policy, 0):.2f}" == "1772.44"
        assert mebibytes(policy, 0, scratch=True) == 0
    assert f"{mebibytes('snapshot', 7):.2f}" == "14179.50"
    assert f"{mebibytes('replay', 7):.2f}" == "2354.62"
    assert f"{mebibytes('checkpoint', 7):.2f}" == "3544.88"
    assert f"{mebibytes('replay', 7, scratch=True):.2f}" == "38.81"
    assert f"{mebibytes('snapshot', 7, scratch=True):.2f}" == "77.62"
