"""The command line against a real daemon: what is printed, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas_models import ModelInfo
from tests.functional.daemon_tools import LLAMA, MODELS, QWEN2, QWEN3, Traces, cli


def is_well_measured(model: ModelInfo) -> bool:
    """Return whether more work takes longer, between a tenth of a millisecond and seconds."""
    stored = model.latency
    latency = stored.model() if stored is not None else None
    if stored is None or latency is None or stored.prefill is None or stored.decode is None:
        return False
    return (
        0.5 < stored.prefill.r_squared <= 1.0
        and stored.prefill.num_points >= 4
        and stored.decode.num_points >= 5
        and 1e-4 < latency.prefill_s([16]) < latency.prefill_s([1000]) < 5.0
        and 1e-4 < latency.decode_step_s(1, 32) <= latency.decode_step_s(8, 8 * 500) < 5.0
        and 0.0 < latency.switch_s(model.weight_bytes) < 5.0
    )


class TestLooking:
    def test_list(self, pool: PrivateDaemon) -> None:
        plain, quiet, as_json = (cli(pool, "list", *more) for more in ([], ["-q"], ["--json"]))
        assert [done.returncode for done in (plain, quiet, as_json)] == [0, 0, 0]
        header, *rows = plain.stdout.splitlines()
        assert header.split()[:2] == ["NAME", "STATE"]
        assert [row.split()[:2] for row in rows] == [[name, "ready"] for name in MODELS]
        assert quiet.stdout.split() == list(MODELS)
        assert [model["name"] for model in json.loads(as_json.stdout)] == list(MODELS)

    def test_show(self, pool: PrivateDaemon, tiny_models: dict[str, Path]) -> None:
        done = cli(pool, "show", LLAMA, "--json")
        model = json.loads(done.stdout)
        assert (model["state"], model["error"]) == ("ready", "")
        assert model["architecture"] == "LlamaForCausalLM"
        assert model["path"] == str(tiny_models[LLAMA])
        assert model["weight_bytes"] > 0
        shown = cli(pool, "show", LLAMA).stdout
        assert "LlamaForCausalLM" in shown
        assert "hermes (the template writes <tool_call> with JSON)\n" in shown
        assert model["reasoning_parser"]["name"] is None
        assert model["chat_template"]["name"] == "chat_template.jinja"

    def test_show_has_the_measured_latency(self, pool: PrivateDaemon) -> None:
        shown = [cli(pool, "show", name, "--json").stdout for name in MODELS]
        models = [TypeAdapter(ModelInfo).validate_json(text) for text in shown]
        assert all(model.latency and model.latency.dtype == "float32" for model in models)
        # Other work on the machine may spoil the fits.
        measured = [model for model in models if is_well_measured(model)]
        if not measured:
            pytest.skip(f"other work spoilt all fits: {[model.latency for model in models]}")
        table = cli(pool, "show", measured[0].name).stdout
        assert all(line in table for line in ("\nprefill ", "\ndecode step ", "\nswitch "))

    def test_status_and_ps(self, pool: PrivateDaemon) -> None:
        status = json.loads(cli(pool, "status", "--json").stdout)
        assert (status["state"], status["http_url"]) == ("ready", pool.http_url)
        assert status["pid"] == pool.process.pid
        assert [one["state"] for one in status["frontends"]] == ["ready", "ready"]
        assert "2 of 2 ready" in cli(pool, "status").stdout
        now = json.loads(cli(pool, "ps", "--json").stdout)
        assert [row["name"] for row in now["models"]] == list(MODELS)
        assert now["devices"][0]["state"] == "ready"
        plain = cli(pool, "ps")
        assert plain.returncode == 0
        assert all(name in plain.stdout for name in MODELS)

    def test_events_and_logs(self, pool: PrivateDaemon) -> None:
        events = json.loads(cli(pool, "events", "--json", "-n", "1000").stdout)
        added = [event["subject"] for event in events if event["kind"] == "model_added"]
        assert set(MODELS) <= set(added)
        logs = cli(pool, "logs", "--lines", "1000")
        assert logs.returncode == 0
        assert {line.split(" | ")[0] for line in logs.stdout.splitlines()} == {
            "fork-server",
            "frontend-0",
            "frontend-1",
            "gpupoold",
            "inspection",
            "worker-0",
        }
        one = cli(pool, "logs", "--process", "worker-0", "--lines", "3")
        assert len(one.stdout.splitlines()) == 3
        nobody = cli(pool, "logs", "--process", "nobody")
        assert nobody.returncode == 2
        assert "frontend-0" in nobody.stderr

    def test_version(self, pool: PrivateDaemon) -> None:
        versions = json.loads(cli(pool, "version", "--json").stdout)
        assert versions["gpupool"] == versions["gpupoold"]
        assert versions["engine"].startswith("0.32.0")


class TestAsking:
    def test_run(self, pool: PrivateDaemon) -> None:
        done = cli(pool, "run", LLAMA, "say something", "--max-tokens", "8", "--verbose")
        assert done.returncode == 0
        assert done.stdout.strip()
        assert "ttft" in done.stderr

    def test_run_as_json(self, pool: PrivateDaemon) -> None:
        done = cli(pool, "run", LLAMA, "say something", "--max-tokens", "8", "--json")
        answer = json.loads(done.stdout)
        assert (answer["num_tokens"], answer["finish_reason"]) == (8, "length")
        assert answer["num_prompt_tokens"] > 0
        assert answer["text"]
        assert answer["ttft_s"] > 0
        told = json.loads(cli(pool, "why", answer["id"], "--json").stdout)
        assert told["finished"]["request"]["model"] == LLAMA

    def test_top_as_json(self, pool: PrivateDaemon) -> None:
        state = json.loads(cli(pool, "top", "--json").stdout)
        assert [one["usage"]["name"] for one in state["models"]] == list(MODELS)

    def test_run_of_an_unknown_model(self, pool: PrivateDaemon) -> None:
        done = cli(pool, "run", "tiny-lama", "hello")
        assert (done.returncode, done.stdout) == (4, "")
        assert LLAMA in done.stderr


class TestChanging:
    def test_a_models_life(self, pool: PrivateDaemon, tiny_models: dict[str, Path]) -> None:
        before = Traces.of(pool)
        source = str(tiny_models[QWEN2])
        options = ["--dtype", "float32", "--max-len", "256", "--ttft", "2s", "--alias", "brief-a"]
        options += ["--verify"]
        added = cli(pool, "add-model", "brief", "--source", source, *options)
        assert (added.returncode, added.stdout) == (0, "")
        assert "brief: ready" in added.stderr
        assert ", verified" in added.stderr
        assert json.loads(cli(pool, "show", "brief-a", "--json").stdout)["max_model_len"] == 256
        assert cli(pool, "run", "brief-a", "hello", "--max-tokens", "4").returncode == 0

        changes = ["--tbt", "50ms", "--add-alias", "brief-b", "--remove-alias", "brief-a"]
        changed = cli(pool, "set", "brief", *changes)
        assert changed.returncode == 0, changed.stderr
        model = json.loads(cli(pool, "show", "brief", "--json").stdout)
        assert (model["ttft_s"], model["tbt_s"], model["aliases"]) == (2.0, 0.05, ["brief-b"])
        assert cli(pool, "run", "brief-b", "hello", "--max-tokens", "4").returncode == 0
        assert cli(pool, "run", "brief-a", "hello", "--max-tokens", "4").returncode == 4

        removed = cli(pool, "rm", "brief-b")
        assert removed.returncode == 0, removed.stderr
        assert cli(pool, "show", "brief").returncode == 4
        assert Traces.of(pool) == before

    def test_check_adds_nothing(self, pool: PrivateDaemon, tiny_models: dict[str, Path]) -> None:
        before = Traces.of(pool)
        done = cli(pool, "add-model", "looked-at", "--source", str(tiny_models[QWEN3]), "--check")
        assert done.returncode == 0, done.stderr
        assert "Qwen3ForCausalLM" in done.stdout
        assert Traces.of(pool) == before


class TestRefusing:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["list", "--json", "--quiet"],
            ["set", LLAMA],
            ["set", LLAMA, "--ttft", "soon"],
            ["run", LLAMA, " "],
            ["rm", LLAMA, "--drain", "--force"],
            ["frobnicate"],
        ],
        ids=" ".join,
    )
    def test_misuse_is_2(self, pool: PrivateDaemon, arguments: list[str]) -> None:
        done = cli(pool, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")

    @pytest.mark.parametrize("command", ["list", "ps", "status", "show x", "rm x", "run x y"])
    def test_no_daemon_is_3(self, tmp_path: Path, command: str) -> None:
        done = cli(tmp_path / "nobody.sock", *command.split())
        assert (done.returncode, done.stdout) == (3, "")
        assert "nobody.sock" in done.stderr

    @pytest.mark.parametrize("command", ["show", "rm", "set --ttft 1s"])
    def test_an_unknown_model_is_4(self, pool: PrivateDaemon, command: str) -> None:
        done = cli(pool, *command.split(), "tiny-lama")
        assert (done.returncode, done.stdout) == (4, "")
        assert LLAMA in done.stderr

    def test_a_taken_alias_is_5(self, pool: PrivateDaemon) -> None:
        done = cli(pool, "set", LLAMA, "--add-alias", QWEN2)
        assert (done.returncode, done.stdout) == (5, "")
        assert QWEN2 in done.stderr
        assert json.loads(cli(pool, "show", LLAMA, "--json").stdout)["aliases"] == []

    def test_several_removals_go_on_after_an_error(self, pool: PrivateDaemon) -> None:
        done = cli(pool, "rm", "nobody-1", "nobody-2")
        assert done.returncode == 4
        assert "nobody-1" in done.stderr
        assert "nobody-2" in done.stderr
