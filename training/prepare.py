"""Corpus → tokenizer and token arrays.

    python training/prepare.py RUN_DIRECTORY [--library PATH]

Writes tokenizer.json; text.npy, functions.npy and chats.npy to train on, and the same of the held-out files,
held_out_*.npy, to measure with (uint16 tokens, each document after <|endoftext|>); and prepare.json, which
says what is in them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import Function, documents, functions
from transcripts import Messages, conversation

VOCAB_SIZE = 4096
START = "<|endoftext|>"  # before every document and conversation
END = "<|end|>"  # after every message
SPECIAL = [START, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A line break takes the indentation that follows; digits stand alone.
_SPLIT = r"[\r\n]+[ \t]*| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]+"
_ROUNDS = 2  # conversations made of each function


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render(messages: Messages) -> str:
    """A conversation as CHAT_TEMPLATE writes it, without the start token."""
    return "".join(f"<|{m['role']}|>{m['content']}{END}" for m in messages)


def conversations(found: list[Function], seed: int) -> list[str]:
    """About `_ROUNDS` for each function."""
    source = random.Random(seed)
    made = []
    for _ in range(_ROUNDS):
        for function in found:
            messages = conversation(source, function, source.sample(found, 3))
            if messages:
                made.append(render(messages))
    return made


def bare(found: list[Function]) -> list[str]:
    """Each function by itself, without docstring and comments: so that a signature is followed by code."""
    return sorted({plain(without_comments(function.bare)) for function in found if function.bare})


def without_comments(source: str) -> str:
    """Without the lines that are comments."""
    return "\n".join(line for line in source.split("\n") if not line.lstrip().startswith("#"))


def plain(text: str) -> str:
    """Special tokens that a source spells out are broken up."""
    return text.replace("<|", "< |")


def encode(tokenizer: Tokenizer, texts: list[str], seed: int) -> np.ndarray:
    """All texts in random order, each after the start token → uint16 [tokens]."""
    random.Random(seed).shuffle(texts)
    start = [tokenizer.token_to_id(START)]
    return np.concatenate(
        [np.array(start + e.ids, np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--library", type=Path, default=None, help="the standard library; default: this Python's own"
    )
    arguments = parser.parse_args()
    arguments.run.mkdir(parents=True, exist_ok=True)
    found = documents(arguments.library)
    parts = {"": [d for d in found if not d.held_out], "held_out_": [d for d in found if d.held_out]}
    texts = {}
    for part, chosen in parts.items():
        inside = [f for d in chosen for f in functions(d)]
        texts[f"{part}text"] = [plain(d.text) for d in chosen]
        texts[f"{part}functions"] = bare(inside)
        texts[f"{part}chats"] = conversations(inside, seed=len(part))
    tokenizer = train_tokenizer([*texts["text"], *texts["chats"][::4]])
    tokenizer.save(str(arguments.run / "tokenizer.json"))
    facts = {}
    for name, documents_ in texts.items():
        tokens = encode(tokenizer, documents_, seed=len(name))
        np.save(arguments.run / f"{name}.npy", tokens)
        size = sum(len(text.encode()) for text in documents_)
        facts[name] = {"documents": len(documents_), "bytes": size, "tokens": len(tokens)}
    (arguments.run / "prepare.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
