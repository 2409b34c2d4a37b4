"""Models of a plan: named, measured, from checkpoints and from a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.latency.models import StoredFit, StoredLatency
from gpupoold.latency.shape import builtin_shape
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.planner.models import (
    PlannedModel,
    measured_degrees,
    measured_engines,
    place,
    place_on,
    read_checkpoint,
    read_models,
)


class TestModels:
    def planned(self, shape_name: str = "Qwen2.5-7B", **changes: object) -> PlannedModel:
        shape = builtin_shape(shape_name)
        model = PlannedModel("one", Targets(), shape.weight_bytes, shape.kv_bytes_per_token, shape)
        return replace(model, **changes)  # type: ignore[arg-type]

    def measured(self, device: str) -> StoredLatency:
        prefill = StoredFit("LinearPrefill", (1e-4, 0.01), 0.99, 0.03, 0.07, 9)
        decode = StoredFit("LinearDecode", (1e-7, 1e-4, 0.03), 0.99, 0.03, 0.07, 9)
        return StoredLatency(device, "0.32.0", "bfloat16", 1.75e9, 2e10, prefill, decode)

    def test_what_was_measured_belongs_to_its_device(self) -> None:
        model = self.planned(measured=(self.measured("NVIDIA A10"),))
        here = place([model], parse_box("2xA10"))
        assert here.basis == {"one": "measured"}
        assert here.models["one"].latency.prefill_s([100]) == pytest.approx(0.02)
        assert place([model], parse_box("2xH800")).basis == {"one": "published"}
        assert place([model], parse_box("2xL40S")).basis == {"one": "scaled"}
        assert place([model], parse_box("4xA10").grouped(4)).basis == {"one": "scaled"}
        emulated = self.planned(measured=(self.measured("CPU x 2"),))
        assert place([emulated], parse_box("A10")).basis == {"one": "published"}

    def test_engines_measured_on_the_gpu_count_for_their_family(self) -> None:
        one = self.planned(engine_bytes={"NVIDIA A10": 5, "2 x NVIDIA A10": 14, "NVIDIA H100": 99})
        tune = replace(one, name="tune", engine_bytes={"NVIDIA A10": 6})
        sibling = replace(one, name="sibling", engine_bytes={})
        box = parse_box("1xA10")
        assert measured_engines([one, tune, sibling], box) == {"one": 7, "tune": 6}
        family = [replace(model, family="qwen") for model in (one, tune, sibling)]
        assert measured_engines(family, box) == {"one": 7, "tune": 7, "sibling": 7}

    def test_what_was_measured_on_a_group_belongs_to_groups_of_that_size(self) -> None:
        single, group = self.measured("NVIDIA A10"), self.measured("2 x NVIDIA A10")
        group = replace(
            group, prefill=StoredFit("LinearPrefill", (5e-5, 0.01), 0.99, 0.03, 0.07, 9)
        )
        model = self.planned(measured=(single, group))
        box = parse_box("4xA10")
        assert measured_degrees(model, box) == [1, 2]
        for degree, prefill_s in ((1, 0.02), (2, 0.015)):
            placed, basis = place_on(model, box, degree)
            assert basis == "measured"
            assert placed.latency.prefill_s([100]) == pytest.approx(prefill_s)
        assert place_on(model, box, 4)[1] == "scaled"
        assert place_on(model, parse_box("4xH800"), 2)[1] != "measured"
        incomplete = self.planned(measured=(single, replace(group, decode=None)))
        assert measured_degrees(incomplete, box) == [1]

    def test_without_dimensions_only_where_it_was_measured(self) -> None:
        model = self.planned(
            shape=None, shape_problem="it is gone", measured=(self.measured("NVIDIA A10"),)
        )
        assert place([model], parse_box("A10")).basis == {"one": "measured"}
        with pytest.raises(
            UsageError, match="step times on H800 need the model's dimensions: it is gone"
        ):
            place([model], parse_box("H800"))

    def test_too_large(self) -> None:
        large, small = self.planned("Llama-3.1-70B", name="big"), self.planned()
        with pytest.raises(UsageError) as caught:
            place([large, small, replace(large, name="twin")], parse_box("4xA10"))
        assert caught.value.message == (
            "big weighs 141 GB, 119 GB too much; twin weighs 141 GB, 119 GB too much: "
            "one A10 can hold 21.7 GB (90 % of the memory), so these models do not fit at all"
        )
        assert "quantized" in caught.value.hint
        with pytest.raises(UsageError) as caught:
            place([large], parse_box("4xH800"))
        assert "--groups auto" in caught.value.hint
        assert place([large], parse_box("4xH800").grouped(4)).models["big"].weight_bytes > 141e9

    def test_names(self) -> None:
        with pytest.raises(UsageError, match="'one' is named 2 times"):
            place([self.planned(), self.planned()], parse_box("A10"))
        with pytest.raises(UsageError, match="no models"):
            place([], parse_box("A10"))


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


class TestCheckpoints:
    def test_a_configuration_alone(self, tmp_path: Path) -> None:
        known = read_checkpoint(write_config(tmp_path / "a"))
        assert known.shape == builtin_shape("Llama-3.1-8B")
        assert known.weight_bytes == known.shape.weight_bytes

    def test_32_bits_are_served_in_16(self, tmp_path: Path) -> None:
        folder = write_config(tmp_path / "a", torch_dtype="float32")
        assert read_checkpoint(folder).shape.dtype_bytes == 2
        assert read_checkpoint(folder, "float32").shape.dtype_bytes == 4

    def test_weights_are_counted(self, tiny_models: dict[str, Path]) -> None:
        folder = tiny_models["tiny-llama"]
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        known = read_checkpoint(folder, "float32")
        assert known.weight_bytes == pytest.approx(stored, rel=0.01)
        assert read_checkpoint(folder).weight_bytes == known.weight_bytes // 2

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (None, "cannot be read: No such file"),
            ("{", "Expecting property name"),
            ("[]", "not a JSON object"),
            ('{"hidden_size": 64}', "missing key num_attention_heads"),
        ],
    )
    def test_bad_configurations(self, tmp_path: Path, text: str | None, said: str) -> None:
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=said) as caught:
            read_checkpoint(tmp_path)
        assert str(tmp_path) in caught.value.message


class TestFile:
    def read(self, folder: Path, text: str) -> tuple[PlannedModel, ...]:
        path = folder / "models.toml"
        path.write_text(text)
        return read_models(path)

    def test_everything(self, tmp_path: Path) -> None:
        write_config(tmp_path / "llama")
        chat, first, second = self.read(
            tmp_path,
            """
            [[model]]
            name = "chat"
            shape = "Qwen2.5-7B"
            ttft = "2s"
            tbt = 0.05
            rps = 1
            weights = "5GB"
            max_len = 4096
            [[model]]
            name = "tune"
            path = "llama"
            count = 2
            family = "llama"
            """,
        )
        assert chat.targets == Targets(2.0, 0.05)
        assert (chat.rps, chat.weight_bytes, chat.max_len) == (1.0, 5_000_000_000, 4096)
        assert (first.name, second.name) == ("tune-0", "tune-1")
        assert first.targets == Targets()
        assert first.shape == builtin_shape("Llama-3.1-8B")
        assert (chat.family, first.family, second.family) == ("", "llama", "llama")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "names no models"),
            (
                '[[model]]\nname = "a"\nshape = "Qwen-7B"\nfamily = "f"\n'
                '[[model]]\nname = "b"\nshape = "Qwen-14B"\nfamily = "f"',
                "family 'f' differ in size",
            ),
            ("model = 3", "names no models"),
            ("models = []", "unknown key 'models'"),
            ("[[model]", "is not TOML"),
            ("model = [1]", r"model 1: must be a \[\[model\]\] table"),
            ('[[model]]\nshape = "Qwen2.5-7B"', "model 1: name: is missing"),
            ('[[model]]\nname = "a"', "model 1: needs either shape or path"),
            ('[[model]]\nname = "a"\nshape = "x"\npath = "y"', "either shape or path"),
            ('[[model]]\nname = "a"\nshape = "x"', "model 1: shape: no built-in shape 'x'"),
            ('[[model]]\nname = "a"\npath = "nowhere"', "nowhere/config.json: cannot be read"),
            ('[[model]]\nname = "a"\nspeed = 1', "unknown key 'speed'"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nrps = -1', "rps: -1 requests/s"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nrps = nan', "rps: nan requests/s"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nrps = "1"', "rps: '1' is not a number"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nttft = "0s"', "ttft: '0s' must be more"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\ntbt = "fast"', "tbt: 'fast' is not a dur"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\ncount = 0', "count: 0 is not a whole"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\ncount = 99999', "count: at most"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nweights = "big"', "weights: 'big' is not"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nmax_len = 1.5', "max_len: 1.5 is not"),
            ('[[model]]\nname = 7\nshape = "Qwen-7B"', "name: 7 is not a text"),
        ],
    )
    def test_what_is_wrong(self, tmp_path: Path, text: str, said: str) -> None:
        with pytest.raises(UsageError, match=said) as caught:
            self.read(tmp_path, text)
        assert str(tmp_path) in caught.value.message

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read: No such file"):
            read_models(tmp_path / "none.toml")
