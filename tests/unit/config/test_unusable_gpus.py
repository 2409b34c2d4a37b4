"""Configured GPUs that the machine, or the installed vLLM, does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupoold.config.file import check_gpus_found, check_on_machine, parsed_file
from gpupoold.config.machine import Machine, MachineDevice, unusable_gpu
from gpupoold.errors import Failed

GIB = 2**30
THERE = MachineDevice("cuda", 24 * GIB, ordinal=0)
MISSING = MachineDevice("cuda", None, device=1, ordinal=4, is_missing=True)
EMULATED = MachineDevice("emulated", 2 * GIB)


def machine(*devices: MachineDevice, has_cuda_engine: bool = True) -> Machine:
    return Machine(64 * GIB, devices, has_cuda_engine=has_cuda_engine)


def test_devices_that_can_be_used() -> None:
    assert unusable_gpu(machine(THERE)) is None
    assert unusable_gpu(machine(EMULATED, has_cuda_engine=False)) is None


@pytest.mark.parametrize(
    ("found", "message", "hint"),
    [
        (machine(THERE, MISSING), "device[1]: there is no GPU 4", "nvidia-smi -L"),
        (
            machine(EMULATED, MISSING, has_cuda_engine=False),
            "device[1]: is a CUDA device, and the installed vLLM is built for CPUs only",
            "GPUPOOL_DEVICE=cuda",
        ),
    ],
)
def test_the_daemon_refuses_to_start(found: Machine, message: str, hint: str) -> None:
    """With exit status 1, so that systemd tries again: a driver may be loaded later."""
    file = parsed_file('devices = ["emulated"]', None)
    with pytest.raises(Failed) as refused:
        check_gpus_found(file, found)
    assert refused.value.message == message
    assert hint in (refused.value.hint or "")
    assert refused.value.exit_code == 1


def test_the_check_of_the_file_names_the_line() -> None:
    text = '[server]\nport = 1\n[[device]]\nkind = "emulated"\n[[device]]\nkind = "cuda"\n'
    (found,) = check_on_machine(text, lambda _: machine(EMULATED, MISSING))
    assert (found.line, found.what) == (5, "there is no GPU 4")
    (found,) = check_on_machine(text, lambda _: machine(EMULATED, MISSING, has_cuda_engine=False))
    assert found.line == 5


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "::ffff:203.0.113.1"])
def test_an_address_of_no_interface(host: str) -> None:
    text = f'devices = ["emulated"]\n[server]\nhost = "{host}"\n'
    (found,) = check_on_machine(text, lambda _: machine(EMULATED))
    assert (found.line, found.key) == (3, "server.host")


def test_memory_is_looked_at_beside_other_problems() -> None:
    text = '[server]\nprot = 1\nport = "x"\n[memory]\nkv_host = "500TiB"\n[nothing]\na = 1\n'
    (found,) = check_on_machine(text, lambda _: machine(EMULATED))
    assert (found.line, found.key) == (5, "memory.kv_host")


@pytest.mark.parametrize("text", ["[server", 'devices = ["gpu"]', '[[device]]\nkind = "no"\n'])
def test_a_machine_is_not_looked_at_without_devices(text: str, tmp_path: Path) -> None:
    def find(_: object) -> Machine:
        raise AssertionError(tmp_path)

    assert check_on_machine(text, find) == []
