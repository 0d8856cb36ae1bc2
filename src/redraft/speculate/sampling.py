"""Which token comes next: a pure function of logits, parameters, seed, history and position.

The order: logit bias; repetition, presence and frequency penalties; at temperature 0 the largest logit wins.
Else divide by the temperature; keep the `top_k` largest; of these the smallest set that holds `top_p` of the
probability; of these the ones at least `min_p` times as likely as the likeliest; add standard Gumbel noise
keyed by (seed, position, token); the largest wins. That is an exact sample of the filtered softmax. Ties go
to the lower token id.

A drafter that uses the same function with the same noise agrees with the target as often as a coupling
allows, and acceptance is equality of tokens. What is emitted never depends on the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from redraft.config import SamplingParams
from redraft.ops import Array, Ops


def choose(logits: Array, params: SamplingParams, context: Sequence[int], num_prompt: int, ops: Ops) -> int:
    """The token after `context`, whose first `num_prompt` tokens are the prompt; logits [vocab]. Modifies
    nothing.
    """
    if params.temperature == 0 and not params.logit_bias and not params.has_penalties:
        return int(np.argmax(logits))
    scores = _penalised(logits.astype(np.float64), params, context, num_prompt)
    if params.temperature == 0:
        return int(np.argmax(scores))
    return ops.noisy_argmax(_filtered(scores / params.temperature, params), params.seed, len(context))


class TokenLogprob(NamedTuple):
    """A token's log-probability in nats, and the likeliest tokens at its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(logits: Array, token: int, num_top: int) -> TokenLogprob:
    """By the model's own distribution, before biases, penalties, temperature and filters; logits [vocab]."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    likeliest = np.argsort(-scores, kind="stable")[:num_top].tolist()
    return TokenLogprob(token, float(scores[token]), tuple((i, float(scores[i])) for i in likeliest))


def _penalised(scores: Array, params: SamplingParams, context: Sequence[int], num_prompt: int) -> Array:
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if not params.has_penalties:
        return scores
    seen = np.unique(np.asarray(context, np.int64))
    repeated = scores[seen]
    scores[seen] = np.where(
        repeated > 0, repeated / params.repetition_penalty, repeated * params.repetition_penalty
    )
    written, counts = np.unique(np.asarray(context[num_prompt:], np.int64), return_counts=True)
    scores[written] -= params.presence_penalty + params.frequency_penalty * counts
    return scores


def _filtered(scores: Array, params: SamplingParams) -> Array:
    """Scores with −inf for what the filters remove; the likeliest token always stays."""
    if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
        return scores
    order = np.argsort(-scores, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    probabilities = np.exp(scores[order] - scores[order[0]])
    probabilities /= probabilities.sum()
    before = np.concatenate([[0.0], np.cumsum(probabilities)[:-1]])
    keep = (before < params.top_p) & (probabilities >= params.min_p * probabilities[0])
    keep[0] = True
    result = np.full_like(scores, -np.inf)
    result[order[keep]] = scores[order[keep]]
    return result
