"""Train the target or the draft; stop it at any time and start it again, it goes on where it was.

    python training/train.py target RUN_DIRECTORY [--tokens 40e6]
    python training/train.py draft RUN_DIRECTORY [--tokens 20e6] [--teacher]

Needs prepare.py's files in RUN_DIRECTORY, the draft sample.py's too. Writes NAME.pt every few minutes and a
line to NAME.csv every hundred steps. The rate stays constant, then falls to zero over the last part of
--tokens; a later start may choose another number.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import SHAPES, MiniK3, Shape
from optimizer import optimizers

BATCH, SEQUENCE = 8, 512
SHARES = {  # of the sequences
    "target": {"text": 0.4, "functions": 0.2, "chats": 0.4},
    "draft": {
        "text": 0.15,
        "functions": 0.1,
        "chats": 0.35,
        "samples": 0.4,
    },  # samples: the target's own writing
}
FALL = 0.45  # of all tokens: where the rate falls
WARM_UP = 100  # steps
SAVE_SECONDS = 180
REPORT_STEPS = 100
BALANCE_RATE = 1e-3
DISTILL_SHARE = 0.8  # of a draft's loss when it has a teacher


class Windows:
    """Random windows of token arrays, NAME.npy; `shares` gives each name's part of them."""

    def __init__(self, run: Path, shares: dict[str, float], seed: int) -> None:
        missing = [name for name in shares if not (run / f"{name}.npy").is_file()]
        if missing:
            maker = "sample.py" if missing == ["samples"] else "prepare.py"
            raise SystemExit(f"{run / missing[0]}.npy does not exist: training/{maker} writes it")
        self._arrays = [np.load(run / f"{name}.npy", mmap_mode="r") for name in shares]
        self._shares = list(shares.values())
        self._random = np.random.default_rng(seed)

    def take(self) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens, [BATCH, SEQUENCE] each."""
        rows = []
        for i in self._random.choice(len(self._arrays), BATCH, p=self._shares):
            array = self._arrays[i]
            start = int(self._random.integers(len(array) - SEQUENCE - 1))
            rows.append(array[start : start + SEQUENCE + 1].astype(np.int64))
        tokens = torch.from_numpy(np.stack(rows))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def rate(step: int, tokens: int, total: int) -> float:
    """The schedule's factor."""
    falling = (total - tokens) / (FALL * total)
    return min(1.0, (step + 1) / WARM_UP, max(falling, 0.0))


def logits(model: MiniK3, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(model.features(tokens), model.embedding)


def loss_of(model: MiniK3, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits(model, inputs).flatten(0, 1).float(), targets.flatten())


def distillation_loss(
    model: MiniK3, inputs: Tensor, targets: Tensor, taught: Tensor
) -> tuple[Tensor, Tensor]:
    """The mixed loss, and the part that any training has. `taught` are the teacher's probabilities, bf16."""
    log_p = F.log_softmax(logits(model, inputs).flatten(0, 1).float(), dim=-1)
    plain = F.nll_loss(log_p, targets.flatten())
    return DISTILL_SHARE * -(taught.flatten(0, 1) * log_p).sum(-1).mean() + (1 - DISTILL_SHARE) * plain, plain


def balance(model: MiniK3) -> None:
    """Nudge each expert's bias towards an equal share of the tokens."""
    for experts in model.experts():
        experts.bias += BALANCE_RATE * torch.sign(experts.load.mean() - experts.load)
        experts.load.zero_()


@torch.no_grad()
def bits_per_token(model: MiniK3, array: np.ndarray, limit: int | None = None) -> float:
    """Over consecutive windows, at most `limit` batches."""
    model.eval()
    size = BATCH * SEQUENCE
    losses = []
    for start in range(0, len(array) - size - 1, size):
        if limit is not None and len(losses) == limit:
            break
        tokens = torch.from_numpy(np.asarray(array[start : start + size + 1]).astype(np.int64))
        losses.append(loss_of(model, tokens[:-1].view(BATCH, -1), tokens[1:].view(BATCH, -1)).item())
    model.train()
    return float(np.mean(losses)) / float(np.log(2))


def load(path: Path) -> MiniK3:
    """A trained model from its checkpoint."""
    kept = torch.load(path, weights_only=True)
    model = MiniK3(Shape(**{k: tuple(v) if isinstance(v, list) else v for k, v in kept["shape"].items()}))
    model.load_state_dict(kept["model"])
    return model.eval()


class Run:
    """A model under training, with what a later start needs."""

    def __init__(self, name: str, run: Path) -> None:
        self._path, self._csv = run / f"{name}.pt", run / f"{name}.csv"
        torch.manual_seed(7)
        self.model = MiniK3(SHAPES[name])
        self.optimizers = optimizers(self.model)
        self.step, self.tokens, self.minutes = 0, 0, 0.0
        self._began = self._saved = time.monotonic()
        if self._path.is_file():
            kept = torch.load(self._path, weights_only=True)
            self.model.load_state_dict(kept["model"])
            for optimizer, state in zip(self.optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.tokens, self.minutes = kept["step"], kept["tokens"], kept["minutes"]

    def elapsed(self) -> float:
        """Minutes of all starts."""
        return self.minutes + (time.monotonic() - self._began) / 60

    def save(self) -> None:
        """Write the checkpoint whole, or not at all."""
        part = self._path.with_suffix(".part")
        state = {
            "shape": self.model.shape.as_dict(),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "minutes": self.elapsed(),
        }
        torch.save(state, part)
        part.replace(self._path)
        self._saved = time.monotonic()

    def save_sometimes(self) -> None:
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def report(self, **figures: float) -> None:
        """A line of the loss curve."""
        row = {"step": self.step, "tokens": self.tokens, "minutes": round(self.elapsed(), 1)}
        row |= {key: f"{value:.4f}" for key, value in figures.items()}
        fresh = not self._csv.is_file()
        with self._csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def train(name: str, directory: Path, total: int, teacher: MiniK3 | None) -> None:
    """Train until `total` tokens have been seen, counting earlier starts."""
    run = Run(name, directory)
    windows = Windows(directory, SHARES[name], seed=run.step)
    held_out = np.load(directory / "held_out_text.npy", mmap_mode="r")
    loss = torch.compile(distillation_loss if teacher else loss_of)
    teach = (
        torch.compile(lambda tokens: F.softmax(logits(teacher, tokens), dim=-1).bfloat16())
        if teacher
        else None
    )
    losses: list[float] = []
    while run.tokens < total:
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * rate(run.step, run.tokens, total)
        inputs, targets = windows.take()
        if teach is None:
            value = plain = loss(run.model, inputs, targets)
        else:
            with torch.no_grad():
                taught = teach(inputs)
            value, plain = loss(run.model, inputs, targets, taught)
        value.backward()
        losses.append(plain.item())
        if not np.isfinite(losses[-1]):
            raise SystemExit(f"the loss is {losses[-1]} at step {run.step}; the checkpoint before it is kept")
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        balance(run.model)
        run.step += 1
        run.tokens += inputs.numel()
        if run.step % REPORT_STEPS == 0 or run.tokens >= total:
            figures = {
                "loss": float(np.mean(losses[-REPORT_STEPS:])),
                "rate": rate(run.step, run.tokens, total),
            }
            often = 5 if run.tokens < total else 1
            checked = run.step % (often * REPORT_STEPS) == 0 or run.tokens >= total
            figures["held_out_bits_per_token"] = (
                bits_per_token(run.model, held_out, 6) if checked else float("nan")
            )
            run.report(**figures)
        run.save_sometimes()
    run.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--tokens", type=float, default=40e6, help="in all, earlier starts included (default: 40e6)"
    )
    parser.add_argument("--teacher", action="store_true", help="learn from RUN_DIRECTORY/target.pt as well")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    teacher = load(arguments.run / "target.pt") if arguments.teacher else None
    train(arguments.name, arguments.run, int(arguments.tokens), teacher)


if __name__ == "__main__":
    main()
