"""One family of each mechanism, on one device: everything that `make models-table` checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.families.cells import Cell, Outcome
from benchmarks.families.checks import GroupCheck
from benchmarks.families.make import make_family
from benchmarks.families.plain import PlainVllm
from benchmarks.families.table import family_named
from tests.conftest import ROOT
from tests.functional.processor import HAS_AMX

# Six families on two GPUs take some minutes, and more where their checkpoints are made first.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ON_ONE_GPU = ("mistral-window", "granite4", "deepseek-v2", "qwen3-moe")
ON_TWO_GPUS = ("granite4", "deepseek-v2", "llama-gptq", "drafts-eagle", "qwen2.5-vl", "bert")
COLUMNS = ("serve", "switch", "kv", "migrate", "resume")
WITHOUT_KV = ("kv", "migrate")
"""Columns that pooling models do not have."""


def check(names: tuple[str, ...], logs: Path, num_gpus: int) -> dict[str, dict[str, Cell]]:
    """Return the results of families."""
    folder = ROOT / "build" / "families"
    folder.mkdir(parents=True, exist_ok=True)
    families = {family_named(name): make_family(family_named(name), folder) for name in names}
    with PlainVllm(logs / "plain.log", num_gpus) as plain:
        checked = GroupCheck(families, plain, num_gpus)
        checked.run(logs / "group.log")
        return checked.cells


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Cell]]:
    """The results on one GPU."""
    return check(ON_ONE_GPU, tmp_path_factory.mktemp("logs"), 1)


@pytest.fixture(scope="module")
def cells_of_group(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Cell]]:
    """The results on a group of two GPUs."""
    return check(ON_TWO_GPUS, tmp_path_factory.mktemp("logs"), 2)


def skip_without_kernel(cell: Cell) -> None:
    """Skip what vLLM itself refuses in float32 on this processor."""
    if HAS_AMX and cell.outcome is Outcome.VLLM_CANNOT and "bfloat16" in cell.text:
        pytest.skip(f"vLLM alone cannot either, on a processor with AMX: {cell.text}")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_every_token_equals_vllm_alone(
    cells: dict[str, dict[str, Cell]], name: str, column: str
) -> None:
    cell = cells[name][column]
    skip_without_kernel(cell)
    assert cell.outcome is Outcome.YES, cell.text


@pytest.mark.parametrize("name", ON_TWO_GPUS)
def test_every_token_of_a_group_equals_tensor_parallelism_of_vllm_alone(
    cells_of_group: dict[str, dict[str, Cell]], name: str
) -> None:
    found = cells_of_group[name]
    wanted = [one for one in COLUMNS if family_named(name).generates or one not in WITHOUT_KV]
    for column in wanted:
        skip_without_kernel(found[column])
        assert found[column].outcome is Outcome.YES, f"{column}: {found[column].text}"
