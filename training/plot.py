"""Loss curves: RUN_DIRECTORY/target.csv and draft.csv → OUTPUT.csv and OUTPUT.png.

python training/plot.py RUN_DIRECTORY docs/mini-k3-loss
"""

from __future__ import annotations

import argparse
import csv
from math import isnan
from pathlib import Path

import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    rows = []
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, colour in (("target", "tab:blue"), ("draft", "tab:orange")):
        with (arguments.run / f"{name}.csv").open(newline="") as file:
            curve = list(csv.DictReader(file))
        rows += [{"model": name, **row} for row in curve]
        tokens = [int(row["tokens"]) / 1e6 for row in curve]
        axes.plot(tokens, [float(row["loss"]) / 0.6931 for row in curve], colour, label=f"{name}, training")
        held_out = [float(row["held_out_bits_per_token"]) for row in curve]
        checked = [i for i, value in enumerate(held_out) if not isnan(value)]
        axes.plot(
            [tokens[i] for i in checked],
            [held_out[i] for i in checked],
            "o",
            color=colour,
            label=f"{name}, held-out text",
        )
    axes.set(xlabel="million tokens", ylabel="bits a token", ylim=(0, 8))
    axes.legend()
    figure.tight_layout()
    figure.savefig(arguments.output.with_suffix(".png"), dpi=110)
    with arguments.output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
