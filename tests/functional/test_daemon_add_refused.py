"""Models that are refused: the reason is told, and nothing of them stays anywhere."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.errors import GpupoolError, Refused, UsageError
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    MODELS,
    QWEN2,
    QWEN3,
    Traces,
    admin_http,
    cli,
    device,
    until,
    usage,
)

Copy = Callable[[Path], Path]


@pytest.fixture
def refused(pool: PrivateDaemon) -> Iterator[Callable[..., GpupoolError]]:
    """Tries to add a model and returns the daemon's error; all traces must be gone after it."""
    with pool.client() as client:  # the last model may just have been loaded
        until(lambda: all(row.weights_total_bytes for row in client.ps().models))
    before = Traces.of(pool)

    def add(source: Path, name: str = "unwanted", **options: Any) -> GpupoolError:
        try:
            pool.add_model(name, source, **(LOAD_OPTIONS | options))
        except GpupoolError as error:
            return error
        assert cli(pool, "rm", name).returncode == 0
        pytest.fail(f"{name} was accepted")

    yield add
    assert Traces.of(pool) == before


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def corrupt(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(100)
        file.write(b"\x00\xff" * 20)


def add_code(folder: Path) -> None:
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('this code was run')\n")


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "truncated weights": (cut_short, "model.safetensors: cut short", ""),
    "corrupted weights": (corrupt, "damaged safetensors", ""),
    "weights of another shape": (
        config(hidden_size=2000),
        "config.json: hidden_size is 2000, but the weights have no tensor",
        "",
    ),
    "unknown architecture": (
        config(architectures=["ElizaForCausalLM"]),
        "ElizaForCausalLM",
        "supported models",
    ),
    "pickled weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin",
        "allow_pickle",
    ),
    "code of its own": (add_code, "auto_map", "allow_remote_code"),
    "quantisation": (
        config(quantization_config={"quant_method": "magic"}),
        "quantisation 'magic'",
        "",
    ),
    "layers": (
        config(num_hidden_layers=40),
        "num_hidden_layers is 40, but the weights have 21 tensors",
        "",
    ),
    "vocabulary": (config(vocab_size=5000), "vocab_size is 5000, but the weights have at most", ""),
    "width": (config(intermediate_size=5000), "the weights do not match config.json: ", ""),
    "rope": (config(rope_scaling={"rope_type": "magic"}), "'magic'", ""),
    "an encoder": (
        config(architectures=["T5Model"], model_type="t5", is_encoder_decoder=True),
        "is an encoder-decoder model, which is not supported",
        "decoder-only",
    ),
    "tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0"}'),
        "the tokenizer cannot be loaded",
        "copy the tokenizer files",
    ),
}

# Refused by the same checks as others of these; the unit tests of the checks have them all.
SLOW_CHECKPOINTS = {"corrupted weights", "weights of another shape", "layers", "vocabulary", "rope"}


class TestCheckpoints:
    """Checkpoints that are damaged, or whole but of a kind that is not served."""

    @pytest.mark.parametrize(
        ("change", "message", "hint"),
        [
            pytest.param(*values, id=name, marks=[pytest.mark.slow] * (name in SLOW_CHECKPOINTS))
            for name, values in CHECKPOINTS.items()
        ],
    )
    def test_a_changed_checkpoint(
        self,
        refused: Callable[..., Any],
        copy_checkpoint: Copy,
        tiny_models: dict[str, Path],
        change: Callable[[Path], object],
        message: str,
        hint: str,
    ) -> None:
        folder = copy_checkpoint(tiny_models[LLAMA])
        change(folder)
        error = refused(folder)
        assert isinstance(error, Refused)
        assert message in error.message
        assert error.hint
        assert hint in error.hint

    def test_a_folder_without_config(self, refused: Callable[..., Any], tmp_path: Path) -> None:
        error = refused(tmp_path)
        assert isinstance(error, Refused)
        assert "config.json" in error.message

    def test_no_such_folder(self, refused: Callable[..., Any], tmp_path: Path) -> None:
        assert "does not exist" in refused(tmp_path / "nowhere").message


class TestSizes:
    def test_weights_larger_than_the_device(
        self,
        pool: PrivateDaemon,
        refused: Callable[..., Any],
        copy_checkpoint: Copy,
        tiny_models: dict[str, Path],
    ) -> None:
        folder = copy_checkpoint(tiny_models[LLAMA])
        num_elements = device(pool).device_bytes // 4 + 1
        sizes = {"big": num_elements, "layers.0.norm": 256, "layers.1.norm": 256}
        tensors, end = {}, 0
        for name, size in sizes.items():
            offsets, end = [end, end + 4 * size], end + 4 * size
            tensors[name] = {"dtype": "F32", "shape": [size], "data_offsets": offsets}
        header = json.dumps(tensors).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + end)  # a hole: takes no disk
        error = refused(folder)
        assert "do not fit on a device" in error.message
        assert "bfloat16" in error.hint

    def test_longer_requests_than_the_kv_has_room_for(
        self, refused: Callable[..., Any], tiny_models: dict[str, Path]
    ) -> None:
        error = refused(tiny_models[QWEN2], max_model_len=4096)
        assert isinstance(error, Refused)
        assert "4096" in error.message
        assert "--max-len" in error.hint

    def test_longer_requests_than_the_checkpoint_knows(
        self, refused: Callable[..., Any], tiny_models: dict[str, Path]
    ) -> None:
        assert "100000" in refused(tiny_models[QWEN2], max_model_len=100_000).message

    def test_a_model_cache_full_of_pinned_snapshots(
        self, pool: PrivateDaemon, tiny_models: dict[str, Path]
    ) -> None:
        pool.add_model("fifth", tiny_models[QWEN3], **LOAD_OPTIONS)
        with pool.client() as client:
            try:
                until(lambda: "fifth" in Traces.of(pool).on_device)
                before = Traces.of(pool)
                for name in (*MODELS, "fifth"):
                    client.pin(name)
                with pytest.raises(Refused, match="does not fit in the model cache") as caught:
                    pool.add_model("sixth", tiny_models[QWEN3], **LOAD_OPTIONS)
                assert "`gpupool cache unpin`" in caught.value.hint
                assert "memory.model_cache" in caught.value.hint
                assert Traces.of(pool) == before
            finally:
                for name in MODELS:
                    client.pin(name, is_pinned=False)
                assert cli(pool, "rm", "fifth").returncode == 0

    def test_an_unknown_dtype(
        self, refused: Callable[..., Any], tiny_models: dict[str, Path]
    ) -> None:
        error = refused(tiny_models[QWEN2], dtype="float3")
        assert isinstance(error, UsageError)
        assert "float3" in error.message


class TestNames:
    @pytest.mark.parametrize(
        ("name", "aliases"),
        [(LLAMA, []), ("other", [LLAMA]), ("other", ["a-1", QWEN2]), ("taken", [])],
        ids=["name", "alias-is-a-name", "second-alias", "name-is-an-alias"],
    )
    def test_taken(
        self, pool: PrivateDaemon, tiny_models: dict[str, Path], name: str, aliases: list[str]
    ) -> None:
        assert cli(pool, "set", QWEN3, "--add-alias", "taken").returncode == 0
        try:
            before = Traces.of(pool)
            with pytest.raises(Refused) as caught:
                pool.add_model(name, tiny_models[LLAMA], aliases=aliases, **LOAD_OPTIONS)
            assert f"{(aliases or [name])[-1]!r} is already" in caught.value.message
            assert Traces.of(pool) == before
        finally:
            assert cli(pool, "set", QWEN3, "--remove-alias", "taken").returncode == 0

    def test_an_alias_given_twice(
        self, refused: Callable[..., Any], tiny_models: dict[str, Path]
    ) -> None:
        assert isinstance(refused(tiny_models[LLAMA], aliases=["a-1", "a-1"]), UsageError)

    @pytest.mark.parametrize("check_only", [False, True])
    def test_malformed_names_show_before_any_work(
        self, pool: PrivateDaemon, tmp_path: Path, check_only: bool
    ) -> None:
        with pytest.raises(UsageError, match="bad name"):
            pool.add_model("bad name", tmp_path, check_only=check_only)


class TestLeaving:
    @pytest.mark.slow  # on a busy machine the load may end first
    def test_a_client_that_leaves_while_the_model_loads(
        self, pool: PrivateDaemon, tiny_models: dict[str, Path]
    ) -> None:
        before = Traces.of(pool)
        body = {"name": "left", "source": str(tiny_models[QWEN2]), **LOAD_OPTIONS}
        with admin_http(pool) as http, http.stream("POST", "/models", json=body) as response:
            lines = response.iter_lines()
            while json.loads(next(lines))["stage"] != "load":
                pass
        until(lambda: Traces.of(pool) == before)
        # The name is free again and the worker loads as before.
        pool.add_model("left", tiny_models[QWEN2], **LOAD_OPTIONS)
        assert usage(pool, "left").state == "ready"
        assert cli(pool, "rm", "left").returncode == 0

    def test_a_body_that_is_no_request(self, pool: PrivateDaemon) -> None:
        with admin_http(pool) as http:
            for body in ({}, {"name": "x", "nome": "y"}, {"name": "x", "ttft_s": -1}):
                answer = http.post("/models", json=body)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "usage"
