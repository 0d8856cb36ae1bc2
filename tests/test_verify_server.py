"""`redraft verify --server`: planted faults are found in their class, and sound servers are never accused."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from mock_server import FAULTS, Behaviour, MockServer
from redraft.errors import ConfigError, ServerError
from redraft.verify import PROBES, Kind, ProbeResult, ServerSettings, probe_server
from redraft.verify.answer import Answer, Step
from redraft.verify.counters import Counters, parse_counters
from redraft.verify.divergence import diverge


def probe(behaviour: Behaviour, *, with_baseline: bool = True, **settings: object) -> dict[str, ProbeResult]:
    """All probes of a mock, by name; its baseline is the same without speculation and fault."""
    plain = Behaviour(near_ties=behaviour.near_ties, logprobs=behaviour.logprobs)

    async def run(server: str, baseline: str | None) -> list[ProbeResult]:
        given = ServerSettings(url=server, baseline=baseline, **settings)  # type: ignore[arg-type]
        return [result async for result in probe_server(given)]

    with MockServer(behaviour) as server, MockServer(plain) as baseline:
        results = asyncio.run(run(server.url, baseline.url if with_baseline else None))
    assert [result.name for result in results] == list(PROBES)
    return {result.name: result for result in results}


HONEST = {
    "plain": Behaviour(),
    "speculative": Behaviour(speculative=True),
    "llama.cpp's forms": Behaviour(speculative=True, llamacpp=True),
    "near-ties": Behaviour(near_ties=True),
    "near-ties, speculative": Behaviour(near_ties=True, speculative=True),
    "no log-probabilities": Behaviour(speculative=True, logprobs=False),
    "near-ties, no log-probabilities": Behaviour(speculative=True, near_ties=True, logprobs=False),
    "chat only": Behaviour(speculative=True, chat_only=True),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_sound_server_is_not_accused(name: str) -> None:
    results = probe(HONEST[name], with_baseline=name != "chat only")
    assert [result for result in results.values() if result.findings] == []
    if name == "speculative":
        assert [n for n, result in results.items() if result.skipped] == []
        assert all(result.num_comparisons for result in results.values())
        assert sum(result.ties + result.unknown for result in results.values()) == 0


def test_near_ties_are_reported_as_ties() -> None:
    results = probe(Behaviour(near_ties=True, speculative=True))
    assert results["speculation against none"].ties > 0
    assert "near-tie" in results["speculation against none"].evidence
    blind = probe(HONEST["near-ties, no log-probabilities"])
    assert blind["speculation against none"].unknown > 0
    assert blind["logprobs"].skipped == "the server offers no log-probabilities"


PLANTED = {  # fault: the probe that must find it, and the class
    "drops a token after a rejection": ("speculation against none", Kind.TOKEN),
    "mixes requests under load": ("alone against neighbours", Kind.STATE),
    "continues from the wrong cached state": ("cold against warm prompt", Kind.STATE),
    "ignores the seed": ("seed", Kind.DISTRIBUTION),
    "miscounts usage": ("usage", Kind.TOKEN),
    "counts chunks as tokens": ("streamed against whole", Kind.TOKEN),
    "log-probability 0 everywhere": ("logprobs", Kind.DISTRIBUTION),
    "ignores stop": ("stop", Kind.TOKEN),
    "accepts more than it drafted": ("acceptance counters", Kind.TOKEN),
    "overruns max_tokens": ("max_tokens", Kind.TOKEN),
    "counts a prompt differently": ("usage", Kind.TOKEN),
}


# What a fault also shows elsewhere: what follows a lost token does not go on from the visible text; and a
# request whose state another one used and moved on has lost tokens to it.
ALSO = {
    "drops a token after a rejection": {Kind.STATE},
    "mixes requests under load": {Kind.TOKEN},
}


@pytest.mark.parametrize(
    ("fault", "near_ties"), [*((fault, False) for fault in FAULTS), *((fault, True) for fault in FAULTS[:4])]
)
def test_a_planted_fault_is_found_in_its_class(fault: str, near_ties: bool) -> None:
    results = probe(Behaviour(speculative=True, fault=fault, near_ties=near_ties))
    name, kind = PLANTED[fault]
    assert kind in {finding.kind for finding in results[name].findings}, results[name]
    kinds = {finding.kind for result in results.values() for finding in result.findings}
    assert kinds - {kind} <= ALSO.get(fault, set()), results


def test_one_server_with_a_switch_needs_no_other() -> None:
    """The switch is sent with every request of the side without speculation."""
    seen = []

    class Noted(MockServer):
        async def _complete(self, request: web.Request) -> web.StreamResponse:
            seen.append((await request.json()).get("speculative.n_max"))
            return await super()._complete(request)

    async def run(url: str) -> list[ProbeResult]:
        settings = ServerSettings(url=url, off={"speculative.n_max": 0})
        return [result async for result in probe_server(settings)]

    with Noted(Behaviour(speculative=True)) as server:
        results = asyncio.run(run(server.url))
    assert not results[0].skipped
    assert seen.count(0) == 3
    assert seen.count(None) > 50


def serve_verbatim(status: int, text: str) -> MockServer:
    """A server that answers every request with this."""

    class Verbatim(MockServer):
        async def _models(self, _: web.Request) -> web.Response:
            return web.Response(status=status, text=text)

    return Verbatim(Behaviour())


def command(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "redraft", "verify", *arguments],
        capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "200"}, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


async def first_result(url: str, **settings: object) -> ProbeResult:
    return await anext(probe_server(ServerSettings(url=url, **settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (401, "{}", r"refuses access \(401\): give the right key with --api-key"),
        (403, "{}", "refuses access"),
        (404, "not found", "no OpenAI-compatible server at this address"),
        (500, '{"error": {"message": "out of memory"}}', "failed with 500: out of memory"),
        (200, "<html>", "does not answer in JSON"),
        (200, '{"data": []}', "lists no models"),
        (200, "[]", "lists no models"),
    ],
)
def test_what_is_no_server_is_one_clear_line(status: int, text: str, message: str) -> None:
    with serve_verbatim(status, text) as server, pytest.raises(ServerError, match=message):
        asyncio.run(first_result(server.url))


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://127.0.0.1:9", "cannot be reached"), ("localhost:8080", "is no URL of a server")],
)
def test_a_wrong_address(url: str, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        asyncio.run(first_result(url))


def test_a_key_and_a_model_name() -> None:
    with MockServer(Behaviour(api_key="open sesame")) as server:
        with pytest.raises(ServerError, match="refuses access"):
            asyncio.run(first_result(server.url, api_key="wrong"))
        with pytest.raises(ServerError, match="model 'big' is not served"):
            asyncio.run(first_result(server.url, api_key="open sesame", model="big"))
        result = asyncio.run(first_result(f"{server.url}/v1/", api_key="open sesame", model="toy"))
    assert result.skipped.startswith("no server without speculation")


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="concurrency must be 2 to 256, not 1"):
        ServerSettings(url="http://x", concurrency=1)
    with pytest.raises(ConfigError, match="two ways to the same"):
        ServerSettings(url="http://x", baseline="http://y", off={})


def test_an_answer_of_another_form_ends_the_run() -> None:
    class Odd(MockServer):
        async def _complete(self, _: web.Request) -> web.StreamResponse:
            return web.json_response({"choices": [{"text": "x", "logprobs": {"content": [{}]}}]})

    with Odd(Behaviour()) as server, pytest.raises(ServerError, match="an answer of another form"):
        asyncio.run(first_result(server.url))


def test_a_server_that_fails_on_the_way_is_reported_with_what_was_seen() -> None:
    class Failing(MockServer):
        async def _complete(self, request: web.Request) -> web.StreamResponse:
            if self._num_requests > 20:
                return web.json_response({"error": {"message": "CUDA error"}}, status=500)
            return await super()._complete(request)

    with Failing(Behaviour()) as server:
        code, out, err = command("--server", server.url)
    assert code == 2
    assert "repeated" in out
    assert "failed with 500: CUDA error" in err
    assert "Traceback" not in err


def test_the_command_reports_classes_and_exit_codes(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with MockServer(Behaviour(speculative=True)) as server:
        code, out, err = command("--server", server.url, "--json", str(target))
    assert code == 0, err
    assert [line for line in out.splitlines() if "nothing found" in line] == [
        "state: nothing found", "token: nothing found", "distribution: nothing found",
    ]  # fmt: skip
    assert "skipped: no server without speculation" in out
    report = json.loads(target.read_text())
    assert report["whole"]
    assert len(report["results"]) == len(PROBES)
    with MockServer(Behaviour(speculative=True, fault="ignores stop")) as server:
        code, out, err = command("--server", server.url)
    assert code == 1, err
    assert "token: 6 findings" in out
    code, out, err = command("--server", "http://127.0.0.1:9")
    assert code == 2
    assert err.count("error:") == 1
    assert "Traceback" not in err


def test_counters_are_summed_over_engines_and_differenced() -> None:
    page = """# HELP
llamacpp:spec_decode_num_draft_tokens_total 10
llamacpp:spec_decode_num_accepted_tokens_total 6
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 4
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2
"""
    read = parse_counters(page)
    assert read == Counters(10, 6, (4, 2))
    assert read.since(Counters(4, 3, (2,))) == Counters(6, 3, (2, 2))
    two = page.replace("llamacpp:", "vllm:").replace("_total ", '_total{engine="0"} ')
    assert parse_counters(two + two.replace('engine="0"', 'engine="1"')) == Counters(20, 12, (8, 4))
    assert parse_counters("sglang:spec_accept_rate 0.5\n") == Counters(0, 0, (), 0.5)
    assert parse_counters("sglang:spec_accept_rate NaN\n") is None
    assert parse_counters("vllm:num_requests_running 1\n") is None
    assert parse_counters("hello world\nno: numbers\n") is None


def answer(*tokens: str, gap: float = 2.0, reason: str = "length") -> Answer:
    steps = tuple(Step(t, -0.1, {t: -0.1, "<other>": -0.1 - gap}) for t in tokens)
    return Answer("".join(tokens), reason, None, steps)


@pytest.mark.parametrize(
    ("expected", "found", "kind"),
    [
        (answer(*"abcdefgh"), answer(*"abxyzuvw"), Kind.STATE),
        (answer(*"abcdefgh"), answer(*"abxyzuvw", gap=0.2), Kind.TIE),
        (answer(*"abcdefgh"), answer(*"abdefghi"), Kind.TOKEN),
        (answer(*"abcdefgh"), answer(*"abccdefg"), Kind.TOKEN),
        (answer(*"abcdefgh"), answer(*"abcde"), Kind.TOKEN),
        (answer(*"abcdefgh"), answer(*"abcde", reason="stop"), Kind.TOKEN),
        (answer(*"abcdefgh", gap=0.2), answer(*"abcde", reason="stop"), Kind.TIE),
        (answer(*"abcdefgh"), Answer("abxyz", "length", None), Kind.UNKNOWN),
    ],
)
def test_what_a_difference_means(expected: Answer, found: Answer, kind: Kind) -> None:
    difference = diverge(expected, found)
    assert difference is not None
    assert difference.kind is kind
    assert diverge(expected, expected) is None
