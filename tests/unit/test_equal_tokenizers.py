"""Models with equal tokenizer files share the vocabulary, and nothing else."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.tokenizers.hf import CachedHfTokenizer
from vllm.tokenizers.registry import get_tokenizer

from gpupoold import equal_tokenizers
from gpupoold.equal_tokenizers import share_tokenizers, vocabulary_of
from gpupoold.frontend.vocabulary import texts_of

TEXTS = [f"{number} bottles of {'beer ' * (number % 7)}on the wall" for number in range(200)]


@pytest.fixture(params=[0, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(CachedHfTokenizer, "from_pretrained", equal_tokenizers._build)
    equal_tokenizers._tokenizers.clear()
    share_tokenizers(request.param)
    yield request.param
    equal_tokenizers._tokenizers.clear()


@pytest.fixture
def copied(tiny_models: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A function that copies a tiny Llama's small files, with other fields of config.json."""

    def copy(name: str, **fields: object) -> Path:
        source, target = tiny_models["tiny-llama"], tmp_path / name
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | fields))
        return target

    return copy


def are_shared(first: Path, second: Path, **options: Any) -> bool:
    made = [get_tokenizer(str(path), **options) for path in (first, second)]
    assert made[0] is not made[1]
    return vocabulary_of(made[0]) is vocabulary_of(made[1])


def test_equal_files(threads: int, copied: Callable[..., Path]) -> None:
    first, second = copied("first"), copied("second", rope_theta=1e6, eos_token_id=7)
    (second / "model.safetensors").write_bytes(b"other weights")
    assert are_shared(first, second)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}'),
        ("chat_template.jinja", "{{ messages }}"),
        ("added_tokens.json", "{}"),
        ("preprocessor_config.json", "{}"),
        ("config.json", '{"model_type": "qwen2"}'),
    ],
)
def test_another_file(threads: int, copied: Callable[..., Path], file: str, text: str) -> None:
    first, second = copied("first"), copied("second")
    (second / file).write_text(text)
    assert not are_shared(first, second)


def test_other_options_or_own_code(threads: int, copied: Callable[..., Path]) -> None:
    first, second = copied("first"), copied("second")
    assert not are_shared(first, second, trust_remote_code=True)
    sides = [get_tokenizer(str(first), truncation_side=side) for side in ("left", "right")]
    assert [one.truncation_side for one in sides] == ["left", "right"]


def test_each_model_has_attributes_of_its_own(threads: int, copied: Callable[..., Path]) -> None:
    first, second = (get_tokenizer(str(copied(name))) for name in ("first", "second"))
    assert Path(first.name_or_path).name == "first"
    assert Path(second.name_or_path).name == "second"
    second.chat_template = "other"
    assert first.chat_template != "other"


def test_several_threads_tokenise(copied: Callable[..., Path]) -> None:
    alone = get_tokenizer(str(copied("alone")))
    expected = [alone(text, truncation=True, max_length=12).input_ids for text in TEXTS]
    share_tokenizers(2)
    try:
        several = [get_tokenizer(str(copied(f"tune-{number}"))) for number in range(4)]

        def run(tokenizer: Any) -> list[list[int]]:
            found = []
            for text in TEXTS:
                found.append(tokenizer(text, truncation=True, max_length=12).input_ids)
                assert tokenizer.decode(tokenizer(text).input_ids) == text
            return found

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(run, several * 2)) == [expected] * 8
    finally:
        CachedHfTokenizer.from_pretrained = equal_tokenizers._build


def test_texts_of_tokens_are_shared(threads: int, copied: Callable[..., Path]) -> None:
    first, second = (get_tokenizer(str(copied(name))) for name in ("first", "second"))
    assert texts_of(first, [5, 6]) == texts_of(second, [5, 6])
    assert vocabulary_of(first) is vocabulary_of(second)


def test_the_vocabulary_goes_with_its_last_model(threads: int, copied: Callable[..., Path]) -> None:
    first, second = (get_tokenizer(str(copied(name))) for name in ("first", "second"))
    assert len(equal_tokenizers._tokenizers) == 1
    del first
    gc.collect()
    assert len(equal_tokenizers._tokenizers) == 1
    del second
    gc.collect()
    assert not equal_tokenizers._tokenizers
