"""Published figures of other engines: the planner must print the very strings that their logs print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redraft.plan import PlanSettings, PlanSpec, llamacpp, open_spec, plan, sglang, vllm
from redraft.plan.hf import spec_from_config
from redraft.plan.records import sidecar_bytes, vllm_record_shapes
from redraft.plan.sizes import GIB, MIB, gib, mib
from redraft.plan.spec import conv_floats, state_floats

ROWS = json.loads((Path(__file__).parent / "fixtures" / "memory_truth.json").read_text(encoding="utf-8"))


def recurrent(spec: PlanSpec) -> int:
    return sum(llamacpp.recurrent_bytes(spec))


def per_rank(spec: PlanSpec, settings: PlanSettings) -> int:
    """One slot of one device without page padding: state and widened conv window of every layer."""
    return len(spec.recurrent) * vllm.pages(spec, settings).used_bytes


def blocks(spec: PlanSpec, settings: PlanSettings, policy: str) -> str:
    return plan(spec, replace_policy(settings, policy)).printed["recurrent_blocks_per_request"]


def replace_policy(settings: PlanSettings, policy: str) -> PlanSettings:
    return PlanSettings(engine=settings.engine, depth=settings.depth, policy=policy)


def with_kernel_columns(spec: PlanSpec) -> int:
    """A server that keeps as many conv columns as the kernel is wide, in float32."""
    return 4 * sum(state_floats(r) + conv_floats(r, r.conv_width) for r in spec.recurrent)


def pool(spec: PlanSpec, settings: PlanSettings) -> int:
    state, column = sglang.row_bytes(spec, settings)
    return (sglang.pool_size(settings) + 1) * (state + 3 * column)


# Figures that an engine does not print in its usual lines, or that engines outside the four print.
DERIVED: dict[str, Callable[[PlanSpec, PlanSettings, dict[str, Any]], str]] = {
    "KV_sum_MiB": lambda spec, s, _: plan(spec, s).printed["KV_MiB"],
    "RS_MiB_1dp": lambda spec, *_: f"{recurrent(spec) / MIB:.1f}",
    "RS_MiB_0dp": lambda spec, *_: f"{recurrent(spec) / MIB:.0f}",
    "state_blob_bytes": lambda spec, _, row: str(recurrent(spec) + row["header_bytes"]),
    "recurrent_MiB_per_KDA_layer": lambda spec, *_: mib(sum(llamacpp.recurrent_bytes(spec, 0, 1))),
    "MB_per_seq": lambda spec, *_: f"{with_kernel_columns(spec) / MIB:.1f}",
    "ring_GB": lambda spec, s, _: gib(s.slots * with_kernel_columns(spec)),
    "recurrent_MiB_per_req_per_layer_TP8": lambda spec, s, _: mib(vllm.pages(spec, s).state_bytes),
    "batch128_MiB_per_layer": lambda spec, s, _: f"{s.slots * vllm.pages(spec, s).state_bytes / MIB:.0f}",
    "cache_bytes_per_token": lambda spec, s, _: str(
        len(spec.layers) * vllm.attention_token_bytes(spec.attention[0], s)
    ),
    "ssm_block_bytes": lambda spec, s, _: str(vllm.pages(spec, s).state_bytes),
    "conv_block_bytes": lambda spec, s, _: str(
        vllm.pages(spec, s).conv_bytes + vllm.pages(spec, s).widening_bytes
    ),
    "attn_K_bytes_per_token": lambda spec, s, _: str(vllm.attention_token_bytes(spec.attention[0], s) // 2),
    "record_shapes": lambda spec, s, _: vllm_record_shapes(spec.recurrent[0], s.depth),
    "GDN_blocks_per_request": lambda spec, s, _: (
        f"{blocks(spec, s, 'snapshot')} -> {blocks(spec, s, 'replay')}"
    ),
    "GDN_MiB_per_request": lambda spec, s, _: plan(spec, s).printed["recurrent_MiB_per_request"],
    "sidecar_bytes_per_GDN_layer": lambda spec, *_: str(sidecar_bytes(spec.recurrent[0], 16)),
    "slot_MiB": lambda spec, s, _: mib(per_rank(spec, s)),
    "pool_GiB": lambda spec, s, _: gib(s.slots * (1 + s.depth) * per_rank(spec, s)),
    "total_GiB": lambda spec, s, _: f"{pool(spec, s) / GIB:.1f}",
    "KV_GiB": lambda spec, s, _: f"{sglang.kv_bytes((*spec.layers, *spec.mtp_layers), s) / GIB:.1f}",
}


def on_device(spec: PlanSpec, settings: PlanSettings, num_layers: int) -> str:
    """A device's share: whole layers, all of one size."""
    planes = settings.slots * (1 + settings.depth)
    return mib(planes * sum(llamacpp.recurrent_bytes(spec, 0, num_layers)))


def computed(row: dict[str, Any], key: str) -> str:
    spec = (
        spec_from_config(row["config"], name=row["model"], source="")
        if "config" in row
        else open_spec(row["spec"])
    )
    settings = PlanSettings(**row["settings"])
    if key in row.get("devices", {}):
        return on_device(spec, settings, row["devices"][key])
    return DERIVED[key](spec, settings, row) if key in DERIVED else plan(spec, settings).printed[key]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['id']}-{row.get('spec', 'inline')}")
def test_published_figures_are_reproduced(row: dict[str, Any]) -> None:
    assert {key: computed(row, key) for key in row["reported"]} == row["reported"]


def test_all_rows_are_there() -> None:
    assert len(ROWS) == 57
    assert len({row["id"] for row in ROWS}) == 57
