"""Public bugs of kinds J, K, L: cancelled requests, the end of the context, drafters that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from checks import check_slots
from conftest import TABLE, model, model_file, tokens
from drafters import AlwaysWrong
from field import FAMILY, Scripted, ask, cold, each_policy, knowing, made_engine
from redraft.config import EngineConfig, SamplingParams
from redraft.engine import Engine, FinishReason, Request
from redraft.errors import ModelFileError
from redraft.loading import ModelFile
from redraft.speculate import DraftModel, NGram
from redraft.state import bytes_by_category

GREEDY = SamplingParams(max_tokens=10)


@each_policy
def test_j1_a_client_that_goes_away(policy: str) -> None:
    """Speculative steps never looked at the cancellation; the slot stayed busy for hours.
    https://github.com/am17an/llama.cpp/issues/20
    """
    made = made_engine(AlwaysWrong(), policy=policy, depth=2, prefill_chunk=7)
    for i in range(20):
        pair = [made.submit(Request(tokens=tuple(tokens(12, seed=i + k)), params=GREEDY)) for k in (0, 1)]
        for _ in range(i % 5):
            made.step()
        for generation in (*pair, pair[0]):  # one of them twice
            made.cancel(generation)
        assert not made.has_work
        assert len(made._scheduler._free) == 2
    assert ask(made, tokens(12, seed=50), GREEDY).output == cold(tokens(12, seed=50), GREEDY)


@each_policy
def test_j3_an_aborted_request_and_the_prefix_it_leaves(policy: str) -> None:
    """The slot of an aborted generation stayed in the prefix table half finished.
    https://github.com/Luce-Org/lucebox/issues/677
    """
    made = made_engine(AlwaysWrong(), policy=policy, prefix_bytes=2**24, prefix_interval=8, prefill_chunk=5)
    shared = tokens(20, seed=1)
    for num_steps in range(9):
        generation = made.submit(Request(tokens=(*shared, num_steps), params=GREEDY, session="s"))
        for _ in range(num_steps):
            made.step()
        made.cancel(generation)
        check_slots(FAMILY, made, [])
        other = [*shared, 99, num_steps]
        assert ask(made, other, GREEDY, session="s").output == cold(other, GREEDY)


def test_j4_drafting_goes_on_after_a_cancel() -> None:
    """After one cancelled request nothing was drafted until the next start.
    https://github.com/jundot/omlx/issues/2235
    """
    prompt = tokens(9, seed=1)
    made = made_engine(knowing([*prompt, *cold(prompt, GREEDY)]))
    before = ask(made, prompt, GREEDY)
    broken = made.submit(Request(tokens=tuple(prompt), params=GREEDY))
    for _ in range(3):
        made.step()
    made.cancel(broken)
    after = ask(made, prompt, GREEDY)
    assert (after.num_drafted, after.num_accepted) == (before.num_drafted, before.num_accepted)
    assert after.num_accepted > 5


@each_policy
def test_j5_what_is_kept_after_many_rejections(policy: str) -> None:
    """A side table went on listing blocks that a rewind had freed. Whatever is kept here is checked after
    every step.
    https://github.com/ai-dynamo/dynamo/pull/11736
    """
    made = made_engine(AlwaysWrong(), policy=policy, prefix_bytes=2**24, prefix_interval=4)
    generation = made.submit(Request(tokens=(1, 2, 3), params=SamplingParams(max_tokens=25)))
    while generation.finish_reason is None:
        made.step()
        check_slots(FAMILY, made, [generation] if generation.finish_reason is None else [])


@pytest.mark.parametrize("num_prompt", [58, 60, 62, 63])
@pytest.mark.parametrize("max_tokens", [128, 1, 10])
@pytest.mark.parametrize("drafter", ["ngram", "model", "eager"])
def test_k1_drafts_at_the_end_of_the_context(num_prompt: int, max_tokens: int, drafter: str) -> None:
    """Drafts went beyond the limit and killed the engine.
    https://github.com/vllm-project/vllm/issues/42533
    """
    config = EngineConfig(num_slots=1, max_context=64, depth=4)
    makers: dict[str, Any] = {
        "ngram": lambda: NGram(2, 1),
        "model": lambda: DraftModel(model(FAMILY), config, TABLE),
        "eager": lambda: Scripted(lambda _: [1] * 50),
    }
    made = Engine(model(FAMILY), config, TABLE, drafter=makers[drafter]())
    prompt = tokens(num_prompt // 2, seed=1) * 2
    generation = ask(made, prompt, SamplingParams(max_tokens=max_tokens))
    assert len(generation.tokens) == min(64, len(prompt) + max_tokens)
    assert generation.finish_reason is FinishReason.LENGTH
    assert generation.output == cold(prompt, SamplingParams(max_tokens=20))[: len(generation.output)]


@pytest.mark.parametrize("num_prompt", [20, 31, 32, 33, 40])
def test_k1_a_drafter_with_a_shorter_context(num_prompt: int) -> None:
    """The drafter's own limit was below the target's. It stops drafting there, and the target goes on.
    https://github.com/vllm-project/vllm/issues/57941
    """
    config = EngineConfig(num_slots=1, max_context=64, depth=4)
    short = EngineConfig(num_slots=1, max_context=32, depth=4)
    made = Engine(model(FAMILY), config, TABLE, drafter=DraftModel(model(FAMILY), short, TABLE))
    prompt, params = tokens(num_prompt, seed=1), SamplingParams(max_tokens=50)
    generation = ask(made, prompt, params)
    assert len(generation.tokens) == 64
    assert generation.output == cold(prompt, params)[: 64 - num_prompt]
    assert (generation.num_drafted > 0) == (num_prompt < 32)


def test_k2_the_draft_model_has_the_target_s_context() -> None:
    """The draft model kept its own default length, and memory with it.
    https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/499
    """
    sizes = []
    for context in (32, 64):
        config = EngineConfig(num_slots=1, max_context=context, depth=2)
        made = Engine(model(FAMILY), config, TABLE, drafter=DraftModel(model("llama"), config, TABLE))
        sizes.append(bytes_by_category(made.buffers())["draft KV"])
    assert sizes[1] == 2 * sizes[0]


class _Swapped:
    """A tokenizer with two ids exchanged."""

    def __init__(self, vocabulary: dict[str, int], a: int, b: int) -> None:
        swap = {a: b, b: a}
        self._vocabulary = {token: swap.get(number, number) for token, number in vocabulary.items()}

    def vocabulary(self) -> dict[str, int]:
        return self._vocabulary


def test_l1_a_draft_model_with_another_vocabulary() -> None:
    """Tokens are exchanged by number. Refused, with the first number that differs; and if it were let
    through, only acceptance would suffer.
    https://github.com/sgl-project/sglang/issues/24051
    """
    target = model_file(FAMILY)
    vocabulary = target.require_tokenizer().vocabulary()
    draft = ModelFile(
        target.path, target.spec, _Swapped(vocabulary, 40, 90), "", target._family, target._source  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(ModelFileError, match="has another vocabulary than 'kimi_k3' from token 40 on"):
        target.require_same_vocabulary(draft)
    target.require_same_vocabulary(target)
    config = EngineConfig(num_slots=1, max_context=160, depth=4)
    made = Engine(model(FAMILY), config, TABLE, drafter=DraftModel(model("llama"), config, TABLE))
    assert ask(made, tokens(12), GREEDY).output == cold(tokens(12), GREEDY)


def test_l2_vocabularies_padded_to_other_sizes() -> None:
    """Equal tokenizers with other padding were refused, or padding was proposed.
    https://github.com/vllm-project/vllm/pull/13849
    """
    config = EngineConfig(num_slots=1, max_context=160, depth=4)
    drafter = DraftModel(model(FAMILY), config, TABLE, vocab_size=100)
    proposed: list[int] = []
    whole = drafter.propose

    def recording(queries: Any) -> list[list[int]]:
        drafts = whole(queries)
        proposed.extend(token for draft in drafts for token in draft)
        return drafts

    drafter.propose = recording  # type: ignore[method-assign]
    made = Engine(model(FAMILY), config, TABLE, drafter=drafter)
    assert ask(made, tokens(12), GREEDY).output == cold(tokens(12), GREEDY)
    assert proposed
    assert max(proposed) < 100
