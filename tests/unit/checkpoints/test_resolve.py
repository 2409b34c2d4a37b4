"""Names and sources: folders, built-in names, hub ids, and what is said when nothing fits."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from gpupoold.checkpoints.resolve import BUILTIN_MODELS, HubSource, LocalSource, is_hub_id, resolve
from gpupoold.errors import ClientError, Refused, UsageError


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two model folders with something in them, and one that is not there."""
    for folder in ("a/mine", "a/qwen3-8b", "b/mine", "b/org/nested", "b/only-b"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path / "a", tmp_path / "b", tmp_path / "gone"


class TestName:
    def test_first_folder_wins(self, dirs: tuple[Path, ...]) -> None:
        assert resolve("mine", None, dirs) == LocalSource(dirs[0] / "mine")
        assert resolve("only-b", None, dirs) == LocalSource(dirs[1] / "only-b")
        assert resolve("org/nested", None, dirs) == LocalSource(dirs[1] / "org" / "nested")

    def test_folder_goes_before_built_in(self, dirs: tuple[Path, ...]) -> None:
        assert resolve("qwen3-8b", None, dirs) == LocalSource(dirs[0] / "qwen3-8b")
        assert resolve("qwen3-8b", None, ()) == HubSource("Qwen/Qwen3-8B")
        assert resolve("Qwen3-8B", None, ()) == HubSource("Qwen/Qwen3-8B")

    def test_unknown_tells_searched_folders_and_similar_names(self, dirs: tuple[Path, ...]) -> None:
        with pytest.raises(Refused) as caught:
            resolve("qwen3-9b", None, dirs)
        assert caught.value.message == "no checkpoint is known for 'qwen3-9b'"
        assert "similar: qwen3-8b" in caught.value.hint
        assert f"searched {dirs[0]}, {dirs[1]}, {dirs[2]}" in caught.value.hint
        assert "gpupool add-model qwen3-9b --source PATH" in caught.value.hint

    def test_similar_folder(self, dirs: tuple[Path, ...]) -> None:
        with pytest.raises(Refused, match="similar: only-b"):
            resolve("onlyb", None, dirs)

    def test_hub_id_as_a_name_gets_the_command(self, dirs: tuple[Path, ...]) -> None:
        with pytest.raises(Refused, match="add-model Org/X --source Org/X"):
            resolve("Org/X", None, dirs)

    @pytest.mark.parametrize("name", ["", "..", "../a", "a/../b", "/etc", ".x", "a//b", "a b", "~"])
    def test_name_never_leaves_the_folders(self, name: str, dirs: tuple[Path, ...]) -> None:
        with pytest.raises(UsageError, match="malformed"):
            resolve(name, None, dirs)


class TestSource:
    def test_folder(
        self, dirs: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        mine = LocalSource(tmp_path / "a" / "mine")
        assert resolve("x", str(tmp_path / "a" / "mine"), ()) == mine
        assert resolve("x", "~/a/mine", ()) == mine
        assert resolve("x", "./a/mine", ()) == mine
        assert resolve("x", "a/mine", ()) == mine

    @pytest.mark.parametrize("source", ["/gone/model", "./gone", "~/gone", "../gone", "/\0"])
    def test_missing_folder_is_not_taken_for_an_id(self, source: str) -> None:
        with pytest.raises(Refused, match="does not exist"):
            resolve("x", source, ())

    def test_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(Refused, match="is not a folder"):
            resolve("x", str(tmp_path / "model.safetensors"), ())

    def test_hub_id(self) -> None:
        assert resolve("x", "Qwen/Qwen2.5-7B", ()) == HubSource("Qwen/Qwen2.5-7B")

    def test_short_name(self, dirs: tuple[Path, ...]) -> None:
        assert resolve("x", "yi-9b", dirs) == HubSource("01-ai/Yi-9B")
        assert resolve("x", "only-b", dirs) == LocalSource(dirs[1] / "only-b")
        with pytest.raises(Refused, match="no checkpoint is known for 'nothing'"):
            resolve("x", "nothing", dirs)

    @pytest.mark.parametrize("source", ["", " ", "a/b/c", "a//b", "a/b c", "a/-b", "https://h/a"])
    def test_malformed(self, source: str) -> None:
        with pytest.raises(UsageError):
            resolve("x", source, ())

    @given(st.text(max_size=20))
    def test_any_text_is_answered(self, source: str) -> None:
        """A folder, an id or a ``ClientError``; never another exception."""
        with contextlib.suppress(ClientError):
            resolve("x", source, ())


def test_built_in_names_are_well_formed() -> None:
    assert len(BUILTIN_MODELS) >= 25
    for name, repo_id in BUILTIN_MODELS.items():
        assert name == name.lower()
        assert is_hub_id(repo_id)
        assert resolve(name, None, ()) == HubSource(repo_id)
