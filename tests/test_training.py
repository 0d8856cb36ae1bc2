"""The recipe of mini-K3: gradients of its operations, its forward against the engine, its conversations."""

from __future__ import annotations

import ast
import itertools
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from conftest import REFERENCE, TABLE, nmse
from redraft.config import EngineConfig
from redraft.loading import open_model
from redraft.loading.chat import ChatTemplate
from redraft.ops import Ops
from redraft.runner import Runner
from redraft.state import Window

TRAINING = Path(__file__).parents[1] / "training"


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAINING))


@pytest.fixture
def torch() -> ModuleType:
    return pytest.importorskip("torch", reason="the recipe's extra 'train' is not installed")


def delta_rule_in_steps(torch, q, k, v, g, beta):  # type: ignore[no-untyped-def]
    batch, time, heads, width = q.shape
    state, out = torch.zeros(batch, heads, width, width, dtype=q.dtype), []
    for t in range(time):
        state = g[:, t].exp()[..., None] * state
        recalled = torch.einsum("bhij,bhi->bhj", state, k[:, t])
        update = beta[:, t][..., None] * (v[:, t] - recalled)
        state = state + k[:, t][..., None] * update[..., None, :]
        out.append(torch.einsum("bhij,bhi->bhj", state, q[:, t]))
    return torch.stack(out, 1)


def assert_equal_gradients(torch, compute, truth, *inputs) -> None:  # type: ignore[no-untyped-def]
    """`compute` in float32 against autograd's `truth` in float64, forward and for each input."""
    exact = [x.double().requires_grad_() for x in inputs]
    ours = [x.clone().requires_grad_() for x in inputs]
    want, got = truth(*exact), compute(*ours)
    weights = torch.randn(want.shape)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    pairs = [(got, want), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    for a, b in pairs:
        error, size = (a - b).square().sum().item(), b.square().sum().item()
        assert error <= 1e-11 * size  # float32 against float64: rounding only


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("time", [1, 32, 75])
def test_the_delta_rule_and_its_gradient(torch: ModuleType, width: int, time: int) -> None:
    from kernels import delta_rule

    torch.manual_seed(time)
    q, k, v, g = (torch.randn(2, time, 3, width) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    inputs = q, k, v, -5 * torch.sigmoid(g - 2), torch.rand(2, time, 3)
    assert_equal_gradients(torch, delta_rule, lambda *x: delta_rule_in_steps(torch, *x), *inputs)


def test_other_widths_are_refused(torch: ModuleType) -> None:
    from kernels import delta_rule, short_conv

    x = torch.zeros(1, 2, 1, 48)
    with pytest.raises(ValueError, match="heads of 48 channels are not compiled; 32 and 64 are"):
        delta_rule(x, x, x, x, torch.zeros(1, 2, 1))
    with pytest.raises(ValueError, match="48 channels are not a multiple of 64"):
        short_conv(x[0], torch.zeros(48, 4))


def test_the_convolution_and_its_gradient(torch: ModuleType) -> None:
    from kernels import short_conv

    def truth(x, taps):  # type: ignore[no-untyped-def]
        padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
        return torch.nn.functional.silu(sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(4)))

    torch.manual_seed(0)
    assert_equal_gradients(torch, short_conv, truth, torch.randn(2, 9, 128), torch.randn(128, 4))


def situ_in_words(torch, gate_up):  # type: ignore[no-untyped-def]
    gate, up = gate_up.chunk(2, -1)
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def test_situ_and_its_gradient(torch: ModuleType) -> None:
    from kernels import situ

    torch.manual_seed(0)
    inputs = torch.randn(5, 3, 64) * 6
    assert_equal_gradients(torch, situ, lambda x: situ_in_words(torch, x), inputs)
    got, want = situ(inputs.bfloat16()).float(), situ_in_words(torch, inputs.double())
    assert nmse(got.numpy(), want.numpy()) < 5e-5  # bf16: 8 bits of mantissa, in and out


def test_experts_and_their_gradient(torch: ModuleType) -> None:
    """Some experts get no row, some more than a padded part holds."""
    from kernels import experts

    torch.manual_seed(0)
    ids = torch.stack(
        [torch.randint(0, 2, (300,)), torch.randint(2, 7, (300,))], dim=1
    )  # nobody chooses expert 7

    def truth(x, weights, gate_up, down):  # type: ignore[no-untyped-def]
        parts = []
        for choice in range(2):
            hidden = torch.einsum("bl,bil->bi", x, gate_up[ids[:, choice]])
            y = torch.einsum("bi,bil->bl", situ_in_words(torch, hidden), down[ids[:, choice]])
            parts.append(weights[:, choice : choice + 1] * y)
        return parts[0] + parts[1]

    def ours(x, weights, gate_up, down):  # type: ignore[no-untyped-def]
        return experts(x, ids, weights, gate_up, down)

    inputs = torch.randn(300, 16), torch.rand(300, 2), torch.randn(8, 48, 16) / 4, torch.randn(8, 24, 16) / 4
    assert_equal_gradients(torch, ours, truth, *inputs)


@pytest.mark.parametrize("name", ["target", "draft"])
@pytest.mark.parametrize("table", [REFERENCE, TABLE], ids=["reference", "native"])
def test_the_trained_model_is_the_engine_s(torch: ModuleType, name: str, table: Ops, tmp_path: Path) -> None:
    """Training's forward against the engine on exported float32 weights, all moved off their start."""
    from export import export
    from model import SHAPES, MiniK3

    torch.manual_seed(1)
    made = MiniK3(SHAPES[name]).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for experts in made.experts():
            experts.bias.normal_(0, 0.1)
    export(made, open_model("mini-k3").path / "tokenizer.json", tmp_path, torch.float32)
    tokens = np.random.default_rng(0).integers(0, 4096, 70)
    with torch.no_grad():
        truth = made(torch.from_numpy(tokens[None]))[0].numpy()
    runner = Runner(
        open_model(tmp_path).load(table), EngineConfig(num_slots=1, max_context=128, depth=0), table
    )
    runner.pool.reset(0)
    got = runner.forward([Window(0, tokens.tolist(), num_logits=len(tokens), advance=True)])[0]
    assert nmse(got, truth) < 1e-6  # float32 on both sides; a wrong detail gives 1e-3


def test_orthogonal_matrices(torch: ModuleType) -> None:
    from optimizer import orthogonal

    torch.manual_seed(0)
    for shape in [(3, 16, 48), (2, 48, 16)]:
        singular = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
        assert singular.min() > 0.5  # the iteration only goes near 1
        assert singular.max() < 1.3


LIBRARY = {
    "a.py": '''#!/usr/bin/env python
# Copyright 1999 by somebody. All rights reserved.

"""A module."""

# =========================

def area(width, height):
    """Return the area. Always."""
    if width < 0:
        raise ValueError(width)
    size = width * height
    return size
'''
    + "x = 1\n" * 40,
    "test/test_a.py": """import unittest

class T(unittest.TestCase):
    def test_area(self):
        value = 3
        self.assertEqual(value, 3)

# and so on, and so on, and so on, and so on, and so on, and so on, and so on, and so on, and so on


if __name__ == '__main__':
    unittest.main()
""",
    "site-packages/b.py": "y = 1\n" * 100,
    "encodings/cp1.py": "z = 1\n" * 100,
    "table.py": "t = [" + "0x12, 0x34,\n" * 100 + "]\n",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in LIBRARY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "copy.py").write_text(LIBRARY["a.py"])
    (tmp_path / "latin.py").write_bytes(b"# \xff\n" * 100)
    return tmp_path


def test_the_corpus_is_clean(library: Path) -> None:
    from corpus import documents

    found = {d.path: d.text for d in documents(library) if not d.path.startswith("topics/")}
    assert sorted(found) == ["a.py", "test/test_a.py"]
    assert found["a.py"].startswith('"""A module."""')
    assert "====" not in found["a.py"]
    assert not found["test/test_a.py"].rstrip().endswith("unittest.main()")


def test_held_out_files_stay_held_out(library: Path) -> None:
    from corpus import documents

    first = {d.path: d.held_out for d in documents(library)}
    assert first == {d.path: d.held_out for d in documents(library)}
    everything = documents()
    share = sum(d.held_out for d in everything) / len(everything)
    assert 0.01 < share < 0.06


def test_functions_know_themselves(library: Path) -> None:
    from corpus import documents, functions

    found = {f.name: f for d in documents(library) for f in functions(d)}
    assert found["area"].doc == "Return the area."
    assert found["area"].arguments == ("width", "height")
    assert found["area"].raises == ("ValueError",)
    assert found["test_area"].source.startswith("def test_area(self):\n    value")


def test_functions_by_themselves_begin_with_code(library: Path) -> None:
    from corpus import documents, functions
    from prepare import bare, without_comments

    found = {f.name: f for d in documents(library) for f in functions(d)}
    area = found["area"]
    assert area.source.count('"""') == 2
    assert area.bare == area.source.replace('    """Return the area. Always."""\n', "")
    assert area.source.split("\n")[area.head].strip() == '"""Return the area. Always."""'
    assert found["test_area"].bare == found["test_area"].source
    assert set(bare(list(found.values()))) == {function.bare for function in found.values()}
    assert without_comments("def f():\n    # a\n    return '#'  # b") == "def f():\n    return '#'  # b"

    some = [f for d in documents()[::10] for f in functions(d) if f.bare]
    docs = [ast.get_docstring(ast.parse(f.bare).body[0]) for f in some]  # type: ignore[arg-type]
    assert len(docs) > 1000
    assert docs.count(None) == len(docs)


def test_windows_have_their_shares(torch: ModuleType, tmp_path: Path) -> None:
    from train import BATCH, SEQUENCE, SHARES, Windows

    for number, name in enumerate(SHARES["draft"]):
        np.save(tmp_path / f"{name}.npy", np.full(2 * SEQUENCE, number, np.uint16))
    for shares in SHARES.values():
        windows = Windows(tmp_path, shares, seed=0)
        rows = torch.cat([windows.take()[0][:, 0] for _ in range(200)]).tolist()
        for number, name in enumerate(SHARES["draft"]):
            # five standard deviations of so many draws
            assert abs(rows.count(number) / (200 * BATCH) - shares.get(name, 0)) < 0.065
    (tmp_path / "samples.npy").unlink()
    with pytest.raises(SystemExit, match=r"samples.npy does not exist: training/sample.py writes it"):
        Windows(tmp_path, SHARES["draft"], seed=0)


def test_conversations_are_right(library: Path) -> None:
    """Every request's answer, where it can be told from the request."""
    from corpus import documents, functions
    from transcripts import conversation

    found = [f for d in documents(library) for f in functions(d)]
    source = random.Random(0)
    requests: set[str] = set()
    for _ in range(400):
        messages = conversation(source, found[0], found)
        roles = [m["role"] for m in messages]
        assert set(roles) <= {"system", "user", "assistant", "tool"}
        assert not roles or roles[-1] == "assistant"
        for asked, answered in itertools.pairwise(messages):
            if asked["role"] != "user":
                continue
            request, answer = asked["content"], answered["content"]
            requests.add(request.removeprefix("Now ").split()[0].lower())
            if request.startswith("Rename width to "):
                new = request.split()[3]
                assert "width" not in answer
                assert answer.replace(new, "width") == found[0].source
            elif request.startswith("Which arguments does area"):
                assert answer == "area takes 2 arguments: width and height."
            elif request.startswith("Which exceptions"):
                assert answer == "area raises ValueError."
            elif request.startswith("Quote"):
                word = request.split("\n")[0].rstrip(".").split()[-1]
                assert answer == "\n".join(x for x in found[0].source.split("\n") if word in x)
            elif request.startswith(("Fix", "Complete", "Print")):
                assert answer == found[0].source
    assert {
        "rename",
        "which",
        "quote",
        "fix",
        "complete",
        "write",
        "what",
        "replace",
        "add",
        "print",
    } <= requests


def test_the_chat_template_writes_what_was_trained() -> None:
    prepare = pytest.importorskip("prepare")
    messages = [
        {"role": r, "content": c}
        for r, c in [("system", "a"), ("user", "b"), ("assistant", "c"), ("tool", "d\n")]
    ]
    template = ChatTemplate(prepare.CHAT_TEMPLATE, {"bos_token": prepare.START})
    assert template.render(messages, generate=False) == prepare.START + prepare.render(messages)
    assert template.render(messages).endswith("<|assistant|>")


def test_the_built_in_model_has_the_recipe_s_tokens() -> None:
    prepare = pytest.importorskip("prepare")
    tokenizer = open_model("mini-k3").require_tokenizer()
    vocabulary = tokenizer.vocabulary()
    assert len(vocabulary) == prepare.VOCAB_SIZE
    assert [vocabulary[name] for name in prepare.SPECIAL] == list(range(len(prepare.SPECIAL)))
    text = 'def f(x):\n    return {"é": x + 10}\n\n\n\tend  '
    assert tokenizer.decode(tokenizer.encode(text)) == text
