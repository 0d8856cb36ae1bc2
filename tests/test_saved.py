"""Saved states: the same bytes after a restore, anywhere they fit; anything else is refused and harmless."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import FAMILIES, POLICIES, TABLE, model
from drafters import Prophet
from redraft.config import EngineConfig
from redraft.engine import Engine, FinishReason, Generation, Request
from redraft.errors import RedraftError, RequestError, StateError
from redraft.loading.fingerprint import model_fingerprint, tensor_digest
from redraft.ops.raw import plain as plain_tensor
from redraft.speculate import DraftModel, NGram
from redraft.state import Committed
from redraft.state.saved import SavedState, read_file, write_file
from test_engine import GREEDY, PROMPTS, SAMPLED, SETTINGS, engine, outputs, plain


def saved_midway(made: Engine, temperature: float, num_steps: int) -> bytes:
    """The first prompt's generation after some steps, with records pending wherever a policy has them."""
    generation = made.submit(Request(tokens=PROMPTS[0], params=SETTINGS[temperature]))
    for _ in range(num_steps):
        made.step()
    assert generation.finish_reason is None
    return made.save(generation)


def resumed(made: Engine, data: bytes) -> Generation:
    generation = made.restore(data)
    assert isinstance(generation, Generation)
    made.run()
    return generation


def prophet() -> Prophet:
    return Prophet([[*PROMPTS[0], *plain("kimi_k3", t)[0]] for t in SETTINGS])


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5, 7])
@pytest.mark.parametrize("temperature", list(SETTINGS))
def test_a_generation_goes_on_after_a_restart(policy: str, temperature: float, num_steps: int) -> None:
    """In the queue, in the middle of its prompt, and after rounds of every accept count; under all policies,
    onto clean and dirty slots.
    """
    source = engine("kimi_k3", prophet(), depth=3, policy=policy, prefill_chunk=9)
    data = saved_midway(source, temperature, num_steps)
    for target in POLICIES:
        made = engine("kimi_k3", NGram(3, 1), num_slots=2, depth=5, policy=target, fill=0xFF)
        outputs(made, GREEDY, PROMPTS[1:3])
        generation = resumed(made, data)
        assert generation.output == plain("kimi_k3", temperature)[0]
        assert generation.finish_reason is FinishReason.LENGTH
    source.run()  # saving changed nothing


def test_saving_changes_nothing_and_repeats() -> None:
    made = engine("kimi_k3", prophet(), depth=3)
    generation = made.submit(Request(tokens=PROMPTS[0], params=SAMPLED))
    while made.has_work:
        made.step()
        if generation.finish_reason is None:
            assert made.save(generation) == made.save(generation)
    assert generation.output == plain("kimi_k3", 0.8)[0]


def test_text_and_counters_go_on_too() -> None:
    """Also in the middle of a stop string that is held back."""
    whole = engine("kimi_k3").submit(Request(tokens=PROMPTS[0], params=replace(GREEDY, max_tokens=40)))
    made = engine("kimi_k3")
    whole = made.submit(whole.request)
    made.run()
    at = next(i for i in range(6, len(whole.text) - 4) if "\ufffd" not in whole.text[i : i + 4])
    params = replace(GREEDY, max_tokens=40, stop_strings=(whole.text[at : at + 4],))
    for num_steps in range(1, 30):
        source = engine("kimi_k3", depth=2, drafter=NGram(2, 1))
        generation = source.submit(Request(tokens=PROMPTS[0], params=params))
        shown = "".join(event.text for _ in range(num_steps) for event in source.step())
        if generation.finish_reason is not None:
            break
        target = engine("kimi_k3")
        other = target.restore(source.save(generation))
        assert isinstance(other, Generation)
        assert (other.num_steps, other.num_drafted) == (generation.num_steps, generation.num_drafted)
        shown += "".join(event.text for event in target.run())
        assert shown == other.text == whole.text[: whole.text.index(params.stop_strings[0])]
        assert other.finish_reason is FinishReason.STOP
    assert num_steps > 3


def test_a_draft_model_catches_up_after_a_restore() -> None:
    data = saved_midway(engine("kimi_k3", prophet(), depth=3), 0.8, 4)
    config = EngineConfig(num_slots=1, max_context=160, depth=3)
    made = Engine(model("kimi_k3"), config, TABLE, drafter=DraftModel(model("kimi_k3"), config, TABLE))
    generation = resumed(made, data)
    assert generation.output == plain("kimi_k3", 0.8)[0]
    assert generation.num_accepted > 5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_type", ["float32", "bfloat16"])
def test_a_session_goes_on_after_a_restart(family: str, policy: str, kv_type: str) -> None:
    settings: dict[str, Any] = {"kv_type": kv_type, "policy": policy}
    source = engine(family, NGram(3, 1), depth=3, **settings)
    first = source.submit(Request(tokens=PROMPTS[0], params=GREEDY, session="a"))
    source.run()
    made = engine(family, NGram(3, 1), depth=2, num_slots=2, fill=0x3E, **settings)
    assert made.restore(source.save("a")) == "a"
    longer = (*first.tokens, 4, 5, 6)
    second = made.submit(Request(tokens=longer, params=SAMPLED, session="a"))
    made.run()
    assert second.num_cached == len(first.tokens) - 1  # four tokens are evaluated, not the whole prompt
    assert second.output == outputs(engine(family, kv_type=kv_type), SAMPLED, [longer])[0]


def test_a_restored_state_has_no_past() -> None:
    """What planes and records hold beside the value belongs to another sequence."""
    made = engine("kimi_k3", prophet(), depth=3, policy="snapshot")
    generation = made.submit(Request(tokens=PROMPTS[0], params=GREEDY))
    for _ in range(6):
        made.step()
    assert generation.slot is not None
    pool = made._runner.pool
    assert pool.status(generation.slot).floor < pool.status(generation.slot).position
    data = made.save(generation)
    made.cancel(generation)
    again = made.restore(data)
    assert isinstance(again, Generation)
    assert again.slot is not None
    status = pool.status(again.slot)
    assert status.floor == status.position


@pytest.fixture(scope="module")
def small() -> bytes:
    """A saved state of a few tokens."""
    made = engine("llama")
    generation = made.submit(Request(tokens=(1, 2, 3), params=SAMPLED))
    made.step()
    return made.save(generation)


def unchanged(made: Engine) -> tuple[Any, ...]:
    made._scheduler.check()
    return made._runner.pool.read(0).digest(), made.has_work, list(made._scheduler._free)


def test_any_altered_byte_and_any_cut_is_refused(small: bytes) -> None:
    made = engine("llama", num_slots=1)
    outputs(made, GREEDY, [PROMPTS[1]])
    before = unchanged(made)
    for at in range(len(small)):
        altered = bytearray(small)
        altered[at] ^= 0x10
        with pytest.raises(StateError):
            SavedState.from_bytes(bytes(altered))
    for length in [*range(60), *range(60, len(small), 97), len(small) - 1]:
        with pytest.raises(StateError, match=r"truncated|does not begin with its mark"):
            made.restore(small[:length])
    with pytest.raises(StateError, match="bytes where"):
        made.restore(small + b"\0")
    assert unchanged(made) == before
    assert isinstance(made.restore(small), Generation)


def with_version(data: bytes, version: int) -> bytes:
    return data[:8] + struct.pack("<I", version) + data[12:]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: engine("kimi_k3"), "belongs to another model"),
        (
            lambda: engine("llama", kv_type="bfloat16"),
            "KV type float32, the engine bfloat16: start the engine",
        ),
        (lambda: engine("llama", max_context=4), "generation of 4 tokens does not fit the context of 4"),
        (lambda: engine("llama", max_context=2), "state of 3 tokens does not fit the context of 2"),
        (
            lambda: Engine(
                model("llama", "float64"), EngineConfig(max_context=160, compute="float64"), TABLE
            ),
            "compute type float32, the engine float64",
        ),
    ],
)
def test_a_state_of_something_else_is_refused(small: bytes, target: Any, message: str) -> None:
    made = target()
    with pytest.raises(StateError, match=message):
        made.restore(small)
    assert not made.has_work
    made._scheduler.check()


def test_a_state_of_other_operations_is_refused(small: bytes) -> None:
    """The reference and the native operations agree within rounding, which is not enough."""
    other = replace(SavedState.from_bytes(small), arithmetic="native abacus").to_bytes()
    with pytest.raises(StateError, match="computed by 'native abacus' operations, which give other bits"):
        engine("llama").restore(other)


def test_another_version_is_refused(small: bytes) -> None:
    with pytest.raises(StateError, match="has version 2, but this program reads version 1"):
        engine("llama").restore(with_version(small, 2))
    with pytest.raises(StateError, match="not a saved state"):
        engine("llama").restore(b"GGUF" + small)


def test_a_request_that_this_engine_cannot_serve_is_refused() -> None:
    """Stop strings without a tokenizer; a lower depth is no obstacle."""
    source = engine("llama", depth=3)
    params = replace(GREEDY, stop_strings=("x",), logit_bias={5: 1.5}, stop_tokens=(9,))
    generation = source.submit(Request(tokens=(1, 2, 3), params=params, depth=3, session="s"))
    source.step()
    data = source.save(generation)
    made = Engine(model("llama"), EngineConfig(num_slots=1, max_context=160, depth=0), TABLE)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        made.restore(data)
    assert not made.has_work
    other = engine("llama").restore(data)
    assert isinstance(other, Generation)
    assert other.request == replace(generation.request, depth=0)


def test_no_free_slot_is_refused(small: bytes) -> None:
    made = engine("llama", num_slots=1)
    running = made.submit(Request(tokens=PROMPTS[0], params=GREEDY))
    made.step()
    with pytest.raises(StateError, match="no slot is free for the saved state"):
        made.restore(small)
    made.run()
    assert running.output == plain("llama", 0)[0]


def test_what_cannot_be_saved() -> None:
    made = engine("llama")
    with pytest.raises(StateError, match="no slot keeps a state for session 'a'"):
        made.save("a")
    generation = made.submit(Request(tokens=PROMPTS[1], params=GREEDY))
    made.run()
    with pytest.raises(StateError, match="request 0 is finished"):
        made.save(generation)


def test_files_are_written_whole(small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    write_file(path, b"old")
    write_file(path, small)
    assert read_file(path) == small
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StateError, match="cannot be written: No space left"):
        write_file(path, b"new")
    assert read_file(path) == small
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    for action in (lambda: read_file(tmp_path / "none"), lambda: write_file(tmp_path / "no" / "x", b"")):
        with pytest.raises(RedraftError, match="No such file"):
            action()


def test_a_value_of_another_shape_is_not_written(small: bytes) -> None:
    pool = engine("llama")._runner.pool
    value = SavedState.from_bytes(small).value
    name = next(iter(value.arrays))
    for arrays, message in (
        ({n: a for n, a in value.arrays.items() if n != name}, f"'{name}' is absent cannot"),
        ({**value.arrays, "more": value.arrays[name]}, "'more' is float32"),
        ({**value.arrays, name: value.arrays[name][:1]}, f"'{name}' is float32"),
    ):
        before = pool.read(0).digest()
        with pytest.raises(StateError, match=message):
            pool.write(0, Committed(value.position, arrays))
        assert pool.read(0).digest() == before


def test_fingerprints_tell_models_apart() -> None:
    prints = {model(family).fingerprint for family in FAMILIES}
    assert len(prints) == len(FAMILIES)
    assert model("llama", "float64").fingerprint == model("llama").fingerprint
    spec, large = model("llama").spec, np.zeros(2**20, np.float32)
    digest = tensor_digest(plain_tensor("t", large))
    assert tensor_digest(plain_tensor("t", large.reshape(2, -1))) != digest
    large[-1] = 1
    assert tensor_digest(plain_tensor("t", large)) != digest
    assert model_fingerprint(spec, {"a": "1"}) != model_fingerprint(spec, {"a": "2"})
    assert model_fingerprint(spec, {"a": "1"}) != model_fingerprint(replace(spec, max_context=7), {"a": "1"})


def test_the_header_is_readable(small: bytes) -> None:
    """The format is documented: another program can look at it."""
    magic, version, total, length = struct.unpack_from("<8sIQQ", small)
    assert (magic, version, total) == (b"REDRAFT\0", 1, len(small))
    header = json.loads(small[28 : 28 + length])
    assert header["position"] == 3
    assert header["arrays"][0] == ["tokens", "int64", [4]]


def test_a_session_is_kept_once() -> None:
    """Two requests of one session at the same time leave one state, the later one's."""
    made = engine("llama", num_slots=3)
    for i in (1, 2):
        made.submit(Request(tokens=PROMPTS[i], params=replace(GREEDY, max_tokens=3 * i), session="a"))
    made.run()
    made._scheduler.check()
    parked = made._scheduler.parked("a")
    assert parked is not None
    assert tuple(parked[1][: len(PROMPTS[2])]) == PROMPTS[2]
    assert len(made._scheduler._parked) == 1
