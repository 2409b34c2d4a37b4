"""``list``, ``show``, ``set`` and ``rm``."""

from __future__ import annotations

import threading
import time

import pytest
from pydantic import TypeAdapter

from gpupoold.api.schemas import DraftUsage
from gpupoold.api.schemas_models import FoundInfo, ModelInfo, SetModelRequest
from gpupoold.domain import AdapterInfo, Preset
from gpupoold.durations import GraphSizes
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


@pytest.mark.parametrize("verb", ["list", "ls"])
def test_list_is_aligned_text_without_boxes(daemon: FakeDaemon, cli: Cli, verb: str) -> None:
    daemon.add("qwen-7b", aliases=("q", "best"))
    daemon.add("a", state="failed", weight_bytes=0, ttft_s=0.5)
    assert cli(verb).stdout.splitlines() == [
        "NAME     STATE    TTFT    TBT  DTYPE       SIZE  ALIASES",
        "qwen-7b  ready     10s  100ms  bfloat16  15 GiB  q, best",
        "a        failed  500ms  100ms  bfloat16       -  -",
    ]


def test_list_as_json_is_one_document(daemon: FakeDaemon, cli: Cli) -> None:
    model = daemon.add("a")
    assert TypeAdapter(list[ModelInfo]).validate_json(cli("list", "--json").stdout) == [model]


def test_list_quiet_is_names_only(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("b")
    daemon.add("org/a")
    assert cli("list", "-q").stdout == "b\norg/a\n"


def test_list_of_nothing_says_how_to_add(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("list")
    assert result.stdout == "NAME  STATE  TTFT  TBT  DTYPE  SIZE  ALIASES\n"
    assert "gpupool add-model" in result.stderr
    assert cli("list", "--json").stdout == "[]\n"


def test_list_refuses_two_formats(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("list", "-q", "--json").exit_code == 2


@pytest.mark.parametrize("name", ["org/qwen 7b?#%", "q"])
def test_show_by_name_and_alias(daemon: FakeDaemon, cli: Cli, name: str) -> None:
    model = daemon.add("org/qwen 7b?#%", aliases=("q",))
    result = cli("show", name)
    assert "name          org/qwen 7b?#%\n" in result.stdout
    assert "kv per token  56 KiB\n" in result.stdout
    assert "error" not in result.stdout
    assert TypeAdapter(ModelInfo).validate_json(cli("show", name, "--json").stdout) == model


def test_show_tells_of_a_shared_cache(daemon: FakeDaemon, cli: Cli) -> None:
    snapshot = "/home/me/hub/models--org--a/snapshots/0123"
    daemon.add("a", source="org/a", path=snapshot)
    assert f"path          {snapshot} (shared Hugging Face cache)\n" in cli("show", "a").stdout
    daemon.add("b", source=snapshot, path=snapshot)
    assert "shared" not in cli("show", "b").stdout


def test_show_tells_parsers_and_template_with_reasons(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add(
        "a",
        tool_parser=FoundInfo(name="hermes", reason="the template writes <tool_call>"),
        reasoning_parser=FoundInfo(name=None, reason="no markup\x1b[2J"),
        chat_template=FoundInfo(name="chat_template.jinja", reason="in the checkpoint"),
    )
    shown = cli("show", "a").stdout
    assert "tool parser       hermes (the template writes <tool_call>)\n" in shown
    assert "reasoning parser  none (no markup" in shown
    assert "\x1b" not in shown
    assert "chat template     chat_template.jinja (in the checkpoint)\n" in shown


def test_show_tells_what_was_measured(daemon: FakeDaemon, cli: Cli) -> None:
    model = daemon.add("a", latency=samples.LATENCY)
    lines = [line.split(maxsplit=1) for line in cli("show", "a").stdout.splitlines()]
    shown = {name: text for name, text in lines if name in ("prefill", "switch")}
    assert shown == {
        "prefill": "110ms for a prompt of 1000 tokens (R2 0.998, 9 points, mean error 3.1 %)",
        "switch": "300ms for all weights (50 GiB/s)",
    }
    assert "decode step" not in cli("show", "a").stdout  # no fit: nothing is made up
    assert TypeAdapter(ModelInfo).validate_json(cli("show", "a", "--json").stdout) == model


def test_show_tells_of_drafts(daemon: FakeDaemon, cli: Cli) -> None:
    drafts = DraftUsage(
        num_drafts=400, num_draft_tokens=1600, num_accepted_tokens=500, acceptance_length=2.25
    )
    usage = samples.usage(samples.model("a"), measured=True)
    daemon.add("a", usage=usage.model_copy(update={"drafts": drafts}))
    daemon.add("b", usage=usage)
    assert "500 of 1,600 tokens accepted, 2.25 tokens per step\n" in cli("show", "a").stdout
    assert "drafts" not in cli("show", "b").stdout


def test_show_tells_of_graphs_that_are_captured_later(daemon: FakeDaemon, cli: Cli) -> None:
    usage = samples.usage(samples.model("a"), measured=True)
    daemon.add("b", usage=usage)
    late = usage.engines[0].model_copy(update={"graphs": GraphSizes(4, 2, 1, 0.5)})
    daemon.add("a", usage=usage.model_copy(update={"engines": [late]}))
    text = "graphs on device 0  4 sizes by the load, 2 of 3 later in 500ms\n"
    assert text in cli("show", "a").stdout
    assert "graphs" not in cli("show", "b").stdout


def test_show_of_an_unknown_model(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("show", "nobody")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr == "error: no model 'nobody'\nhint: see `gpupool list`\n"


def test_set_changes_only_what_is_given(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("a", aliases=("old", "kept"))
    result = cli("set", "a", "--tbt", "50ms", "--add-alias", "new", "--remove-alias", "old")
    assert daemon.requests == [
        SetModelRequest(tbt_s=0.05, add_aliases=["new"], remove_aliases=["old"])
    ]
    assert result.stderr == "a: ttft 10s, tbt 50ms, aliases kept, new\n"
    assert result.stdout == ""


def test_set_of_nothing_is_a_usage_error(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("a")
    result = cli("set", "a")
    assert result.exit_code == 2
    assert "--ttft" in result.stderr


def test_rm_goes_on_after_a_failure_and_reports_the_first(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("a")
    daemon.add("busy")
    daemon.live["busy"] = 1
    result = cli("rm", "nobody", "busy", "a")
    assert result.exit_code == 4
    assert list(daemon.models) == ["busy"]
    assert result.stderr.splitlines() == [
        "error: no model 'nobody'",
        "hint: see `gpupool list`",
        "error: model 'busy' has live requests",
        "hint: use --drain or --force",
        "a: removed",
    ]


def test_rm_says_what_went(daemon: FakeDaemon, cli: Cli) -> None:
    """A preset goes without its model, whose state is the answer; an alias goes with its model."""
    daemon.add("llama", aliases=("plain",))
    assert cli("rm", "plain").stderr == "llama (alias plain): removed\n"
    preset = Preset(name="plain", defaults={})
    adapter = AdapterInfo(name="org/sql:v1", source="s", path="p")
    daemon.add("llama", presets=(preset,), adapters=(adapter,))
    assert cli("rm", "plain").stderr == "plain: removed\n"
    assert cli("rm", "org/sql:v1").stderr == "org/sql:v1: removed\n"
    assert list(daemon.models) == ["llama"]


def test_rm_refused(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("busy")
    daemon.live["busy"] = 1
    assert cli("rm", "busy").exit_code == 5
    assert cli("rm", "busy", "--force").exit_code == 0
    assert daemon.models == {}


def test_rm_drain_waits_for_live_requests(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("busy")
    daemon.live["busy"] = 1
    timer = threading.Timer(0.3, daemon.live.pop, ["busy"])
    started = time.monotonic()
    timer.start()
    result = cli("rm", "busy", "--drain")
    assert result.exit_code == 0
    assert time.monotonic() - started > 0.25
    assert daemon.models == {}


def test_rm_with_both_modes_is_a_usage_error(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("a")
    assert cli("rm", "a", "--drain", "--force").exit_code == 2
    assert list(daemon.models) == ["a"]
