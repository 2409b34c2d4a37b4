"""``CudaDriver`` as far as it goes without a GPU; ``tests/gpu`` has the rest."""

from __future__ import annotations

import inspect
import logging
import re
from enum import IntEnum
from types import SimpleNamespace

import pytest

from gpupoold.memory.cuda import driver as cuda_driver
from gpupoold.memory.cuda.driver import CudaDriver, CudaError
from tests.conftest import has_nvidia_gpu
from tests.unit.memory.fake_cuda import FakeCuda


def test_the_fake_has_the_drivers_methods() -> None:
    for name, method in inspect.getmembers(CudaDriver, inspect.isfunction):
        if not name.startswith("_"):
            fake = vars(FakeCuda)[name]
            assert inspect.signature(fake) == inspect.signature(method), name


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_READY = 600


class TestMappingsThatAreNotReady:
    """As under WSL."""

    @staticmethod
    def driver_of(*answers: Status) -> tuple[CudaDriver, list[float]]:
        """The driver, and its waits; the last answer is given from then on."""
        left = list(answers)

        def call(*arguments: object) -> tuple[Status]:
            return (left.pop(0) if len(left) > 1 else left[0],)

        driver = FakeCuda(0)
        driver._driver = SimpleNamespace(
            cuMemMap=call, cuMemSetAccess=call, cuGetErrorString=lambda status: (0, b"no")
        )
        waits_s: list[float] = []
        driver._access, driver._has_waited, driver._sleep = None, False, waits_s.append
        return driver, waits_s

    def test_are_tried_again_and_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        no, yes = Status.CUDA_ERROR_NOT_READY, Status.CUDA_SUCCESS
        driver, waits_s = self.driver_of(no, no, yes, no, yes)
        with caplog.at_level(logging.WARNING):
            CudaDriver.map(driver, 0, 1, 2)
            CudaDriver.allow_access(driver, 0, 1)
        assert waits_s == [0.001, 0.002, 0.001]
        assert caplog.text.count("cuMemMap failed: CUDA_ERROR_NOT_READY") == 1
        assert "cuMemSetAccess" not in caplog.text

    def test_are_given_up_after_two_seconds(self) -> None:
        driver, waits_s = self.driver_of(Status.CUDA_ERROR_NOT_READY)
        with pytest.raises(
            CudaError, match=r"^cuMemSetAccess failed: CUDA_ERROR_NOT_READY"
        ) as caught:
            CudaDriver.allow_access(driver, 0, 1)
        assert "memory.reserve" in caught.value.__notes__[0]
        assert 1.9 < sum(waits_s) < 2.1

    def test_other_errors_are_raised_at_once(self) -> None:
        driver, waits_s = self.driver_of(Status.CUDA_ERROR_INVALID_VALUE)
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            CudaDriver.map(driver, 0, 1, 2)
        assert waits_s == []


class TestBindings:
    @pytest.fixture(autouse=True)
    def _needs_bindings(self) -> None:
        pytest.importorskip("cuda.bindings.driver", reason="comes with gpupool[cuda] only")

    def test_without_a_gpu_the_call_and_the_reason_are_named(self) -> None:
        if has_nvidia_gpu():
            pytest.skip("this machine has a GPU")
        with pytest.raises(CudaError, match=r"^cuInit failed: ") as caught:
            CudaDriver().open(0)
        assert "gpupool doctor" in caught.value.__notes__[0]

    @pytest.mark.parametrize("name", cuda_driver.INIT_REMEDIES)
    def test_a_driver_that_does_not_begin_names_the_remedy(self, name: str) -> None:
        from cuda.bindings import driver

        bindings = CudaDriver()
        bindings._driver = SimpleNamespace(
            cuInit=lambda flags: (getattr(driver.CUresult, name),),
            cuGetErrorString=lambda status: (0, b"no"),
        )
        with pytest.raises(CudaError, match=f"^cuInit failed: {name}: no") as caught:
            bindings.open(0)
        assert caught.value.__notes__ == [cuda_driver.INIT_REMEDIES[name]]

    def test_the_pinned_version_has_every_call(self) -> None:
        from cuda.bindings import driver

        calls = set(re.findall(r'"(cu[A-Z]\w+)"', inspect.getsource(cuda_driver)))
        assert "cuMemcpyBatchAsync" in calls
        assert [name for name in calls if not hasattr(driver, name)] == []

    def test_batches_are_copied_as_in_cuda_13(self) -> None:
        """CUDA 12.8's function of that name had one argument more."""
        from cuda.bindings import driver

        signature = driver.cuMemcpyBatchAsync.__doc__.splitlines()[0]
        assert signature.endswith("size_t numAttrs, hStream)")
