"""A model as a planner sees it: what each layer keeps, and how large the weights are. Files and the catalogue
of published models both end in a `PlanSpec`; what an engine makes of it is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from redraft.models import LayerSpec, ModelSpec, RecurrentSpec

Rule = Literal["kda", "gdn", "mamba2", "mamba", "rwkv", "conv", "none"]


@dataclass(frozen=True)
class PlanLayer:
    """One layer's state. `window`: its attention keeps so many tokens (0: all). `indexer_dim`: numbers a
    token of a sparse-attention indexer. `extra_floats`: a further recurrent state, such as that of per-layer
    n-gram embeddings.
    """

    state: LayerSpec
    window: int = 0
    indexer_dim: int = 0
    extra_floats: int = 0


class WeightGroup(NamedTuple):
    """Weights of one encoding; `mtp`: only loaded when the model's own draft head is used."""

    encoding: str
    num_bytes: int
    mtp: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """A model in numbers.

    `architecture` is llama.cpp's name of it; `rule` is the recurrence of its recurrent layers. `mtp_layers`
    are those of its own draft head. `float32_state`: its configuration asks the GPU engines for a float32
    state. `weights_exact`: sizes come from file headers; else `weights_basis` says what they rest on.
    `remark`: what of all this was inferred.
    """

    name: str
    architecture: str
    rule: Rule
    hidden_size: int
    vocab_size: int
    max_context: int
    layers: tuple[PlanLayer, ...]
    mtp_layers: tuple[PlanLayer, ...] = ()
    float32_state: bool = False
    weights: tuple[WeightGroup, ...] = ()
    weights_exact: bool = False
    weights_basis: str = ""
    source: str
    remark: str = ""

    @property
    def recurrent(self) -> list[RecurrentSpec]:
        """The layers that carry a state which cannot be truncated."""
        return [layer.state.recurrent for layer in self.layers if layer.state.recurrent is not None]

    @property
    def attention(self) -> list[PlanLayer]:
        """The layers that keep a row a token."""
        return [layer for layer in self.layers if layer.state.attention is not None]

    @property
    def is_latent(self) -> bool:
        """Whether attention rows are latent: keys only."""
        return any(
            layer.state.attention is not None and layer.state.attention.latent for layer in self.layers
        )

    def weight_bytes(self, mtp: bool) -> int:
        """Bytes of the draft head's weights, or of all others."""
        return sum(group.num_bytes for group in self.weights if group.mtp == mtp)

    def model_spec(self) -> ModelSpec:
        """What `state_buffers` wants: the layers alone."""
        return ModelSpec(
            model_type=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_context=self.max_context,
            layers=tuple(layer.state for layer in self.layers),
        )


def conv_floats(layer: RecurrentSpec, num_columns: int | None = None) -> int:
    """Numbers in a conv window: W−1 columns, or as many as given."""
    return (layer.conv_width - 1 if num_columns is None else num_columns) * layer.conv_channels


def state_floats(layer: RecurrentSpec) -> int:
    """Numbers in a recurrent state [HV, K, V]."""
    return layer.num_value_heads * layer.key_dim * layer.value_dim
