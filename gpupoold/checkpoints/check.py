"""Checks of a checkpoint folder before any load.

The checks read file names, JSON and the headers of the weight files, and find errors that an engine
would report minutes later, and custom code. The worker checks whether the engine knows the
architecture.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.files import (
    DTYPE_BITS,
    MAX_INDEX_VALUES,
    MAX_TENSORS,
    Beginning,
    TensorEntry,
    elements_by_dtype,
    read_json,
    read_json_value,
    read_tensors,
)
from gpupoold.checkpoints.layout import MODULES_FILE, check_format, check_kind
from gpupoold.checkpoints.manifest import RemoteWeights, require_complete
from gpupoold.errors import Refused
from gpupoold.files import hint_to_read

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

_MAX_MODULES = 32
# Ends of the names of model classes without a language model's head.
_POOLING_CLASSES = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForMaskedLM",
    "ForRewardModeling",
)
_AGAIN = "fetch the checkpoint again, with its subfolders"
# Kinds of modules with files that vLLM reads, by the last part of the type's name.
_WITH_FILES = ("Pooling", "Dense")

MAX_POSITIONS = 1 << 24
"""Limit of a context in tokens, for which engines make tables; the longest known has 10 million."""
_MAX_INTEGER = 1 << 62
# Mamba's configurations have an infinite upper limit of time steps.
_MAY_BE_INFINITE = frozenset({"time_step_limit"})
# Transformers writes numbers that JSON does not have as ``{"__float__": "Infinity"}``.
_FLOAT = "__float__"
_POSITIVE = re.compile(r"rope_theta|\w*_theta|rope_local_base_freq|rotary_emb_base|rotary_base")
_NOT_NEGATIVE = re.compile(
    r"\w*_(?:eps|epsilon)|eps|temperature|top_p|min_p|repetition_penalty|lora_alpha"
)
# Minus one stands for "none" in some configurations.
_COUNT = re.compile(r"(?:num|n)_\w+|\w*(?:size|dim|rank|positions?|layers|heads|embd|model)")
_NO_COUNT = re.compile(r"\w*(?:model_type|base_model)\w*")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_PER_AXIS = (
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
)
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
# Configurations whose layers have tensors of their own only in part, or that name other
# repositories with further weights.
_PARTIAL = ("block_configs", "num_hidden_groups", "text_model_id", "audio_model_id")
_INDEX = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_OTHERS = "use the original checkpoint: this file does not belong to these weights"
_USE_ORIGINAL = "use the original checkpoint's file, or correct the number"


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
    Raises Refused: the checkpoint is incomplete, damaged, or needs a permission that is not given;
    the message names the file, the hint a remedy.
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
    commonest = max(counts, key=lambda dtype: counts[dtype])
    return CheckpointInfo(
        path=path,
        architecture=str(config["architectures"][0]),
        model_type=str(config.get("model_type", "")),
        dtype=_config_dtype(config) or TORCH_DTYPES.get(commonest, commonest.lower()),
        weight_bytes=sum(count * DTYPE_BITS[dtype] // 8 for dtype, count in counts.items()),
        num_parameters=sum(counts.values()),
        elements=tuple(sorted(counts.items())),
        max_position_embeddings=_max_length(config),
        quantization=_quantization(config),
        weight_files=files,
    )


def check_config(path: Path, *, allow_remote_code: bool) -> dict[str, Any]:
    """Return the checkpoint's ``config.json`` after checking it.

    Raises Refused: the file is missing or unreadable, names no architecture, or requires its own
    code.
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

    Raises Refused: the file is missing.
    """
    if isinstance(config.get("vision_config"), dict) and not layout.has_image_processor(names):
        raise Refused(
            f"{path}: config.json describes a vision model, but there is neither "
            "preprocessor_config.json nor processor_config.json",
            "copy the processor's files of the original model into this folder",
        )


def list_folder(path: Path) -> list[str]:
    """Return the names in a folder, sorted. Raises Refused: the path is no readable folder."""
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


def check_modules(path: Path) -> None:
    """Check that the modules that ``modules.json`` lists are there; no such file is no error.

    vLLM reads the pooling from a module's folder. Without the folder vLLM would pool in another way
    and return wrong embeddings without an error. Raises Refused: the file is no list of modules, or
    a module's folder has no ``config.json``.
    """
    file = path / MODULES_FILE
    if not os.path.isfile(file):
        return
    for module in _modules(file):
        kind, folder = str(module["type"]).rpartition(".")[2], module["path"]
        if kind not in _WITH_FILES:
            continue
        relative = PurePosixPath(folder)
        if relative.is_absolute() or ".." in relative.parts:
            raise Refused(f"{file}: the folder {folder!r} is outside of the checkpoint", _AGAIN)
        if not os.path.isfile(path / relative / "config.json"):
            raise Refused(f"{path}: the module {folder!r} has no config.json", _AGAIN)


def is_pooling(path: Path, architecture: str) -> bool:
    """Return whether a checkpoint embeds, ranks or classifies, as vLLM decides by default."""
    if os.path.isfile(path / MODULES_FILE):
        return True
    is_language_model = architecture.endswith(("LMHeadModel", "ForCausalLM"))
    return architecture.endswith(_POOLING_CLASSES) and not is_language_model


def _modules(file: Path) -> list[dict[str, Any]]:
    modules = read_json_value(file)
    is_list = isinstance(modules, list) and len(modules) <= _MAX_MODULES
    if not is_list or not all(map(_is_module, modules)):
        raise Refused(f"{file}: is no list of modules with 'type' and 'path'", _AGAIN)
    return list(modules)


def _is_module(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("type", "path")
    )


def check_numbers(file: Path, value: Any) -> None:
    """Check every number of a JSON value.

    Raises Refused: a number is not finite, or out of range; the message names the key.
    """
    for keys, number in numbers(value):
        if problem := _problem(keys, number):
            raise Refused(f"{file}: {dotted(keys)} is {_shown(number)}, {problem}", _USE_ORIGINAL)


def numbers(value: Any) -> Iterator[tuple[tuple[str | int, ...], float]]:
    """Yield each number of a JSON value with its keys and indexes, without recursion."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while waiting:
        keys, one = waiting.pop()
        if isinstance(one, dict) and isinstance(one.get(_FLOAT), str):
            with suppress(ValueError):
                one = float(one[_FLOAT])
        if isinstance(one, dict):
            waiting.extend(((*keys, key), item) for key, item in one.items())
        elif isinstance(one, list):
            waiting.extend(((*keys, index), item) for index, item in enumerate(one))
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield keys, one


def dotted(keys: Sequence[str | int]) -> str:
    """Return the place of a number as users read it: ``rope_scaling.factor``, ``sizes[2]``."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")[:200]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What the tensors of a checkpoint allow: all dimensions, and numbers of layers.

    An engine builds what the numbers say, module by module, before it compares anything with the
    weights. A number that is not finite makes every answer of the model nonsense, without an error.
    """

    num_tensors: int
    dimensions: frozenset[int]
    num_layers: int
    """One more than the highest index in the name of a tensor."""
    num_rows: int
    """The largest first dimension."""

    @classmethod
    def of(cls, tensors: Iterable[TensorEntry]) -> TensorFacts:
        tensors = list(tensors)
        indexes = [
            int(match[1]) for tensor in tensors if (match := _INDEX.search(tensor.name[:512]))
        ]
        return cls(
            len(tensors),
            frozenset(size for tensor in tensors for size in tensor.shape),
            max(indexes, default=-1) + 1,
            max((tensor.shape[0] for tensor in tensors if tensor.shape), default=0),
        )


def check_against_tensors(
    file: Path, config: Mapping[str, Any], text: Mapping[str, Any], facts: TensorFacts
) -> None:
    """Hold the numbers of a configuration against the checkpoint's tensors.

    ``text`` is the configuration of the text model, which may be ``config`` itself. Raises Refused:
    the configuration describes another model than the weights.
    """
    largest = max(facts.dimensions, default=0)
    for keys, number in numbers(config):
        key = str(keys[-1]) if keys else ""
        most = facts.num_tensors if key in _LAYERS else max(largest, facts.num_tensors)
        if key in (*_LAYERS, *_PER_AXIS) and number > most:
            raise _other(file, keys, number, f"{facts.num_tensors:,} tensors, at most {largest:,}")
    if any(key in config for key in _PARTIAL):
        return
    layers, hidden = _whole(text, _LAYERS), _whole(text, _HIDDEN)
    if layers and facts.num_layers and layers[1] > facts.num_layers:
        raise _other(file, layers[:1], layers[1], f"tensors of {facts.num_layers:,} layers")
    if hidden and hidden[1] not in facts.dimensions:
        raise _other(file, hidden[:1], hidden[1], "no tensor of that width")
    vocabulary = _whole(text, ("vocab_size",))
    if vocabulary and vocabulary[1] > facts.num_rows:
        raise _other(file, vocabulary[:1], vocabulary[1], f"at most {facts.num_rows:,} rows")


def _problem(keys: Sequence[str | int], number: float) -> str:
    names = [key for key in keys if isinstance(key, str)]
    key = names[-1] if names else ""
    if isinstance(number, float) and not math.isfinite(number):
        is_allowed = number > 0 and key in _MAY_BE_INFINITE
        return "" if is_allowed else "which is not a finite number"
    if abs(number) > _MAX_INTEGER and isinstance(number, int):
        return "which is beyond all sizes of a model"
    if _POSITIVE.fullmatch(key) and number <= 0:
        return "which must be above 0"
    if _NOT_NEGATIVE.fullmatch(key) and number < 0:
        return "which must not be negative"
    if _COUNT.fullmatch(key) and not _NO_COUNT.fullmatch(key) and number < -1:
        return "which must not be negative"
    if key in _POSITIONS and number > MAX_POSITIONS:
        return f"more than the {MAX_POSITIONS:,} tokens of the longest context"
    return ""


def _whole(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, int] | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return name, value
    return None


def _shown(number: float) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _other(file: Path, keys: Sequence[str | int], number: float, weights: str) -> Refused:
    where = dotted(keys)
    return Refused(f"{file}: {where} is {_shown(number)}, but the weights have {weights}", _OTHERS)
