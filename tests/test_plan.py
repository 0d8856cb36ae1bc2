"""The planner's formulas against allocations, against each other, and against published comparisons."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import POLICIES, EngineConfig
from redraft.errors import ConfigError
from redraft.models import AttentionSpec, LayerSpec, ModelSpec, RecurrentSpec
from redraft.ops import choose
from redraft.plan import (
    ENGINES,
    PlanLayer,
    PlanSettings,
    PlanSpec,
    catalogue_names,
    compare_depths,
    compare_engines,
    frontier,
    llamacpp,
    open_spec,
    plan,
    sglang,
    trade,
    vllm,
)
from redraft.plan.settings import KV_TYPES
from redraft.plan.sizes import GIB, MIB, mib, parse_size
from redraft.plan.solve import most_slots, trade_sentence
from redraft.plan.spec import conv_floats, state_floats
from redraft.state import StatePool


def make_spec(*layers: LayerSpec, rule: str = "gdn", architecture: str = "qwen35") -> PlanSpec:
    return PlanSpec(
        name="test",
        architecture=architecture,
        rule=rule,  # type: ignore[arg-type]
        hidden_size=64,
        vocab_size=100,
        max_context=4096,
        layers=tuple(PlanLayer(layer) for layer in layers),
        source="test",
    )


def random_layer(rng: np.random.Generator) -> LayerSpec:
    heads, group = (int(n) for n in rng.integers(1, 4, 2))
    key, value, width = (int(n) for n in rng.integers(1, 9, 3))
    attention = AttentionSpec(heads, key, value)
    latent = AttentionSpec(1, key + value, value, latent=True)
    channels = 2 * heads * key + heads * group * value
    delta = RecurrentSpec(heads, heads * group, key, value, int(rng.choice([1, key])), channels, width + 1)
    options = [
        LayerSpec(attention=attention),
        LayerSpec(attention=latent),
        LayerSpec(recurrent=delta),
        LayerSpec(attention=attention, recurrent=delta),
        LayerSpec(),
    ]
    return options[rng.integers(len(options))]


def allocated_bytes(pool: StatePool) -> int:
    """What the pool's arrays really take."""
    rows = [array.nbytes for arrays in pool._kv._arrays.values() for array in arrays]
    states = [array.nbytes for arrays in pool._policy.arrays.values() for array in arrays.values()]
    return sum(rows) + sum(states)


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_equals_an_allocation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = make_spec(*(random_layer(rng) for _ in range(rng.integers(1, 7))))
    slots, context, depth = (int(n) for n in rng.integers([1, 1, 0], [5, 40, 9]))
    policy, kv_type = str(rng.choice(POLICIES)), str(rng.choice(KV_TYPES["redraft"]))
    planned = plan(
        spec, PlanSettings(slots=slots, context=context, depth=depth, policy=policy, kv_type=kv_type)
    )
    config = EngineConfig(
        num_slots=slots,
        max_context=context,
        depth=depth,
        policy=policy,
        kv_type=kv_type,  # type: ignore[arg-type]
    )
    model = ModelSpec(
        model_type="test", vocab_size=100, hidden_size=64, max_context=4096,
        layers=tuple(layer.state for layer in spec.layers),
    )  # fmt: skip
    state = sum(term.num_bytes for term in planned.terms if term.group != "compute")
    assert state == allocated_bytes(StatePool(model, config, choose()))


def test_a_draft_model_has_a_pool_of_its_own() -> None:
    rng = np.random.default_rng(7)
    target, draft = (make_spec(*(random_layer(rng) for _ in range(4))) for _ in range(2))
    request = PlanSettings(slots=3, context=17, depth=2)
    alone = plan(draft, request)
    both = plan(target, replace(request, drafter="model", draft_spec=draft))
    drafted = sum(count for group, count in both.group_bytes().items() if group.startswith("draft"))
    assert drafted == alone.total_bytes - alone.group_bytes()["compute"]


# MiB of one sequence at eight verify positions: llama.cpp without rollback, with seven planes, vLLM's blocks
# before padding, SGLang's intermediates without spare rows, vLLM with records.
EIGHT_POSITIONS = {
    "kimi-k3": ("443.11", "3544.88", "3700.12", "3789.07", "514.27"),
    "kimi-linear-48b": ("42.81", None, "357.50", "366.09", "49.69"),  # llama.cpp keeps no planes for it
    "qwen3.6-27b": ("149.62", "1197.00", "1227.00", "1308.19", "165.45"),
    "qwen3.6-35b-a3b": ("62.81", "502.50", "517.50", "546.09", "70.34"),
    "nemotron-3-nano-30b-a3b": ("47.62", "380.94", "389.56", "417.50", "50.54"),
}


@pytest.mark.parametrize("name", EIGHT_POSITIONS)
def test_eight_positions_on_four_engines(name: str) -> None:
    spec = open_spec(name)
    request = PlanSettings(engine="llama.cpp", slots=1, depth=7)
    planes, _ = llamacpp.rollback_planes(spec, request)
    one = sum(llamacpp.recurrent_bytes(spec))
    blocks = vllm.pages(spec, replace(request, engine="vllm"))
    records = vllm.pages(spec, replace(request, engine="vllm", policy="replay"))
    state, column = sglang.row_bytes(spec, replace(request, engine="sglang"))
    found = (
        mib(one),
        mib((1 + planes) * one) if planes else None,
        mib(8 * len(spec.recurrent) * blocks.used_bytes),
        mib(9 * state + (3 + 10) * column),
        mib(len(spec.recurrent) * records.used_bytes),
    )
    assert found == EIGHT_POSITIONS[name]


def test_replay_stays_within_a_third_more_than_no_rollback() -> None:
    spec = open_spec("kimi-k3")
    plain = plan(spec, PlanSettings(depth=0)).group_bytes()
    replay = plan(spec, PlanSettings(depth=7)).group_bytes()
    without = plain["recurrent state"] + plain["conv"]
    assert mib(without) == "1772.44"
    assert mib(without + replay["rollback"]) == "2354.62"
    assert mib(replay["scratch"]) == "38.81"


@pytest.mark.parametrize(
    ("name", "drafter", "policy", "planes"),
    [
        ("qwen3.6-27b", None, None, 3),
        ("qwen3.6-27b", "mtp", None, 3),
        ("qwen3.6-27b", "eagle3", None, 3),
        ("qwen3.6-27b", "ngram", None, 0),
        ("qwen3.6-27b", "model", None, 0),
        ("qwen3.6-27b", None, "checkpoint", 0),
        ("kimi-linear-48b", None, None, 0),
        ("qwen3-next-80b-a3b", "mtp", None, 0),
        ("granite-4.0-h-small", None, None, 0),
        ("nemotron-3-nano-30b-a3b", None, None, 3),
    ],
)
def test_llama_cpp_keeps_planes_only_for_some(
    name: str, drafter: str | None, policy: str | None, planes: int
) -> None:
    spec = open_spec(name)
    draft = open_spec("qwen3.5-0.8b") if drafter == "model" else None
    request = PlanSettings(
        engine="llama.cpp", slots=2, depth=3, drafter=drafter, draft_spec=draft, policy=policy
    )
    one = 2 * sum(llamacpp.recurrent_bytes(spec))
    found = plan(spec, request)
    device = sum(t.num_bytes for t in found.terms if t.name == "rollback planes")
    host = sum(t.num_bytes for t in found.terms if t.host and t.group == "rollback")
    assert (device, host) == ((planes * one, 0) if planes else (0, one))
    assert any("copy in host memory" in note for note in found.notes) == (planes == 0)


def test_llama_cpp_pads_each_stream_where_slots_do_not_share() -> None:
    shared = PlanSettings(engine="llama.cpp", slots=3, context=300)
    assert llamacpp.num_cells(shared) == 1024
    assert llamacpp.num_cells(replace(shared, unified_kv=False)) == 3 * 512


def test_a_sliding_window_bounds_the_cells() -> None:
    request = PlanSettings(engine="llama.cpp", slots=2, context=8192)
    assert llamacpp.num_cells(request, window=1024) == 2 * 1024 + 512
    assert llamacpp.num_cells(replace(request, context=128), window=1024) == 256
    assert llamacpp.num_cells(replace(request, unified_kv=False), window=1000) == 2 * 1536


def test_latent_attention_has_no_values() -> None:
    printed = plan(open_spec("kimi-linear-48b"), PlanSettings(engine="llama.cpp", slots=1, depth=0)).printed
    assert printed["V_MiB"] == "0.00"
    assert printed["K_MiB"] == printed["KV_MiB"] == "15.75"


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["kimi-linear-48b", "qwen3.6-27b", "nemotron-3-nano-30b-a3b", "granite-4.0-h-tiny"]),
    depth=st.integers(0, 16),
    kv_type=st.sampled_from(KV_TYPES["vllm"]),
    tp=st.sampled_from([1, 2, 4]),
)
def test_a_vllm_page_holds_what_it_must(name: str, depth: int, kv_type: str, tp: int) -> None:
    spec = open_spec(name)
    found = vllm.pages(spec, PlanSettings(engine="vllm", depth=depth, kv_type=kv_type, tp=tp))
    align = 64 if spec.is_latent else 16
    assert found.block_tokens % align == 0
    assert found.page_bytes == found.block_tokens * found.attention_token_bytes
    assert 0 <= found.padding_bytes < align * found.attention_token_bytes


@pytest.mark.parametrize("policy", ["snapshot", "replay"])
@pytest.mark.parametrize("name", ["kimi-linear-48b", "qwen3.6-27b", "nemotron-3-nano-30b-a3b"])
def test_vllm_terms_are_its_pages(name: str, policy: str) -> None:
    """Requests × (attention blocks + recurrent pages) × page, whatever the terms call the parts."""
    spec, depth = open_spec(name), 3
    request = PlanSettings(engine="vllm", slots=5, context=9000, depth=depth, policy=policy)
    page = vllm.pages(spec, request)
    blocks = -(-9000 // page.block_tokens) * len(spec.attention)
    recurrent = len(spec.recurrent) * (1 if policy == "replay" else 1 + depth)
    groups = plan(spec, request).group_bytes()
    held = sum(n for group, n in groups.items() if group not in ("weights", "compute"))
    assert held == 5 * (blocks + recurrent) * page.page_bytes
    assert groups["KV"] == 5 * blocks * page.page_bytes


def test_sglang_terms_are_its_pools() -> None:
    """35B-A3B, in numbers: 30 layers of 32 heads of 128 × 128 in float32, 8192 channels in bfloat16."""
    spec, slots, depth = open_spec("qwen3.6-35b-a3b"), 4, 3
    state, column = 30 * 32 * 128 * 128 * 4, 30 * 8192 * 2
    request = PlanSettings(engine="sglang", slots=slots, context=100, depth=depth)
    terms = {term.name: term.num_bytes for term in plan(spec, request).terms}
    assert terms["KV pool"] == 400 * 10 * 2 * 256 * 2 * 2
    assert terms["recurrent state"] == 5 * state
    assert terms["conv windows"] == 5 * 3 * column
    assert terms["prefix cache states"] == 2 * slots * (state + 3 * column)
    assert terms["intermediate states"] == 5 * 4 * state
    assert terms["intermediate conv"] == 5 * (4 + 4 - 2) * column
    ring = {term.name: term.num_bytes for term in plan(spec, replace(request, policy="replay")).terms}
    record = 4 * (32 * 128 + 16 * 128) + 4 * 32
    assert ring["record ring"] == 13 * 16 * 30 * record
    assert ring["intermediate conv"] == terms["intermediate conv"]
    assert "intermediate states" not in ring


def test_devices_share_weights_and_heads() -> None:
    spec = open_spec("qwen3.6-27b")
    one, two = (plan(spec, PlanSettings(engine="vllm", tp=tp, draft_spec=None)) for tp in (1, 2))
    assert one.group_bytes()["weights"] == 2 * two.group_bytes()["weights"] == 2 * 27 * 10**9
    assert one.group_bytes()["recurrent state"] == 2 * two.group_bytes()["recurrent state"]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(catalogue_names()),
    engine=st.sampled_from(ENGINES),
    slots=st.integers(1, 64),
    context=st.integers(1, 2048),
    depth=st.integers(0, 8),
)
def test_more_of_anything_never_takes_less(
    name: str, engine: str, slots: int, context: int, depth: int
) -> None:
    spec = open_spec(name)
    request = PlanSettings(engine=engine, slots=slots, context=context, depth=depth)  # type: ignore[arg-type]
    total = plan(spec, request).total_bytes
    assert plan(spec, replace(request, slots=slots + 1)).total_bytes > total
    if engine != "vllm":  # there a deeper draft changes the block length, and with it what rounding wastes
        assert plan(spec, replace(request, context=context + 1)).total_bytes >= total
        assert plan(spec, replace(request, depth=depth + 1)).total_bytes >= total


@pytest.mark.parametrize("name", catalogue_names())
def test_every_built_in_model_can_be_planned_everywhere(name: str) -> None:
    spec = open_spec(name)
    assert spec.source.startswith("https://")
    for depth in (0, 3):
        plans, remarks = compare_engines(spec, PlanSettings(depth=depth))
        assert [item.settings.engine for item in plans] == list(ENGINES)
        assert remarks == []
        for item in plans:
            assert item.total_bytes == sum(item.group_bytes().values())
            assert all(term.exact or term.basis for term in item.terms)
            assert all(term.num_bytes > 0 for term in item.terms)


def test_what_the_engine_does_not_run_is_an_estimate() -> None:
    found = plan(open_spec("rwkv7-2.9b"), PlanSettings())
    assert not any(term.exact for term in found.terms)
    assert any("does not run 'rwkv7' yet" in note for note in found.notes)
    exact = {term.name: term.exact for term in plan(open_spec("kimi-k3"), PlanSettings()).terms}
    assert exact["state"]
    assert exact["records"]
    assert not exact["arrays of a step"]


def test_depths_are_compared_without_a_drafter_at_zero() -> None:
    plans = compare_depths(open_spec("qwen3.6-27b"), PlanSettings(engine="llama.cpp", depth=7, drafter="mtp"))
    assert [item.settings.depth for item in plans] == [0, 1, 3, 7]
    assert ["draft KV" in item.group_bytes() for item in plans] == [False, True, True, True]


def test_the_trade_in_words() -> None:
    spec = open_spec("kimi-k3")
    request = PlanSettings(slots=4, context=256, depth=7)
    trades = [trade(spec, replace(request, engine=engine)) for engine in ("redraft", "llama.cpp")]  # type: ignore[arg-type]
    assert trade_sentence(trades) == (
        "depth 7 costs 12.1 GiB on llama.cpp: 27 more slots without it; 0.6 GiB here: 1 slot"
    )


def test_what_costs_nothing_says_so() -> None:
    found = trade(open_spec("kimi-linear-48b"), PlanSettings(engine="llama.cpp", drafter="ngram"))
    assert (found.cost_bytes, found.words()) == (0, "nothing on llama.cpp")


def test_the_slots_of_a_trade_fit_and_one_more_does_not() -> None:
    spec, request = open_spec("qwen3.6-27b"), PlanSettings(engine="llama.cpp", context=4096, depth=5)
    found = trade(spec, request)

    def held(setting: PlanSettings) -> int:
        terms = plan(spec, setting).terms
        return sum(term.num_bytes for term in terms if not term.host and term.group != "compute")

    slots = request.slots + found.more_slots
    assert held(replace(request, depth=0, slots=slots)) <= held(request)
    assert held(replace(request, depth=0, slots=slots + 1)) > held(request)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_frontier_is_tight(engine: str) -> None:
    spec = open_spec("qwen3.6-27b", weights="q4_k")
    request = PlanSettings(engine=engine, context=8192, depth=3)  # type: ignore[arg-type]
    found = frontier(spec, request, 24 * GIB)
    assert found.usable_bytes == int(24 * GIB * 0.92)
    assert found.points
    for point in found.points:
        setting = replace(request.at_depth(point.depth), context=point.context)
        assert point.slots == most_slots(spec, setting, found.usable_bytes)
        assert plan(spec, replace(setting, slots=point.slots)).total_bytes == point.total_bytes
        assert point.total_bytes <= found.usable_bytes
        assert plan(spec, replace(setting, slots=point.slots + 1)).total_bytes > found.usable_bytes
        better = [
            other
            for other in found.points
            if other != point
            and (other.slots >= point.slots, other.context >= point.context, other.depth >= point.depth)
            == (True, True, True)
        ]
        assert better == []


def test_a_budget_below_the_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights take 1\.4 TiB; use a larger budget"):
        frontier(open_spec("kimi-k3"), PlanSettings(), 24 * GIB)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slots": -1}, "slots must be 1 to 1048576, not -1"),
        ({"slots": 0}, "slots must be"),
        ({"context": 0}, "context must be"),
        ({"depth": 65}, "depth must be 0 to 64"),
        ({"engine": "ollama"}, "engine must be one of redraft"),
        ({"policy": "hope"}, "policy on redraft must be one of replay"),
        ({"engine": "llama.cpp", "policy": "replay"}, "policy on llama.cpp must be one of snapshot"),
        ({"kv_type": "q8_0"}, "KV type on redraft must be one of float32"),
        ({"drafter": "oracle"}, "drafter on redraft must be one of mtp"),
        ({"drafter": "model"}, "belong together"),
        ({"tp": 0}, "tensor parallelism must be 1"),
        ({"tp": 2}, "redraft does not split heads over devices"),
        ({"engine": "sglang", "state_pool": 2}, "a state pool of 2 is smaller than the 4 slots"),
    ],
)
def test_settings_are_checked(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanSettings(**wrong)  # type: ignore[arg-type]


def test_heads_must_divide_over_devices() -> None:
    with pytest.raises(ConfigError, match="48 value heads cannot be split over 5 devices"):
        plan(open_spec("qwen3.6-27b"), PlanSettings(engine="vllm", tp=5))


def test_a_recurrence_without_records_cannot_be_replayed() -> None:
    for engine in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match="replays no 'rwkv' layers; plan them with --policy snapshot"):
            plan(open_spec("rwkv7-2.9b"), PlanSettings(engine=engine, policy="replay"))  # type: ignore[arg-type]


def test_mtp_needs_mtp_layers() -> None:
    with pytest.raises(ConfigError, match="'kimi-k3' has no MTP layers"):
        plan(open_spec("kimi-k3"), PlanSettings(engine="llama.cpp", drafter="mtp"))


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 * GIB), ("512 MiB", 512 * MIB), ("80GB", 80 * 10**9), ("1.5g", 3 * GIB // 2), ("7", 7)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "much", "-3GiB", "3 furlongs", "1,5GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)


def test_the_catalogue_repeats_the_shapes_of_its_sources() -> None:
    k3 = open_spec("kimi-k3")
    assert (len(k3.layers), len(k3.recurrent), len(k3.attention)) == (93, 69, 24)
    assert [i + 1 for i, layer in enumerate(k3.layers) if layer.state.attention][-3:] == [88, 92, 93]
    assert (state_floats(k3.recurrent[0]), conv_floats(k3.recurrent[0])) == (1_572_864, 110_592)
    assert vllm.attention_token_bytes(k3.attention[0], PlanSettings(engine="vllm")) * 24 == 24 * 576 * 2
