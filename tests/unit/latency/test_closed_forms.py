"""Numbers that the papers print or that follow from what they print, exactly."""

from __future__ import annotations

import math

import pytest

from gpupoold.latency.models import SwitchModel
from gpupoold.latency.shape import LatencyError

GB = 1e9


def test_c12_13b_over_pcie_4() -> None:
    """Aegaeon, section 4.2: 26 GB / 32 GB/s = 0.8125 s."""
    assert SwitchModel(32 * GB).predict_s(26_000_000_000) == 0.8125


@pytest.mark.parametrize(
    ("bandwidth", "as_printed_s", "as_inefficiency_s"),
    [(32 * GB, 0.5078125, 1.3), (64 * GB, 0.25390625, 0.65)],
)
def test_c13_beta_as_printed_is_faster_than_the_link(
    bandwidth: float, as_printed_s: float, as_inefficiency_s: float
) -> None:
    """Aegaeon, equation 4, multiplies by 0.625: that beats the link itself.

    Only a division is the loss it is meant to be; a measured bandwidth needs neither.
    """
    size, beta = 26_000_000_000, 0.625
    link_s = SwitchModel(bandwidth).predict_s(size)
    assert link_s * beta == as_printed_s < link_s
    assert SwitchModel(bandwidth * beta).predict_s(size) == pytest.approx(as_inefficiency_s)


def test_c14_measured_speed_of_a_naive_load() -> None:
    """Aegaeon, section 5.1: 13 GB per GPU in 4.6 s are 2.83 GB/s."""
    switch = SwitchModel.measured(13_000_000_000, 4.6)
    assert round(switch.bandwidth_bytes_per_s / GB, 2) == 2.83
    assert switch.predict_s(13_000_000_000) == pytest.approx(4.6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: SwitchModel(0),
        lambda: SwitchModel(math.inf),
        lambda: SwitchModel(1e9).predict_s(-1),
        lambda: SwitchModel.measured(0, 1),
        lambda: SwitchModel.measured(1, 0),
    ],
)
def test_nonsense_is_named(call: object) -> None:
    with pytest.raises(LatencyError, match=r"got -?[\d.]+|got inf|positive|cannot be"):
        call()  # type: ignore[operator]
