"""From names on the command line to an engine: models loaded with a progress bar, drafters made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from redraft import ops
from redraft.config import EngineConfig
from redraft.engine import Engine
from redraft.loading import ModelFile, open_model
from redraft.models import Model
from redraft.speculate import Drafter, DraftModel, NGram, NoDraft

NGRAM = "ngram"


@dataclass(frozen=True)
class LoadedModels:
    """A target with its file, and who drafts for it."""

    file: ModelFile
    model: Model
    table: ops.Ops
    draft_name: str | None
    draft_model: Model | None

    def drafter(self, config: EngineConfig) -> Drafter:
        """A new drafter with state for this configuration."""
        if config.depth == 0 or self.draft_name is None:
            return NoDraft()
        if self.draft_model is None:
            return NGram()
        return DraftModel(self.draft_model, config, self.table, self.file.spec.vocab_size)

    def engine(self, config: EngineConfig, clock: Callable[[], float] | None = None) -> Engine:
        """A new engine on these weights."""
        timing = {} if clock is None else {"clock": clock}
        return Engine(
            self.model,
            config,
            self.table,
            tokenizer=self.file.tokenizer,
            drafter=self.drafter(config),
            **timing,
        )


def load_models(target: str, draft: str | None, console: Console, threads: int | None = None) -> LoadedModels:
    """Open and load; raises before any weight is read if the two do not go together."""
    file = open_model(target)
    draft_file = None if draft in (None, NGRAM) else open_model(str(draft))
    if draft_file is not None:
        file.require_same_vocabulary(draft_file)
    table = ops.choose(threads=threads)
    if table is ops.choose("reference"):
        console.print(f"[yellow]note:[/] {ops.description()}", soft_wrap=True)
    with Progress(
        TextColumn("loading {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
    ) as progress:
        model = _load(file, table, progress)
        draft_model = None if draft_file is None else _load(draft_file, table, progress)
    return LoadedModels(file, model, table, draft, draft_model)


def _load(file: ModelFile, table: ops.Ops, progress: Progress) -> Model:
    task = progress.add_task(file.name, total=file.num_tensors)
    return file.load(table, on_tensor=lambda: progress.advance(task))
