"""Hostile checkpoints in the process that checks them: each is refused, with its reason.

The process has vLLM's own classes; the daemon is not needed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from gpupoold.config.schema import Settings, parse_settings
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.processes.child import ForkServer, Launch, execute
from gpupoold.domain import ModelName, ModelSpec
from gpupoold.errors import Failed, Refused

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE_TEMPLATES = {
    "endless": (LOOPS, "takes more than 1 s of CPU time"),
    "endless for a second message": (
        "{% if messages|length > 1 %}" + LOOPS + "{% endif %}{{ messages[0].content }}",
        "takes more than 1 s of CPU time",
    ),
    "endless for tools": ("{% if tools %}" + LOOPS + "{% endif %}x", "of CPU time"),
    "endless for an image": (
        "{% if messages[0].content is not string %}" + LOOPS + "{% endif %}x",
        "of CPU time",
    ),
    "quadratic": (
        "{% for m in messages %}{% for c in m.content %}{% for d in m.content %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "of CPU time",
    ),
    "large": ("{{ 'x' * 10000000000 }}", "takes more than 1 GiB of memory"),
    "doubling": (
        "{% set n = namespace(t='x') %}{% for a in range(40) %}{% set n.t = n.t ~ n.t %}"
        "{% endfor %}",
        "takes more than 1 GiB of memory",
    ),
}
# Each takes a second of a core; others of the kind are in the ordinary run.
SLOW_TEMPLATES = {"endless", "endless for an image", "quadratic"}
HARMLESS_TEMPLATES = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ raise_exception('only in English') }}",
    "{{ messages.__class__.__mro__ }}",
    "{% if %}",
)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def settings_of(folder: Path) -> Settings:
    paths = {f"{name}_dir": str(folder) for name in ("state", "runtime", "log")}
    return parse_settings({"devices": ["emulated"], "paths": paths}, "test")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ForkServer]:
    """The process that has imported vLLM, as the daemon has one."""
    settings = settings_of(tmp_path_factory.mktemp("forks"))
    modules = ["gpupoold.frontend.preload", "gpupoold.worker.process"]
    forks = ForkServer(settings, {"HF_HUB_OFFLINE": "1"}, modules)
    yield forks
    await forks.stop()


@pytest.fixture
def inspector(forks: ForkServer, tmp_path: Path) -> Inspector:
    return Inspector(settings_of(tmp_path), forks)


def make_inspector(folder: Path, fork: Any) -> Inspector:
    return Inspector(settings_of(folder), cast(ForkServer, SimpleNamespace(fork=fork)))


@pytest.fixture
def copy(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_models["tiny-llama"], tmp_path / "copy")


def spec_of(folder: Path, **engine: str) -> ModelSpec:
    return ModelSpec(ModelName("m"), "m", str(folder), engine=engine)


async def refusal(inspector: Inspector, folder: Path, **engine: str) -> str:
    with pytest.raises(Refused) as caught:
        await inspector.check_chat(spec_of(folder, **engine))
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW_TEMPLATES else [])
        for kind in HOSTILE_TEMPLATES
    ],
)
async def test_hostile_templates(kind: str, inspector: Inspector, copy: Path) -> None:
    template, reason = HOSTILE_TEMPLATES[kind]
    (copy / "chat_template.jinja").write_text(template)
    message = await refusal(inspector, copy)
    assert message.startswith("m: the chat template ")
    assert reason in message


async def test_a_template_of_the_options(inspector: Inspector, copy: Path) -> None:
    template = HOSTILE_TEMPLATES["large"][0]
    assert "1 GiB of memory" in await refusal(inspector, copy, chat_template=template)


async def test_what_is_wrong_only_in_itself_is_harmless(inspector: Inspector, copy: Path) -> None:
    for template in HARMLESS_TEMPLATES:
        (copy / "chat_template.jinja").write_text(template)
        await inspector.check_chat(spec_of(copy))


async def test_a_tokenizer_with_an_exponential_expression(inspector: Inspector, copy: Path) -> None:
    file = copy / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    pieces = [split | {"invert": False}, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [one for one in pieces if one],
    }
    file.write_text(json.dumps(tokenizer))
    assert "the tokenizer fails at the repeated 'x'" in await refusal(inspector, copy)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("top_p", 5, "top_p must be in"),
        ("max_new_tokens", -3, "must be greater than 0"),
        ("repetition_penalty", "large", "not str"),
        ("eos_token_id", "</s>", "got `str`"),
        ("eos_token_id", [1.5], "got `float`"),
        ("eos_token_id", [[2]], "unhashable type"),
    ],
)
async def test_defaults_that_every_request_would_fail_with(
    key: str, value: object, reason: str, inspector: Inspector, copy: Path
) -> None:
    file = copy / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    message = await refusal(inspector, copy)
    assert message.startswith("m: generation_config.json has defaults that vLLM refuses: ")
    assert reason in message


async def test_unchanged_files_are_checked_once(
    forks: ForkServer, copy: Path, tmp_path: Path
) -> None:
    started: list[str] = []

    async def fork(launch: Launch) -> object:
        started.append(launch.module)
        return await forks.fork(launch)

    inspector = make_inspector(tmp_path, fork=fork)
    await inspector.check_chat(spec_of(copy))
    await inspector.check_chat(spec_of(copy))
    assert len(started) == 1
    (copy / "chat_template.jinja").write_text(HOSTILE_TEMPLATES["large"][0])
    await refusal(inspector, copy)
    await refusal(inspector, copy)
    assert len(started) == 3


def large_json(file: Path) -> None:
    file.write_text('{"a": [' + "[]," * 20_000_000 + "[]]}")


@pytest.mark.parametrize(
    "name", ["config.json", pytest.param("tokenizer_config.json", marks=pytest.mark.slow)]
)
async def test_sixty_megabytes_of_json_are_not_read(
    name: str, inspector: Inspector, copy: Path
) -> None:
    large_json(copy / name)
    with pytest.raises(Refused, match=f"{name}: has 57.2 MiB, more than the allowed"):
        await inspector.survey(copy, "auto", {})


async def test_a_check_that_takes_too_much_memory(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpupoold.control.models import inspection

    monkeypatch.setattr(inspection, "_MAX_MEMORY_BYTES", 50 << 20)  # vLLM's import takes more
    with pytest.raises(Refused, match="takes more than 50 MiB of memory"):
        await make_inspector(tmp_path, execute).check(spec_of(copy))


async def test_a_check_that_does_not_end(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpupoold.control.models import inspection
    from gpupoold.errors import TimedOut

    monkeypatch.setattr(inspection, "_LIMIT_S", 0.05)
    with pytest.raises(TimedOut, match="not checked within"):
        await make_inspector(tmp_path, execute).check(spec_of(copy))


async def test_a_process_that_dies(copy: Path, tmp_path: Path) -> None:
    async def fork(launch: Launch) -> object:
        process = await execute(launch)
        process.kill()
        return process

    with pytest.raises(Failed, match="ended without an answer"):
        await make_inspector(tmp_path, fork=fork).survey(copy, "auto", {})
