"""Boxes by name, groups of GPUs, and models that fit them or not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.latency.shape import hardware
from gpupoold.sim.boxes import Box, box_models, groups_text, models_on, parse_box, parse_groups


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16xH800", Box(16, "H800")),
        ("A10", Box(1, "A10")),
        (" 4 x a10 ", Box(4, "A10")),
        ("2x4xH800", Box(2, "H800", (4,))),
        ("1x8xH800", Box(1, "H800", (8,))),
    ],
)
def test_boxes_by_name(text: str, expected: Box) -> None:
    assert parse_box(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "0xA10", "4x", "16xTPU", "-1xA10", "9999999999xH800", "2x9xH800", "2x0xH800", "999x8xA10"],
)
def test_boxes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_box(text)


def test_a_group_adds_up_memory_and_links() -> None:
    box = parse_box("8xH800").grouped(4)
    assert (box.num_devices, box.tensor_parallel_size, box.name) == (2, 4, "8xH800")
    assert box.device_bytes == 4 * Box(1, "H800").device_bytes
    [model] = box_models(box, 1, Targets(), ["Qwen-72B"]).values()
    bandwidth = hardware("H800").pcie_bandwidth_bytes_per_s
    assert model.latency.switch_s(model.weight_bytes) == pytest.approx(
        model.weight_bytes / (4 * bandwidth)
    )


@pytest.mark.parametrize("size", [0, -1, 3, 16])
def test_no_gpu_may_be_left_over(size: int) -> None:
    with pytest.raises(UsageError, match="groups"):
        parse_box("8xH800").grouped(size)


def test_a_box_of_unlike_groups() -> None:
    box = parse_box("8xH800").split(parse_groups("4x1 + 1x4"))
    assert (box.num_devices, box.groups, box.name) == (5, (4, 1, 1, 1, 1), "8xH800")
    assert box.bytes_of(1) * 4 == box.device_bytes
    assert groups_text(box.groups) == "1x4+4x1"
    assert parse_box("8xH800").split([4, 4]) == parse_box("2x4xH800")
    assert replace(box, num_devices=7).groups == (4, 1, 1, 1, 1, 4, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2x3", "the groups 2x3 have 6 GPUs, 8xH800 has 8"),
        ("1x16", "the groups 1x16 have 16 GPUs"),
        ("x4", "names no groups of GPUs"),
        ("2x", "names no groups of GPUs"),
        ("2x4+", "names no groups of GPUs"),
        ("99999x4", "names no groups of GPUs"),
    ],
)
def test_groups_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_box("8xH800").split(parse_groups(text))


def test_shapes_take_turns() -> None:
    models = box_models(Box(1, "H800"), 3, Targets(), ["Yi-1.5-6B", "Qwen-14B"])
    assert list(models) == ["m00", "m01", "m02"]
    weights = [model.weight_bytes for model in models.values()]
    assert weights[0] == weights[2] < weights[1]


@pytest.mark.parametrize(
    ("box", "shape", "said"),
    [
        (Box(1, "A10"), "Llama-2-13B", "26 GB, one GPU of 1xA10 can hold 21.7 GB"),
        (Box(2, "A10", (4,)), "Qwen-72B", "4 GPUs of 8xA10 can hold"),
        (Box(1, "H800", (3,)), "Yi-1.5-6B", "no measured fit for 3 GPUs"),
        (Box(1, "H800", (8,)), "Qwen2.5-7B", "28 attention heads are not divisible by 8"),
        (Box(1, "H800"), "GPT-9", "GPT-9"),
    ],
)
def test_models_that_cannot_be_there(box: Box, shape: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        models_on(box, {"a": shape}, Targets())
