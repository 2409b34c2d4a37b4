"""``--engine KEY=VALUE`` and ``--set KEY=VALUE`` as typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupool_cli.add_model import read_defaults
from gpupool_cli.options import read_options
from gpupoold.errors import Refused, UsageError


def test_options_by_vllms_names() -> None:
    given = [
        "max-num-seqs=16",
        "--seed=3",
        'hf_overrides={"a": "b=c"}',
        "speculative-config.method=ngram",
    ]
    assert read_options(given) == {
        "max_num_seqs": "16",
        "seed": "3",
        "hf_overrides": '{"a": "b=c"}',
        "speculative_config.method": "ngram",
    }


def test_a_value_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}\n")
    assert read_options([f"chat-template=@{file}"]) == {"chat_template": "{{ messages }}\n"}
    with pytest.raises(UsageError, match="cannot be read"):
        read_options([f"chat-template=@{tmp_path / 'absent'}"])


@pytest.mark.parametrize("given", [["seed"], ["=3"], ["seed=1", "--seed=2"]])
def test_wrong_options(given: list[str]) -> None:
    with pytest.raises(UsageError):
        read_options(given)


def test_defaults_are_json_or_text() -> None:
    given = ["temperature=0.2", "a.b=true", 'stop=["x"]', "system_prompt=Be brief, please."]
    assert read_defaults(given) == {
        "temperature": 0.2,
        "a.b": True,
        "stop": ["x"],
        "system_prompt": "Be brief, please.",
    }


@pytest.mark.parametrize("given", [["temperature"], ["=1"], ["n=1", "n=2"]])
def test_wrong_defaults(given: list[str]) -> None:
    with pytest.raises(UsageError):
        read_defaults(given)


@pytest.mark.parametrize(
    "given", ["top_k=99999999999999999999", "temperature=1e400", r'stop=["\ud800"]', "a=NaN"]
)
def test_defaults_that_no_process_can_hold(given: str) -> None:
    with pytest.raises(Refused, match=given.partition("=")[0]):
        read_defaults([given])
