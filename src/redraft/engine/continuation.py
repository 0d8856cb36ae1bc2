"""A generation as data: what must be kept of it so that it goes on elsewhere with the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from redraft.config import MAX_SEED, SamplingParams
from redraft.engine.request import Generation, Request

_COUNTERS = ("num_cached", "num_steps", "num_drafted", "num_accepted")


def describe(generation: Generation) -> dict[str, Any]:
    """Request and counters as JSON holds them; tokens are kept beside it. Times are not kept."""
    return {
        "num_prompt": generation.num_prompt,
        "params": asdict(generation.request.params),
        "depth": generation.request.depth,
        "session": generation.request.session,
        "top_logprobs": generation.request.top_logprobs,
        "counters": {name: getattr(generation, name) for name in _COUNTERS},
    }


def described_request(about: Mapping[str, Any], tokens: list[int], max_depth: int) -> Request:
    """The request that `describe` saw. Its depth is lowered to `max_depth`: a depth changes no token."""
    values = dict(about["params"])
    values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    values["stop_tokens"], values["stop_strings"] = (
        tuple(values["stop_tokens"]),
        tuple(values["stop_strings"]),
    )
    depth = about["depth"]
    return Request(
        tokens=tuple(tokens[: about["num_prompt"]]),
        params=SamplingParams(**values),
        depth=None if depth is None else min(depth, max_depth),
        session=about["session"],
        top_logprobs=about.get("top_logprobs"),  # earlier versions did not have it
    )


def restore_counters(generation: Generation, about: Mapping[str, Any]) -> None:
    """Set the counters to those that `describe` saw."""
    for name in _COUNTERS:
        setattr(generation, name, about["counters"][name])


def answer_request(request: Request, index: int) -> Request:
    """The request of the `index`-th further answer: the same with seed + index (mod 2⁶⁴), outside its
    session.
    """
    seed = (request.params.seed + index) % (MAX_SEED + 1)
    return replace(request, params=replace(request.params, seed=seed), session=None)
