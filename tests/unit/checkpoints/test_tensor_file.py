"""Safetensors headers, against files of the safetensors library and damage to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load, save

from gpupoold.checkpoints.files import elements_by_dtype, read_tensors
from gpupoold.errors import Refused
from tests.unit.checkpoints import samples

INTACT = samples.weights()


def pack(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(folder: Path, content: bytes) -> str:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(Refused) as caught:
        read_tensors(path)
    assert str(path) in caught.value.message
    return str(caught.value)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors")


class TestIntact:
    def test_tensors_in_order_of_their_data(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(INTACT)
        tensors = read_tensors(path)
        assert [tensor.begin for tensor in tensors] == sorted(t.begin for t in tensors)
        assert {tensor.name: tensor.num_elements for tensor in tensors} == {
            "model.embed.weight": 64 * 32,
            "model.norm.weight": 16,
        }
        assert elements_by_dtype(tensors) == {"F16": samples.NUM_ELEMENTS}

    @pytest.mark.parametrize(
        "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float64"]
    )
    def test_what_the_library_writes(self, dtype: str, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        arrays = {"a": np.ones((3, 5), dtype), "empty": np.ones((0, 4), dtype)}
        arrays["scalar"] = np.ones((), dtype)
        path.write_bytes(save(arrays, metadata={"format": "np"}))
        assert {tensor.num_elements for tensor in read_tensors(path)} == {15, 0, 1}

    def test_four_bit_elements(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(pack({"a": entry("F4", [4, 2], [0, 4])}, bytes(4)))
        assert elements_by_dtype(read_tensors(path)) == {"F4": 8}


class TestDamaged:
    def test_cut_short_names_both_sizes(self, tmp_path: Path) -> None:
        told = refusal(tmp_path, INTACT[:-100])
        assert f"cut short: {len(INTACT) - 100} bytes" in told
        assert f"but {len(INTACT)} (" in told

    def test_cut_in_the_header(self, tmp_path: Path) -> None:
        assert "needed for its header alone" in refusal(tmp_path, INTACT[:40])

    @pytest.mark.parametrize("num_bytes", [0, 1, 7])
    def test_next_to_nothing(self, num_bytes: int, tmp_path: Path) -> None:
        assert f"has {num_bytes} bytes" in refusal(tmp_path, INTACT[:num_bytes])

    def test_bytes_at_the_end(self, tmp_path: Path) -> None:
        assert "has 3 bytes after the last tensor" in refusal(tmp_path, INTACT + b"abc")

    def test_git_lfs_pointer(self, tmp_path: Path) -> None:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
        assert "git lfs pull" in refusal(tmp_path, pointer)

    def test_other_formats(self, tmp_path: Path) -> None:
        assert "is it safetensors?" in refusal(tmp_path, b"PK\x03\x04" + bytes(range(200)))
        assert "is it safetensors?" in refusal(tmp_path, b"<!DOCTYPE html>" * 20)

    @pytest.mark.parametrize(
        ("header", "said"),
        [
            (b"[]", "does not start with '{'"),
            (b" {}", "does not start with '{'"),
            (b"{", "not readable"),
            (b'{"a": \xff}', "not readable"),
            (b'{"a": 1' + b"0" * 5000 + b"}", "not readable"),
            (b'{"a":' * 20_000 + b"1" + b"}" * 20_000, "not readable"),
            (b'{"a": {}, "a": {}}', "occurs twice"),
            ({"__metadata__": {"a": 1}}, "__metadata__"),
            ({"a": 3}, "dtype, shape and data_offsets expected"),
            ({"a": {"dtype": "F32"}}, "dtype, shape and data_offsets expected"),
            ({"a": entry(dtype="F33")}, "unknown dtype 'F33'"),
            ({"a": entry(dtype=["F32"])}, "unknown dtype"),
            ({"a": entry(shape=[-2])}, "must be lists of numbers"),
            ({"a": entry(shape=[2.0])}, "must be lists of numbers"),
            ({"a": entry(shape=[True, 2])}, "must be lists of numbers"),
            ({"a": entry(shape=2)}, "must be lists of numbers"),
            ({"a": entry(offsets=[0])}, "must be lists of numbers"),
            ({"a": entry(offsets=[0, 2**64])}, "must be lists of numbers"),
            ({"a": entry(offsets=[8, 0])}, "before its begin"),
            ({"a": entry(shape=[3])}, "does not take 8 bytes"),
            ({"a": entry(shape=[2**60] * 1000)}, "does not take 8 bytes"),
            ({"a": entry("F4", [3], [0, 1])}, "does not take 1 bytes"),
            ({"a": entry(offsets=[1, 9])}, "leaves a hole"),
            ({"a": entry(), "b": entry(offsets=[4, 12])}, "overlaps the previous tensor"),
            ({"a": entry(), "b": entry()}, "overlaps the previous tensor"),
            ({"a": entry(), "b": entry(offsets=[9, 17])}, "leaves a hole"),
            ({"a": entry(shape=[2**40], offsets=[0, 2**42])}, "cut short"),
        ],
    )
    def test_header(self, header: object, said: str, tmp_path: Path) -> None:
        assert said in refusal(tmp_path, pack(header, bytes(8)))

    def test_not_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(Refused, match="cannot be read: is a folder, not a regular file"):
            read_tensors(tmp_path)
        with pytest.raises(Refused, match="cannot be read: No such file"):
            read_tensors(tmp_path / "gone")


def accepted(folder: Path, content: bytes) -> bool:
    """Return whether the file passes; any error but ``Refused`` fails the test."""
    path = folder / "x.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_tensors(path)
    except Refused:
        return False
    assert sum(tensor.end - tensor.begin for tensor in tensors) <= len(content)
    return True


def library_accepts(content: bytes) -> bool:
    try:
        load(content)
    except (SafetensorError, ValueError, KeyError):
        return False
    return True


class TestRandomDamage:
    @given(size=st.integers(0, len(INTACT) + 64))
    def test_truncation(self, size: int, scratch: Path) -> None:
        content = INTACT[:size].ljust(size, b"\0")
        assert accepted(scratch, content) == (size == len(INTACT))

    @settings(max_examples=300)
    @given(
        patches=st.lists(
            st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=8)), max_size=4
        ),
        cut=st.integers(0, 4),
    )
    def test_what_passes_the_library_can_load(
        self, patches: list[tuple[int, bytes]], cut: int, scratch: Path
    ) -> None:
        content = bytearray(INTACT)
        for position, patch in patches:
            content[position : position + len(patch)] = patch
        damaged = bytes(content[: len(content) - cut])
        if accepted(scratch, damaged):
            assert library_accepts(damaged)

    @given(digits=st.lists(st.tuples(st.integers(0, 250), st.sampled_from(b'0123456789,[]{}":')),
                           min_size=1, max_size=3))  # fmt: skip
    def test_changed_header_text(self, digits: list[tuple[int, int]], scratch: Path) -> None:
        content = bytearray(INTACT)
        for position, byte in digits:
            content[8 + position] = byte
        if accepted(scratch, bytes(content)):
            assert library_accepts(bytes(content))

    @given(content=st.binary(max_size=300))
    def test_noise(self, content: bytes, scratch: Path) -> None:
        if accepted(scratch, content):
            assert library_accepts(content)

    @given(
        header=st.dictionaries(
            st.text(max_size=5),
            st.fixed_dictionaries(
                {
                    "dtype": st.sampled_from(["F32", "U8", "F4", "X"]),
                    "shape": st.lists(st.integers(-1, 4), max_size=3),
                    "data_offsets": st.lists(st.integers(-1, 16), min_size=1, max_size=3),
                }
            ),
            max_size=3,
        ),
        data=st.binary(max_size=16),
    )
    def test_invented_headers(self, header: dict[str, object], data: bytes, scratch: Path) -> None:
        content = pack(header, data)
        if accepted(scratch, content) and b"F4" not in content:
            assert library_accepts(content)
