"""Guessing tokens, choosing tokens, and telling whether a guess was right."""

from redraft.speculate.accept import accept
from redraft.speculate.drafters import Drafter, DraftModel, DraftQuery, NGram, NoDraft, Stateless
from redraft.speculate.sampling import TokenLogprob, choose, token_logprob

__all__ = [
    "DraftModel",
    "DraftQuery",
    "Drafter",
    "NGram",
    "NoDraft",
    "Stateless",
    "TokenLogprob",
    "accept",
    "choose",
    "token_logprob",
]
