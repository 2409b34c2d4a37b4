"""Checks of a checkpoint folder before any load.

The checks read file names, JSON and the headers of the weight files, and find errors that an engine
would report minutes later, and custom code. The worker checks whether the engine knows the
architecture.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.files import MAX_INDEX_VALUES, read_json
from gpupoold.checkpoints.formats import check_format, check_kind
from gpupoold.checkpoints.headers import RemoteWeights
from gpupoold.checkpoints.manifest import require_complete
from gpupoold.checkpoints.modules import check_modules
from gpupoold.checkpoints.numbers import TensorFacts, check_against_tensors, check_numbers
from gpupoold.checkpoints.tensor_file import (
    DTYPE_BITS,
    MAX_TENSORS,
    Beginning,
    TensorEntry,
    elements_by_dtype,
    read_tensors,
)
from gpupoold.errors import Refused
from gpupoold.system.folders import hint_to_read

TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
}
_MAX_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "seq_length",
    "max_seq_len",
    "max_sequence_length",
)
_NUM_NAMES_SHOWN = 5
_TWO_VERSIONS = "the files are of different versions; fetch the checkpoint again"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The content of a checkpoint folder.

    ``num_parameters`` counts stored elements: packed quantized weights count less than the model's
    own number. ``dtype`` is the configuration's, else the most common dtype of the weights.
    ``elements`` maps safetensors dtypes to numbers of elements. ``max_position_embeddings`` is None
    if not stated.
    """

    path: Path
    architecture: str
    model_type: str
    dtype: str
    weight_bytes: int
    num_parameters: int
    elements: tuple[tuple[str, int], ...]
    max_position_embeddings: int | None
    quantization: str | None
    weight_files: tuple[str, ...]


def check_checkpoint(
    path: Path, *, allow_pickle: bool, allow_remote_code: bool, remote: RemoteWeights | None = None
) -> CheckpointInfo:
    """Describe the checkpoint in folder ``path``. Blocks on file access.

    With ``remote`` the weight files are not in the folder yet; their sizes and headers are checked.

    Raises:
        Refused: the checkpoint is incomplete, damaged, or needs a permission that is not given; the
            message names the file, the hint a remedy.
    """
    names = list_folder(path)
    if remote is None:
        require_complete(path)
    else:
        names = sorted({*names, *remote.sizes})
    config = check_config(path, allow_remote_code=allow_remote_code)
    check_modules(path)
    if not layout.tokenizer_files(names):
        raise Refused(
            f"{path}: has no tokenizer (tokenizer.json, tokenizer.model or the like)",
            "copy the tokenizer files of the original model into this folder",
        )
    require_image_processor(path, config, names)
    files, elements = _weights(path, names, config, allow_pickle, remote)
    counts = {dtype: count for dtype, count in elements.items() if count}
    if not counts:
        raise Refused(f"{path}: the weight files ({_some(files)}) hold no tensors")
    return CheckpointInfo(
        path=path,
        architecture=str(config["architectures"][0]),
        model_type=str(config.get("model_type", "")),
        dtype=_config_dtype(config) or _commonest_dtype(counts),
        weight_bytes=sum(count * DTYPE_BITS[dtype] // 8 for dtype, count in counts.items()),
        num_parameters=sum(counts.values()),
        elements=tuple(sorted(counts.items())),
        max_position_embeddings=_max_length(config),
        quantization=_quantization(config),
        weight_files=files,
    )


def check_config(path: Path, *, allow_remote_code: bool) -> dict[str, Any]:
    """Return the checkpoint's ``config.json`` after checking it.

    Raises:
        Refused: the file is missing or unreadable, names no architecture, or requires its own code.
    """
    file = path / layout.CONFIG_FILE
    if not os.path.exists(file):
        check_format(f"{path}:", list_folder(path))
        raise Refused(
            f"{path}: has no {layout.CONFIG_FILE}, so it is not a Hugging Face checkpoint",
            "give the folder that holds config.json and the weights",
        )
    config = read_json(file)
    check_numbers(file, config)
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise Refused(
            f"{file}: names no model class under 'architectures'",
            "use a checkpoint saved with its configuration",
        )
    culprit = _remote_code_file(path, config)
    if culprit is not None and not allow_remote_code:
        raise Refused(
            f"{culprit}: 'auto_map' requires Python code that comes with the checkpoint",
            "if you trust the code's author, set allow_remote_code = true under [security]",
        )
    check_kind(str(file), config, list(_parts(config)))
    return config


def require_image_processor(path: Path, config: dict[str, Any], names: Sequence[str]) -> None:
    """Check that a vision model's files include the description of its image processor.

    Raises:
        Refused: the file is missing.
    """
    if isinstance(config.get("vision_config"), dict) and not layout.has_image_processor(names):
        raise Refused(
            f"{path}: config.json describes a vision model, but there is neither "
            "preprocessor_config.json nor processor_config.json",
            "copy the processor's files of the original model into this folder",
        )


def list_folder(path: Path) -> list[str]:
    """Return the names in a folder, sorted.

    Raises:
        Refused: the path is no readable folder.
    """
    try:
        return sorted(os.listdir(path))
    except NotADirectoryError as error:
        raise Refused(f"{path}: is a file", "give the folder that holds config.json") from error
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}", hint_to_read(path)) from error


def _remote_code_file(path: Path, config: dict[str, Any]) -> Path | None:
    if config.get("auto_map"):
        return path / layout.CONFIG_FILE
    tokenizer_config = path / layout.TOKENIZER_CONFIG_FILE
    if os.path.exists(tokenizer_config) and read_json(tokenizer_config).get("auto_map"):
        return tokenizer_config
    return None


def _weights(
    path: Path,
    names: Sequence[str],
    config: dict[str, Any],
    allow_pickle: bool,
    remote: RemoteWeights | None,
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the weight files, and the number of elements by dtype."""
    candidates, index_name = layout.safetensors_files(names)
    if index_name in names:
        index = _read_index(path / index_name)
        files = _indexed_files(path / index_name, index, candidates)
        tensors = _all_tensors(path, files, remote)
        _require_indexed_tensors(path / index_name, index, tensors)
    else:
        files = candidates
        tensors = _all_tensors(path, files, remote)
    _require_once(path, tensors)
    if files:
        every = [tensor for file in files for tensor in tensors[file]]
        text = list(_parts(config))[-1]
        facts = TensorFacts.of(every)
        check_against_tensors(path / layout.CONFIG_FILE, config, text, facts)
        return files, elements_by_dtype(every)
    return _pickled_weights(path, names, config, allow_pickle, remote)


def _all_tensors(
    path: Path, files: Iterable[str], remote: RemoteWeights | None
) -> dict[str, tuple[TensorEntry, ...]]:
    tensors: dict[str, tuple[TensorEntry, ...]] = {}
    num_tensors = 0
    for name in files:
        beginning = None
        if remote is not None and name in remote.sizes:
            beginning = Beginning(remote.folder / name, remote.sizes[name])
        tensors[name] = read_tensors(path / name, beginning)
        num_tensors += len(tensors[name])
        if num_tensors > MAX_TENSORS:
            raise Refused(f"{path}: has more than {MAX_TENSORS:,} tensors")
    return tensors


def _pickled_weights(
    path: Path,
    names: Sequence[str],
    config: dict[str, Any],
    allow_pickle: bool,
    remote: RemoteWeights | None,
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return pickled weight files, and the number of elements, estimated from file sizes.

    Reading a pickle would run code.
    """
    files = layout.pickle_files(names)
    if not files:
        check_format(f"{path}:", names)
        raise Refused(
            f"{path}: has no weights (*.safetensors)",
            "the download or copy may be incomplete; fetch the checkpoint again",
        )
    if not allow_pickle:
        raise Refused(
            f"{path}: has its weights only in pickle files ({_some(files)}), which can run "
            "any code when loaded",
            "use a safetensors version, or set allow_pickle = true under [security]",
        )
    sizes = {} if remote is None else remote.sizes
    try:
        num_bytes = sum(sizes.get(name) or (path / name).stat().st_size for name in files)
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from error
    by_name = {torch_name: dtype for dtype, torch_name in TORCH_DTYPES.items()}
    dtype = by_name.get(_config_dtype(config) or "", "F32")
    return files, {dtype: num_bytes * 8 // DTYPE_BITS[dtype]}


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file, MAX_INDEX_VALUES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Refused(f"{file}: has no 'weight_map'", "download the file again")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise Refused(
            f"{file}: 'weight_map' must map tensors to file names", "download the file again"
        )
    return weight_map


def _indexed_files(
    index_file: Path, index: dict[str, str], candidates: Iterable[str]
) -> tuple[str, ...]:
    files = sorted(set(index.values()))
    missing = sorted(set(files) - set(candidates))
    if missing:
        raise Refused(
            f"{index_file}: {len(missing)} of {len(files)} weight files are missing: "
            f"{_some(missing)}",
            "finish the download or copy, then try again",
        )
    return tuple(files)


def _require_indexed_tensors(
    index_file: Path, index: dict[str, str], tensors: dict[str, tuple[TensorEntry, ...]]
) -> None:
    present = {(file, tensor.name) for file, content in tensors.items() for tensor in content}
    absent = sorted(name for name, file in index.items() if (file, name) not in present)
    if absent:
        raise Refused(
            f"{index_file}: tensor {absent[0]!r} should be in {index[absent[0]]} but is not "
            f"({len(absent)} tensors are missing)",
            _TWO_VERSIONS,
        )
    # The engine would load the tensors too, in place of the right ones.
    stale = sorted(name for file, name in present if index.get(name, file) != file)
    if stale:
        raise Refused(
            f"{index_file}: tensor {stale[0]!r} should be in {index[stale[0]]} alone, but another "
            f"file has the tensor too ({len(stale)} such tensors)",
            _TWO_VERSIONS,
        )


def _require_once(path: Path, tensors: dict[str, tuple[TensorEntry, ...]]) -> None:
    """Check that no tensor is in two files, of which the engine would take either."""
    seen: dict[str, str] = {}
    for file, content in tensors.items():
        for tensor in content:
            other = seen.setdefault(tensor.name, file)
            if other != file:
                raise Refused(
                    f"{path}: tensor {tensor.name!r} is in {other} and in {file}", _TWO_VERSIONS
                )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NUM_NAMES_SHOWN
    return ", ".join(names[:_NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _parts(config: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield the configuration, then the text model's configuration of a multimodal model."""
    yield config
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(part := config.get(key), dict):
            yield part


def _config_dtype(config: dict[str, Any]) -> str | None:
    for part in _parts(config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(value := part.get(key), str) and value != "auto":
                return value.removeprefix("torch.")
    return None


def _commonest_dtype(counts: dict[str, int]) -> str:
    commonest = max(counts, key=lambda dtype: counts[dtype])
    return TORCH_DTYPES.get(commonest, commonest.lower())


def _max_length(config: dict[str, Any]) -> int | None:
    for part in _parts(config):
        for key in _MAX_LENGTH_KEYS:
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _quantization(config: dict[str, Any]) -> str | None:
    for part in _parts(config):
        if isinstance(settings := part.get("quantization_config"), dict):
            return str(settings.get("quant_method", "unknown"))
    return None
