"""Models from files: what they are, their tensors and their tokenizer. The only place that knows file
formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from redraft.config import ComputeType
from redraft.errors import ModelFileError
from redraft.loading import gguf, safetensors, tokenizer
from redraft.loading.fingerprint import model_fingerprint, tensor_digest
from redraft.loading.packaged import fetch, resolve
from redraft.loading.tokenizer import TextStream, Tokenizer
from redraft.models import Family, Metadata, Model, ModelSpec, TensorSource, family_for_gguf, family_for_hf
from redraft.models.weights import Renamed
from redraft.ops import Ops, RawTensor


@dataclass(frozen=True)
class ModelFile:
    """An opened model: described, with its weights still on disk. `tokenizer` is None where
    `why_no_tokenizer` says.
    """

    path: Path
    spec: ModelSpec
    tokenizer: Tokenizer | None
    why_no_tokenizer: str
    _family: Family
    _source: TensorSource

    @property
    def name(self) -> str:
        """A short name for tables."""
        return self.path.stem if self.path.is_file() else self.path.name

    @property
    def num_tensors(self) -> int:
        """How many tensors `load` will read."""
        return len(self._source.names())

    def load(
        self, ops: Ops, compute: ComputeType = "float32", on_tensor: Callable[[], None] = lambda: None
    ) -> Model:
        """Read the weights; `on_tensor` is called after each. The model gets its fingerprint on the way."""
        source = _Observed(self._source, on_tensor)
        model = self._family.build(self.spec, source, ops, compute)
        model.fingerprint = model_fingerprint(self.spec, source.digests)
        return model

    def require_same_vocabulary(self, draft: ModelFile) -> None:
        """Raise unless a token means the same to a draft model as to this one."""
        if self.tokenizer is not None and draft.tokenizer is not None:
            own, other = self.tokenizer.vocabulary(), draft.tokenizer.vocabulary()
            differing = {number for _, number in own.items() ^ other.items()}
            where = f" from token {min(differing)} on" if differing else ""
        else:
            where = "" if self.spec.vocab_size == draft.spec.vocab_size else " (their sizes differ)"
        if where:
            raise ModelFileError(
                f"draft model '{draft.name}' has another vocabulary than '{self.name}'{where}: "
                "its tokens would mean something else; use a draft model of the same family"
            )

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, or an error that says why there is none."""
        if self.tokenizer is None:
            raise ModelFileError(f"{self.path}: {self.why_no_tokenizer}")
        return self.tokenizer


class _Observed:
    """A source that reports each read and keeps a digest of what was read."""

    def __init__(self, source: TensorSource, on_tensor: Callable[[], None]) -> None:
        self.digests: dict[str, str] = {}
        self._source = source
        self._on_tensor = on_tensor
        self.names = source.names

    def read(self, name: str) -> RawTensor:
        """See `TensorSource`."""
        tensor = self._source.read(name)
        self.digests[name] = tensor_digest(tensor)
        self._on_tensor()
        return tensor


def open_model(model: str | Path) -> ModelFile:
    """Open a packaged model by name, a Hugging Face directory, or a GGUF file."""
    path = resolve(str(model))
    return _open_directory(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> ModelFile:
    file = gguf.GGUFFile(path)
    architecture = str(Metadata(file.metadata).get("general.architecture"))
    family = family_for_gguf(architecture)
    values = dict(file.metadata)
    values.setdefault(f"{architecture}.vocab_size", len(values.get("tokenizer.ggml.tokens", [])) or None)
    spec = family.spec_from_gguf(Metadata(values, f"{architecture}."))
    try:
        return ModelFile(path, spec, tokenizer.from_gguf(file.metadata), "", family, file)
    except ModelFileError as error:
        return ModelFile(path, spec, None, str(error), family, file)


def _open_directory(path: Path) -> ModelFile:
    config = safetensors.read_json(path / "config.json")
    if "quantization_config" in config or "quantization_config" in config.get("text_config", {}):
        raise ModelFileError(
            f"{path}: quantized checkpoints are not supported; use a GGUF file or a float checkpoint"
        )
    family = family_for_hf(str(Metadata(config).get("model_type")))
    spec = family.spec_from_hf(Metadata(config))
    source = safetensors.SafetensorsDirectory(path, getattr(family, "IGNORED_HF_PREFIXES", ()))
    renamed = Renamed(source, family.hf_recipes(spec, source.names()))
    try:
        return ModelFile(path, spec, tokenizer.from_directory(path), "", family, renamed)
    except ModelFileError as error:
        return ModelFile(path, spec, None, str(error), family, renamed)


__all__ = ["ModelFile", "TextStream", "Tokenizer", "fetch", "open_model", "resolve"]
