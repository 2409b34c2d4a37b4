"""What workers are told at their start."""

from __future__ import annotations

import os

from gpupoold.config.schema import parse_settings
from gpupoold.control.workers.worker import arguments_of

SHARED = {"kind": "cuda", "index": 0, "memory": "6GiB"}


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_a_worker_knows_how_many_share_its_gpu() -> None:
    devices = [SHARED, SHARED, {"kind": "cuda"}, {"kind": "emulated"}, {"kind": "emulated"}]
    settings = parse_settings({"device": devices, "memory": {"kv_host": "1GiB"}}, "test")
    told = [arguments_of(settings, number) for number in range(len(devices))]
    assert [option(one, "--num-sharing") for one in told] == ["2", "2", "1", "1", "1"]
    assert [option(one, "--gpus") for one in told] == ["0", "0", "1", "0", "0"]


def test_a_group_is_one_worker_that_knows_its_gpus() -> None:
    devices = [{"kind": "cuda", "gpus": [2, 0]}, {"kind": "emulated", "gpus": 8}]
    settings = parse_settings({"device": devices, "memory": {"kv_host": "1GiB"}}, "test")
    cuda, emulated = (arguments_of(settings, number) for number in range(2))
    assert (option(cuda, "--num-gpus"), option(cuda, "--gpus")) == ("2", "2,0")
    assert option(emulated, "--num-gpus") == "8"
    assert option(emulated, "--are-cores-shared") == str(int(len(os.sched_getaffinity(0)) < 10))


def test_what_stays_free_is_part_of_a_share() -> None:
    memory = {"reserve": "2GiB", "kv_host": "1GiB"}
    settings = parse_settings({"device": [SHARED, SHARED], "memory": memory}, "test")
    for number in range(2):
        arguments = arguments_of(settings, number)
        assert option(arguments, "--device-bytes") == str(4 << 30)
        assert option(arguments, "--reserve-bytes") == str(2 << 30)
        smaller = arguments_of(settings, number, 1 << 30)
        assert option(smaller, "--device-bytes") == str(3 << 30)
        assert option(smaller, "--spare-bytes") == str(1 << 30)


def test_files_with_kv_are_for_engines_only() -> None:
    memory = {"kv_host": "1GiB", "kv_files": "7GiB"}
    told = {"device": [{"kind": "cuda"}, {"kind": "sim", "gpu": "A10"}], "memory": memory}
    settings = parse_settings(told, "test")
    cuda, sim = (arguments_of(settings, number) for number in range(2))
    assert option(cuda, "--kv-files") == str(settings.paths.state_dir / "kv")
    assert option(cuda, "--kv-files-bytes") == str(7 << 30)
    assert "--kv-files" not in sim
    without = parse_settings({"device": [{"kind": "cuda"}], "memory": {"kv_host": "1GiB"}}, "test")
    assert "--kv-files" not in arguments_of(without, 0)
