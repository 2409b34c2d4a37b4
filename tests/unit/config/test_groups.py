"""Groups of GPUs: unlike or missing GPUs are refused with key, line and remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupoold.config.file import check_on_machine
from gpupoold.config.machine import Machine, MachineDevice, check_groups
from gpupoold.config.schema import Problem, place_of
from gpupoold.errors import SettingError

GIB = 2**30
H100 = MachineDevice("cuda", 80 * GIB, device=1, name="H100", ordinal=0)
OTHER = replace(H100, ordinal=3)


def refusal(*devices: MachineDevice) -> str:
    with pytest.raises(SettingError) as caught:
        check_groups(devices)
    assert caught.value.key == "device[1].gpus"
    return caught.value.what


def test_unlike_gpus() -> None:
    alone = replace(H100, device=0)
    assert refusal(alone, H100, replace(OTHER, name="A10")) == (
        "GPU 0 is H100, and GPU 3 is A10: the GPUs of a group must be alike"
    )
    assert "GPU 0 has 80 GiB, and GPU 3 has 40 GiB" in refusal(
        H100, replace(OTHER, memory_bytes=40 * GIB)
    )


def test_a_gpu_that_is_not_there() -> None:
    assert refusal(H100, replace(OTHER, is_missing=True)) == "there is no GPU 3"


def test_what_is_unknown_is_not_refused() -> None:
    check_groups((H100, OTHER))
    check_groups((H100, replace(OTHER, memory_bytes=None, name="")))
    check_groups((replace(H100, memory_bytes=None, name=""), OTHER))


def test_single_gpus_may_differ_and_be_missing() -> None:
    check_groups((H100, MachineDevice("cuda", GIB, device=2, name="A10", is_missing=True)))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[[device]]\nkind = "emulated"\n[[device]]\nkind = "cuda"\ngpus = [0, 3]', 5),
        ('\ndevices = ["emulated", "cuda:0-3"]', 2),
    ],
)
def test_the_line_of_the_group_is_told(text: str, line: int) -> None:
    machine = Machine(64 * GIB, (H100, replace(OTHER, is_missing=True)))
    (found,) = check_on_machine(text, lambda _: machine)
    assert found.in_full == (
        f"line {line}: device[1].gpus: there is no GPU 3 (name GPUs that `nvidia-smi -L` lists; "
        'if it fails, install the driver; to run without a GPU write: devices = ["emulated"])'
    )


def test_keys_and_places() -> None:
    for key in ("memory.reserve", "device[10].gpus", "paths.model_dirs[2]", "device"):
        assert Problem(place_of(key), "").key == key
    assert place_of("device[10].gpus") == ("device", 10, "gpus")
