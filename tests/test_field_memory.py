"""Public bugs of kinds G and I that are about counting: tokens drafted and kept, and bytes planned."""

from __future__ import annotations

import pytest

from conftest import tokens
from field import Scripted, ask, cold, made_engine
from redraft.config import SamplingParams
from redraft.plan import PlanSettings, open_spec, plan


def test_g2_tokens_after_a_stop_are_not_counted() -> None:
    """The length of acceptance counted tokens after the end of the text.
    https://github.com/vllm-project/vllm/issues/56101
    """
    prompt = tokens(9, seed=2)
    own = cold(prompt, SamplingParams(max_tokens=7))
    params = SamplingParams(max_tokens=7, stop_tokens=(own[3],))
    kept = own.index(own[3]) + 1
    text = prompt + own
    generation = ask(made_engine(Scripted(lambda seen: text[len(seen) :]), depth=6), prompt, params)
    assert len(generation.output) == kept
    assert generation.num_accepted == kept - 1  # the first token came from the prompt


def test_g3_the_rate_has_the_drafted_tokens_below_it() -> None:
    """Rates above one, or over what might have been drafted. Drafts of 4, 0, 2 and 1 tokens, of which 4, 0, 1
    and 1 are right.
    https://github.com/sgl-project/sglang/pull/11572
    """
    prompt, params = tokens(9, seed=2), SamplingParams(max_tokens=11)
    text = prompt + cold(prompt, params)
    drafts = iter([(4, 4), (0, 0), (2, 1), (1, 1)])

    def script(seen: list[int]) -> list[int]:
        if len(seen) == len(prompt):
            return []
        count, right = next(drafts)
        draft = text[len(seen) :][:count]
        return [*draft[:right], *((token + 1) % 264 for token in draft[right:])]

    generation = ask(made_engine(Scripted(script)), prompt, params)
    assert generation.output == text[9:]
    assert (generation.num_steps, generation.num_drafted, generation.num_accepted) == (4, 7, 6)


@pytest.mark.parametrize(
    ("name", "context", "kv_type", "printed"),
    [("qwen3.6-27b", 262_144, "f16", "16384.00"), ("qwen3.6-35b-a3b", 168_192, "q8_0", "1745.16")],
)
def test_i1_only_layers_that_attend_have_rows(name: str, context: int, kv_type: str, printed: str) -> None:
    """Every layer was charged, though one in four attends.
    https://github.com/gpustack/gguf-parser-go/issues/28
    """
    settings = PlanSettings(engine="llama.cpp", slots=1, context=context, kv_type=kv_type, depth=0)
    assert plan(open_spec(name), settings).printed["KV_MiB"] == printed


@pytest.mark.parametrize(
    ("name", "slots", "depth", "printed"),
    [("qwen3.6-35b-a3b", 1, 7, "502.50"), ("qwen3.6-27b", 4, 0, "598.50"), ("qwen3.6-27b", 4, 3, "2394.00")],
)
def test_i2_every_draft_token_keeps_a_state(name: str, slots: int, depth: int, printed: str) -> None:
    """The planes of rollback were in no estimate.
    https://github.com/ggml-org/llama.cpp/pull/26499
    """
    drafter = "mtp" if depth else None
    settings = PlanSettings(engine="llama.cpp", slots=slots, context=4096, depth=depth, drafter=drafter)
    assert plan(open_spec(name), settings).printed["RS_MiB"] == printed
