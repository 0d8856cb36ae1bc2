"""Public bugs of kinds D and E: slots that are used again, batches, short prompts, and prompts in chunks."""

from __future__ import annotations

from typing import Any

import pytest

from checks import check_slots
from conftest import FILLS, TABLE, model, tokens
from drafters import AlwaysWrong
from field import FAMILY, Slots, ask, cold, each_policy, made_engine
from redraft.config import EngineConfig, SamplingParams
from redraft.engine import Engine, Request
from redraft.speculate import DraftModel, NGram
from redraft.state import Window

GREEDY = SamplingParams(max_tokens=8)


@each_policy
def test_d1_a_prompt_that_gets_one_token(policy: str) -> None:
    """A new prompt with one token of budget looked like a decode step and read the last owner's state.
    https://github.com/vllm-project/vllm/pull/32118
    """
    made = made_engine(NGram(3, 1), policy=policy, num_slots=3, prefill_chunk=1)
    ask(made, tokens(20, seed=9), GREEDY)
    prompts = [tokens(n, seed=n) for n in (4, 5, 20)]
    generations = [made.submit(Request(tokens=tuple(p), params=GREEDY)) for p in prompts]
    made.run()
    assert [g.output for g in generations] == [cold(p, GREEDY) for p in prompts]


@each_policy
@pytest.mark.parametrize("fill", FILLS)
def test_d2_memory_that_was_not_cleared(policy: str, fill: int) -> None:
    """Only attention blocks were zeroed when they were handed out.
    https://github.com/vllm-project/vllm/pull/56524
    """
    made = made_engine(AlwaysWrong(), policy=policy, fill=fill, prefill_chunk=6)
    prompts = [tokens(5 + i, seed=i) for i in range(6)]
    generations = [made.submit(Request(tokens=tuple(p), params=GREEDY)) for p in prompts]
    made.step()
    made.cancel(generations[0])  # in the middle of its prompt or just after it
    made.run()
    assert [g.output for g in generations[1:]] == [cold(p, GREEDY) for p in prompts[1:]]


@each_policy
def test_d3_a_slot_outside_the_batch(policy: str) -> None:
    """Padding rows wrote into slot 0, or into a request that was not in the batch.
    https://github.com/NVIDIA/TensorRT-LLM/pull/13151
    """
    slots = Slots(policy, 4)
    for slot in (0, 2):
        slots.prefill(slot, 9, seed=slot)
    parked = [slots.runner.pool.read(slot).digest() for slot in (0, 2)]
    slots.prefill(1, 5, seed=7)
    for i in range(20):
        slots.verify(1, tokens(5, seed=i), 1 + i % 5)
    assert [slots.runner.pool.read(slot).digest() for slot in (0, 2)] == parked


@each_policy
def test_d5_equal_shapes_on_other_slots(policy: str) -> None:
    """A graph was reused for another sequence because its shape was the same.
    https://github.com/ikawrakow/ik_llama.cpp/issues/1932
    """
    same = [tokens(10, seed=1)] * 4
    other = [tokens(10, seed=i) for i in range(4)]
    for prompts in (same, other):
        made = made_engine(NGram(3, 1), policy=policy, num_slots=4)
        generations = [made.submit(Request(tokens=tuple(p), params=GREEDY)) for p in prompts]
        made.run()
        assert [g.output for g in generations] == [cold(p, GREEDY) for p in prompts]


@each_policy
def test_d6_a_draft_model_with_several_slots(policy: str) -> None:
    """The drafter used its sequence 0 for every slot. Here each slot's acceptance is what it is alone.
    https://github.com/ggml-org/llama.cpp/issues/28286
    """
    prompts = [tokens(9, seed=i) for i in range(4)]

    def run(num_slots: int) -> list[tuple[list[int], int, int]]:
        config = EngineConfig(num_slots=num_slots, max_context=96, depth=3, policy=policy)  # type: ignore[arg-type]
        made = Engine(model(FAMILY), config, TABLE, drafter=DraftModel(model("kimi_linear"), config, TABLE))
        generations = [made.submit(Request(tokens=tuple(p), params=GREEDY)) for p in prompts]
        made.run()
        return [(g.output, g.num_drafted, g.num_accepted) for g in generations]

    together = run(4)
    assert together == run(1)
    assert [output for output, _, _ in together] == [cold(p, GREEDY) for p in prompts]


@each_policy
@pytest.mark.parametrize("chunk", [5, 64])
def test_d7_neighbours_of_other_lengths(policy: str, chunk: int) -> None:
    """Padding went into the state of the shorter row, at once or on the next pass.
    https://github.com/huggingface/transformers/issues/47086
    """
    slots = Slots(policy, 4)
    short, long = tokens(5, seed=1), tokens(17, seed=2)
    slots.joint({0: short[:2], 1: long[:chunk]}, advance=True)
    slots.joint({0: short[2:], 1: long[chunk:] or [1]}, advance=True)
    slots.joint({0: [1], 1: [2, 3, 4]}, {0: 1, 1: 2})


@each_policy
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_d8_prompts_shorter_than_the_conv_window(policy: str, length: int) -> None:
    """The stored window had fewer columns than the first decode step needed.
    https://github.com/hyprstream/hyprstream/issues/1557
    """
    slots = Slots(policy, 4)
    slots.prefill(0, length)
    slots.decode(0, 1, 2, 3, 4, 5)
    slots.prefill(1, 1)
    slots.verify(1, [6, 7], 2)
    slots.rollback(1, 1)
    slots.rollback(1, 1)
    slots.decode(1, 8)


def test_d9_an_admission_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot was allocated, admission failed, and the slot was in no list any more.
    https://github.com/sgl-project/sglang/pull/16067
    """
    made = made_engine(num_slots=4)
    generation = made.submit(Request(tokens=(1, 2, 3), params=GREEDY))

    def failing(slot: int) -> None:
        raise MemoryError(slot)

    with monkeypatch.context() as patch:
        patch.setattr(made._runner.pool, "reset", failing)
        for _ in range(100):
            with pytest.raises(MemoryError):
                made.step()
            made._scheduler.check()
    made.run()
    assert generation.output == cold([1, 2, 3], GREEDY)


@each_policy
@pytest.mark.parametrize("chunk", [1, 7, 16, 63, 64, 65, 90])
def test_e1_a_prompt_in_chunks(policy: str, chunk: int) -> None:
    """Between chunks the state had another layout; short prompts were right.
    https://github.com/vllm-project/vllm/issues/41292
    """
    text, slots = tokens(90, seed=1), Slots(policy, 2)
    for at in range(0, 90, chunk):
        slots.runner.forward([Window(0, text[at : at + chunk], num_logits=0, advance=True)])
        slots.runner.commit([0], [len(text[at : at + chunk])])
    slots.seen[0] = text
    slots.check()
    slots.next(0)


@pytest.mark.parametrize("chunk", [5, 7, 20])
def test_e2_chunks_across_block_boundaries(chunk: int) -> None:
    """A chunk that crossed a boundary began from memory that nobody had written.
    https://github.com/syv-ai/qwen38-27b-rtx3090/pull/43
    """
    prompt = tokens(60, seed=2)
    settings: dict[str, Any] = {"prefill_chunk": chunk, "prefix_bytes": 2**24, "prefix_interval": 8}
    made = made_engine(**settings)
    for _ in range(2):
        assert ask(made, prompt, GREEDY).output == cold(prompt, GREEDY)
    check_slots(FAMILY, made, [])


@pytest.mark.parametrize("chunk", [4, 16, 33, 128])
def test_e4_a_prompt_over_several_passes(chunk: int) -> None:
    """In one micro-batch the answer was right, in four it was one character repeated.
    https://github.com/ggml-org/llama.cpp/issues/26471
    """
    prompt = tokens(31, seed=1) * 4
    assert ask(made_engine(prefill_chunk=chunk), prompt, GREEDY).output == cold(prompt, GREEDY)


def test_e5_a_short_chunk_after_a_shared_prefix() -> None:
    """A chunk shorter than the conv window was stored into the shared prefix instead of its own block.
    https://github.com/vllm-project/vllm/pull/56196
    """
    made = made_engine(prefix_bytes=2**24, prefix_interval=16)
    shared = tokens(16, seed=1)
    ask(made, [*shared, 9], GREEDY)
    store = made._handover.prefixes
    assert store is not None
    kept = next(value for value in store._entries.values() if value.position == 16)
    before = kept.digest()
    for tail in ([1, 2], tokens(12, seed=4), [1, 2]):
        generation = ask(made, [*shared, *tail], GREEDY)
        assert generation.num_cached >= 16
        assert generation.output == cold([*shared, *tail], GREEDY)
    assert kept.digest() == before
