"""Options that several commands have; their defaults come from the configuration."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from redraft.config import EngineConfig, SamplingParams

ENGINE = EngineConfig()
SAMPLING = SamplingParams()
DEFAULT_MODEL = "mini-k3"


class Policy(StrEnum):
    """Names of rollback policies."""

    replay = "replay"
    snapshot = "snapshot"
    checkpoint = "checkpoint"


class KVType(StrEnum):
    """Number formats of attention rows."""

    float32 = "float32"
    bfloat16 = "bfloat16"


Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A known model (mini-k3, smollm2), a .gguf file, or a Hugging Face directory."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option("--draft", "-d", help="Who drafts: 'ngram', or a model as for --model. None: nobody."),
]
Depth = Annotated[int, typer.Option("--depth", help="Draft tokens a step, at most.")]
PolicyOption = Annotated[Policy, typer.Option("--policy", help="How a rejected draft is rolled back.")]
KVTypeOption = Annotated[KVType, typer.Option("--kv-type", help="Number format of attention rows.")]
Context = Annotated[
    int | None, typer.Option("--ctx", help="Tokens that a slot can hold. Default: what is needed.")
]
PrefillChunk = Annotated[
    int, typer.Option("--prefill-chunk", help="Prompt tokens a step, over all requests.")
]
Threads = Annotated[int | None, typer.Option("--threads", help="Default: physical cores.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest token.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens. 0: all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens that hold this probability.")]
MinP = Annotated[
    float, typer.Option("--min-p", help="Keep tokens this many times as likely as the likeliest.")
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")]
