"""`redraft serve`: answers over HTTP are the engine's, and nothing that a client does disturbs another."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from conftest import TABLE, heed_interrupts
from redraft.config import EngineConfig, SamplingParams
from redraft.engine import Engine, Request
from redraft.loading import open_model
from redraft.serve import EngineWorker, ServerSettings, create_app
from redraft.speculate import NGram
from redraft.verify import PROBES, probe_server
from redraft.verify import ServerSettings as ProbeSettings
from redraft.verify.counters import parse_counters

FILE = open_model("mini-k3")
MODEL = FILE.load(TABLE)
TOKENIZER = FILE.require_tokenizer()
CONTEXT = 512
SNIPPET = "def last(items):\n    if not items:\n        return None\n    return items[-1]"
COPY = [{"role": "user", "content": f"Print this snippet again without any change.\n\n{SNIPPET}"}]
PLAIN = "import os\n\n\ndef read_lines(path):\n"


def engine(depth: int = 4, slots: int = 2, prefix_bytes: int = 0) -> Engine:
    config = EngineConfig(num_slots=slots, max_context=CONTEXT, depth=depth, prefix_bytes=prefix_bytes)
    return Engine(MODEL, config, TABLE, tokenizer=TOKENIZER, drafter=NGram() if depth else None)


def alone(tokens: list[int], **params: Any) -> str:
    """A request's text by itself, without speculation."""
    used = engine(depth=0, slots=1)
    generation = used.submit(Request(tokens=tuple(tokens), params=SamplingParams(**params)))
    used.run()
    return generation.text


def chat_tokens(messages: list[dict[str, str]]) -> list[int]:
    assert TOKENIZER.chat is not None
    return TOKENIZER.encode(TOKENIZER.chat.render(messages), start=False)


def served(
    test: Callable[[TestClient], Awaitable[None]], used: Engine | None = None, **settings: Any
) -> None:
    """Run a test with a client of a new server."""

    async def run() -> None:
        given = ServerSettings(model="mini-k3", max_context=CONTEXT, **settings)
        server = TestServer(create_app(EngineWorker(used or engine()), TOKENIZER, given))
        await server.start_server()
        async with TestClient(server) as client, asyncio.timeout(120):
            await test(client)

    asyncio.run(run())


async def post(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(f"/v1/{path}", json=body)
    answer = await response.json()
    assert response.status == 200, answer
    return answer


async def stream(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    async with client.post(f"/v1/{path}", json={**body, "stream": True}) as response:
        assert response.status == 200
        *chunks, last = re.findall("^data: (.*)$", await response.text(), re.MULTILINE)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_the_engines(temperature: float) -> None:
    wanted = {"temperature": temperature, "max_tokens": 48}
    plain = alone(TOKENIZER.encode(PLAIN), **wanted)
    answer = alone(chat_tokens(COPY), **wanted)

    async def test(client: TestClient) -> None:
        whole = await post(client, "completions", prompt=PLAIN, **wanted)
        assert whole["choices"][0]["text"] == plain
        assert streamed_text(await stream(client, "completions", prompt=PLAIN, **wanted)) == plain
        as_tokens = await post(client, "completions", prompt=TOKENIZER.encode(PLAIN), **wanted)
        assert as_tokens["choices"][0]["text"] == plain
        whole = await post(client, "chat/completions", messages=COPY, **wanted)
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": answer}
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["timings"]["draft_n_accepted"] > 0
        chunks = await stream(client, "chat/completions", messages=COPY, **wanted)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert streamed_text(chunks) == answer
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    served(test)


def test_neighbours_do_not_matter() -> None:
    """Eight requests at once on two slots, each with its own seed, against each by itself."""
    wanted = [{"temperature": 0.8, "max_tokens": 24, "seed": seed} for seed in range(8)]
    expected = [alone(TOKENIZER.encode(PLAIN), **params) for params in wanted]
    assert len(set(expected)) > 4

    async def test(client: TestClient) -> None:
        found = await asyncio.gather(*(post(client, "completions", prompt=PLAIN, **p) for p in wanted))
        assert [answer["choices"][0]["text"] for answer in found] == expected

    served(test)


def test_several_answers_have_seeds_that_follow() -> None:
    wanted = {"temperature": 0.8, "max_tokens": 16}
    expected = [alone(TOKENIZER.encode(PLAIN), seed=5 + i, **wanted) for i in range(3)]

    async def test(client: TestClient) -> None:
        whole = await post(client, "completions", prompt=PLAIN, n=3, seed=5, **wanted)
        assert [choice["text"] for choice in whole["choices"]] == expected
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert whole["usage"]["prompt_tokens"] == len(TOKENIZER.encode(PLAIN))
        assert whole["usage"]["completion_tokens"] == 48
        chunks = await stream(client, "completions", prompt=PLAIN, n=3, seed=5, **wanted)
        assert [streamed_text(chunks, index) for index in range(3)] == expected

    served(test)


def test_without_a_seed_the_same_request_has_the_same_answer() -> None:
    async def test(client: TestClient) -> None:
        first, again = [await post(client, "completions", prompt=PLAIN) for _ in range(2)]
        assert first["choices"] == again["choices"]
        assert first["usage"]["completion_tokens"] == 16
        other = await post(client, "completions", prompt=PLAIN, seed=1)
        assert other["choices"] != first["choices"]

    served(test)


def test_log_probabilities() -> None:
    async def test(client: TestClient) -> None:
        wanted = {"prompt": PLAIN, "max_tokens": 24, "temperature": 0}
        whole = (await post(client, "completions", logprobs=3, **wanted))["choices"][0]
        listed = whole["logprobs"]
        assert "".join(listed["tokens"]) == whole["text"]
        assert [whole["text"][at : at + 1] for at in listed["text_offset"]] == [
            t[0] for t in listed["tokens"]
        ]
        for token, value, top in zip(
            listed["tokens"], listed["token_logprobs"], listed["top_logprobs"], strict=True
        ):
            assert top[token] == value == max(top.values()) <= 0
            assert len(top) <= 3
        undrafted = await post(client, "completions", logprobs=3, depth=0, **wanted)
        assert undrafted["timings"]["draft_n"] == 0
        assert undrafted["choices"][0] == whole
        chunks = await stream(client, "completions", logprobs=3, **wanted)
        for name, values in listed.items():
            pieces = [chunk["choices"][0]["logprobs"][name] for chunk in chunks]
            assert [value for piece in pieces for value in piece] == values
        chat = (await post(client, "chat/completions", messages=COPY, logprobs=True, top_logprobs=2))[
            "choices"
        ][0]
        entries = chat["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == chat["message"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert (await post(client, "completions", **wanted))["choices"][0]["logprobs"] is None

    served(test)


def test_stop_strings_and_counts() -> None:
    async def test(client: TestClient) -> None:
        wanted = {"messages": COPY, "temperature": 0, "stop": "return"}
        whole = await post(client, "chat/completions", **wanted)
        assert whole["choices"][0]["message"]["content"] == SNIPPET[: SNIPPET.index("return")]
        assert whole["choices"][0]["finish_reason"] == "stop"
        chunks = await stream(client, "chat/completions", stream_options={"include_usage": True}, **wanted)
        assert streamed_text(chunks) == SNIPPET[: SNIPPET.index("return")]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert whole["usage"]["prompt_tokens"] == len(chat_tokens(COPY))
        counts = whole["usage"]
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
        short = await post(client, "chat/completions", messages=COPY, max_completion_tokens=2)
        assert short["choices"][0]["finish_reason"] == "length"
        assert short["usage"]["completion_tokens"] == 2

    served(test)


def test_the_next_turn_of_a_conversation_goes_on_from_the_last() -> None:
    """With the same text as an engine that keeps nothing."""
    first = alone(chat_tokens(COPY), max_tokens=64)
    turn = {"role": "user", "content": "Now which arguments does last take?"}
    messages = [*COPY, {"role": "assistant", "content": first}, turn]
    second = alone(chat_tokens(messages), max_tokens=32)

    async def test(client: TestClient) -> None:
        wanted = {"temperature": 0, "max_tokens": 64}
        answer = await post(client, "chat/completions", messages=COPY, **wanted)
        assert answer["choices"][0]["message"]["content"] == first
        answer = await post(client, "chat/completions", messages=messages, **{**wanted, "max_tokens": 32})
        assert answer["choices"][0]["message"]["content"] == second
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= len(chat_tokens(COPY))
        assert answer["timings"]["prompt_n"] == answer["usage"]["prompt_tokens"] - cached

    served(test, engine(prefix_bytes=2**26))


ENDLESS = {"prompt": PLAIN, "max_tokens": 400, "ignore_eos": True}


def test_a_client_that_goes_away_leaves_its_slot() -> None:
    """While streaming, and while it waits for a whole body."""

    async def test(client: TestClient) -> None:
        expected = await post(client, "completions", prompt=PLAIN)
        async with client.post("/v1/completions", json={**ENDLESS, "stream": True}) as response:
            await response.content.readline()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(client, "completions", **ENDLESS), 0.05)
        assert (await post(client, "completions", prompt=PLAIN))["choices"] == expected["choices"]
        page = await (await client.get("/metrics")).text()
        assert 'redraft:requests_total{finish_reason="cancelled"} 2' in page
        assert "redraft:num_requests_running 0" in page

    served(test, engine(slots=1))


CHAT, TEXT = "chat/completions", "completions"
REFUSALS = [
    (TEXT, {}, 400, "prompt is missing"),
    (TEXT, {"prompt": PLAIN, "temprature": 1}, 400, "temprature is not a field of this request"),
    (TEXT, {"prompt": PLAIN, "temperature": -1}, 400, "temperature must be 0 to 100, not -1"),
    (
        TEXT,
        {"prompt": PLAIN, "temperature": "hot"},
        400,
        'temperature: input should be a valid number, not "hot"',
    ),
    (TEXT, {"prompt": PLAIN, "max_tokens": 0}, 400, "max_tokens must be at least 1, not 0"),
    (TEXT, {"prompt": PLAIN, "n": 65}, 400, "n: input should be less than or equal to 64, not 65"),
    (TEXT, {"prompt": PLAIN, "seed": -1}, 400, "seed must be 0 to 2^64 - 1, not -1"),
    (TEXT, {"prompt": PLAIN, "stop": [""]}, 400, "a stop string must not be empty"),
    (
        TEXT,
        {"prompt": PLAIN, "logit_bias": {"x": 1}},
        400,
        "logit_bias maps token numbers to values, not 'x'",
    ),
    (TEXT, {"prompt": PLAIN, "logit_bias": {"4096": 1}}, 400, "token 4096 is outside the model's vocabulary"),
    (TEXT, {"prompt": PLAIN, "depth": 5}, 400, "depth 5 is outside the engine's 0 to 4"),
    (TEXT, {"prompt": PLAIN, "logprobs": 21}, 400, "logprobs: input should be less than or equal to 20"),
    (TEXT, {"prompt": PLAIN, "echo": True}, 400, "echo is not supported"),
    (TEXT, {"prompt": PLAIN, "model": "other"}, 404, "model 'other' is not served here; this is: mini-k3"),
    (TEXT, {"prompt": [PLAIN, PLAIN]}, 400, "prompt is a list of 2 texts"),
    (TEXT, {"prompt": []}, 400, "the prompt is empty"),
    (TEXT, {"prompt": [5000]}, 400, "token 5000 is outside the model's vocabulary of 4096"),
    (TEXT, {"prompt": [3] * CONTEXT}, 400, f"the prompt's {CONTEXT} tokens leave no room in the context"),
    (CHAT, {"messages": []}, 400, "messages is empty"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 3}]},
        400,
        "messages.0.content: input should be a valid",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]},
        400,
        "messages.0.content.0.type: input should be 'text'",
    ),
    (CHAT, {"messages": [{"content": "a"}]}, 400, "messages.0.role is missing"),
    (CHAT, {"messages": COPY, "top_logprobs": 2}, 400, "top_logprobs needs logprobs: true"),
    (CHAT, {"messages": COPY, "tools": [{"type": "function"}]}, 400, "tools is not supported"),
    (CHAT, {"messages": COPY, "response_format": {"type": "json_object"}}, 400, "response_format is not"),
]


def test_refusals_name_what_is_wrong() -> None:
    async def test(client: TestClient) -> None:
        for path, body, status, said in REFUSALS:
            response = await client.post(f"/v1/{path}", json=body)
            message = (await response.json())["error"]["message"]
            assert (response.status, said in message) == (status, True), (body, message)
            assert "\n" not in message
        for data, said in [
            ("{", "the request body is not JSON"),
            ("[]", "must be a JSON object, not a list"),
        ]:
            response = await client.post("/v1/completions", data=data)
            assert response.status == 400
            assert said in (await response.json())["error"]["message"]
        response = await client.post("/v1/completions", data=b"\xff\xfe")
        assert response.status == 400
        for method, path, status in [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)]:
            response = await client.request(method, path)
            assert response.status == status
            assert path in (await response.json())["error"]["message"]

    served(test)


def test_fields_without_effect_and_nulls_are_taken() -> None:
    async def test(client: TestClient) -> None:
        plain = await post(client, "chat/completions", messages=COPY)
        message = {**COPY[0], "name": None, "tool_calls": None, "refusal": None}
        same = await post(
            client, "chat/completions", messages=[message], model="mini-k3", user="u", tools=[], stop=None,
            response_format={"type": "text"}, metadata={"a": "b"}, max_tokens=None,
        )  # fmt: skip
        assert same["choices"] == plain["choices"]
        parts = [{"type": "text", "text": part} for part in (COPY[0]["content"][:9], COPY[0]["content"][9:])]
        in_parts = await post(client, "chat/completions", messages=[{"role": "user", "content": parts}])
        assert in_parts["choices"] == plain["choices"]

    served(test)


def test_a_key_is_asked_for() -> None:
    async def test(client: TestClient) -> None:
        assert (await client.get("/health")).status == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer gehe\u00efm"}):
            response = await client.get("/v1/models", headers=headers)
            assert response.status == 401
            assert "key" in (await response.json())["error"]["message"]
        good = await client.get("/v1/models", headers={"Authorization": "Bearer geheim"})
        assert [entry["id"] for entry in (await good.json())["data"]] == ["mini-k3"]

    served(test, api_key="geheim")


def test_too_many_requests_are_refused_and_the_others_served() -> None:
    async def test(client: TestClient) -> None:
        async with client.post("/v1/completions", json={**ENDLESS, "stream": True}) as response:
            await response.content.readline()
            refused = await client.post("/v1/completions", json={"prompt": PLAIN})
            assert refused.status == 429
            assert "1 requests are under way, of at most 1" in (await refused.json())["error"]["message"]
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await post(client, "completions", prompt=PLAIN)

    served(test, max_requests=1)


@pytest.mark.parametrize("part", ["_runner.forward", "_append", "_commit"])
def test_a_step_that_fails(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Wherever it fails, the request at hand ends with an error, and the next finds nothing of it."""
    used = engine(slots=1)
    *way, name = part.split(".")
    owner = getattr(used, way[0]) if way else used
    whole, calls = getattr(owner, name), []

    def failing(*arguments: Any, **settings: Any) -> Any:
        calls.append(name)
        result = whole(*arguments, **settings)
        if len(calls) == 4:  # some tokens on
            raise MemoryError("planted")
        return result

    async def test(client: TestClient) -> None:
        response = await client.post("/v1/completions", json={"prompt": PLAIN, "ignore_eos": True})
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "the engine failed: planted"
        page = await (await client.get("/metrics")).text()
        assert 'redraft:requests_total{finish_reason="error"} 1' in page
        assert "redraft:num_requests_running 0" in page
        again = await post(client, "completions", prompt=PLAIN, temperature=0)
        assert again["choices"][0]["text"] == alone(TOKENIZER.encode(PLAIN), max_tokens=16)

    monkeypatch.setattr(owner, name, failing)
    served(test, used)


def test_metrics_count_what_was_done() -> None:
    async def test(client: TestClient) -> None:
        answers = [await post(client, "chat/completions", messages=COPY, temperature=0) for _ in range(2)]
        page = await (await client.get("/metrics")).text()
        counters = parse_counters(page)
        assert counters is not None
        assert counters.drafted == sum(answer["timings"]["draft_n"] for answer in answers) > 0
        assert counters.accepted == sum(answer["timings"]["draft_n_accepted"] for answer in answers)
        written = sum(answer["usage"]["completion_tokens"] for answer in answers)
        assert f"redraft:generation_tokens_total {written}\n" in page
        assert 'redraft:requests_total{finish_reason="stop"} 2\n' in page

    served(test)


def test_shutting_down_ends_what_runs() -> None:
    lines: list[bytes] = []

    async def run() -> None:
        worker = EngineWorker(engine())
        settings = ServerSettings(model="mini-k3", max_context=CONTEXT)
        server = TestServer(create_app(worker, TOKENIZER, settings))
        await server.start_server()
        async with TestClient(server) as client, asyncio.timeout(120):
            response = await client.post("/v1/completions", json={**ENDLESS, "stream": True})
            await response.content.readline()
            await worker.stop()
            lines.append(await response.read())
            late = await client.post("/v1/completions", json={"prompt": PLAIN})
            assert late.status == 503

    asyncio.run(run())
    assert b"the server is shutting down" in lines[0]
    assert b"[DONE]" not in lines[0]


def test_our_own_server_passes_our_own_probes() -> None:
    results = []

    async def test(client: TestClient) -> None:
        settings = ProbeSettings(url=str(client.make_url("/")), off={"depth": 0})
        results.extend([result async for result in probe_server(settings)])

    served(test, engine(slots=3, prefix_bytes=2**26))
    assert [result for result in results if result.findings] == []
    assert [result.name for result in results] == list(PROBES)
    assert sum(result.ties + result.unknown for result in results) == 0
    assert {result.name for result in results if result.skipped} <= {"stop"}  # where greedy texts are short


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "redraft", "serve", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command(number: int) -> None:
    process = start("--port", "0", "--draft", "ngram", "--name", "mine")
    assert process.stderr is not None
    with process, process.stderr as lines:
        url = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))

        async def ask() -> Any:
            body = {"model": "mine", "messages": COPY, "temperature": 0}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/chat/completions", json=body) as r,
            ):
                return await r.json()

        answer = asyncio.run(ask())
        process.send_signal(number)
        rest = lines.read()
    assert answer["choices"][0]["message"]["content"] == alone(chat_tokens(COPY), max_tokens=64)
    assert process.returncode == 0
    assert "% of drafts accepted · stop" in rest


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start("--port", str(taken.getsockname()[1]))
        _, said = process.communicate()
    assert process.returncode == 2
    assert re.fullmatch(
        r"error: cannot listen at 127.0.0.1, port \d+: .*; choose with --host and --port\n", said
    )
