"""The model families: one file each, named by its model type, with its numbers, tensor names and arithmetic.

A family sees state only through a `StateView`, and calls nothing but ops.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from redraft.config import ComputeType
from redraft.errors import ModelFileError
from redraft.models import kimi_k3, kimi_linear, llama
from redraft.models.metadata import Metadata
from redraft.models.spec import AttentionSpec, LayerSpec, Model, ModelSpec, RecurrentSpec, StateView
from redraft.models.weights import Recipe, TensorSource
from redraft.ops import Ops


class Family(Protocol):
    """What a family's module provides."""

    GGUF_ARCHITECTURE: str
    HF_MODEL_TYPES: tuple[str, ...]

    def spec_from_gguf(self, meta: Metadata) -> ModelSpec:
        """Read a GGUF file's description; keys carry the architecture as prefix."""

    def spec_from_hf(self, config: Metadata) -> ModelSpec:
        """Read a config.json."""

    def hf_recipes(self, spec: Any, names: set[str]) -> dict[str, Recipe]:
        """Canonical tensor names from those of a Hugging Face checkpoint."""

    def build(self, spec: Any, source: TensorSource, ops: Ops, compute: ComputeType) -> Model:
        """Load the model."""


FAMILIES = cast(tuple[Family, ...], (llama, kimi_linear, kimi_k3))


def family_for_gguf(architecture: str) -> Family:
    """The family of a GGUF file's `general.architecture`."""
    return _find(architecture, {family.GGUF_ARCHITECTURE: family for family in FAMILIES}, "architecture")


def family_for_hf(model_type: str) -> Family:
    """The family of a config.json's `model_type`."""
    return _find(
        model_type, {kind: family for family in FAMILIES for kind in family.HF_MODEL_TYPES}, "model type"
    )


def _find(name: str, families: dict[str, Family], what: str) -> Family:
    if name not in families:
        raise ModelFileError(f"{what} '{name}' is not supported; these are: {', '.join(sorted(families))}")
    return families[name]


__all__ = [
    "FAMILIES",
    "AttentionSpec",
    "Family",
    "LayerSpec",
    "Metadata",
    "Model",
    "ModelSpec",
    "RecurrentSpec",
    "StateView",
    "TensorSource",
    "family_for_gguf",
    "family_for_hf",
]
