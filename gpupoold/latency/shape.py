"""The facts that determine latency: a model's dimensions, and GPUs of ``hardware.toml``.

No number of a GPU is in code. Errors in the inputs are ``ValueError``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

# Other families' names for the common fields of configurations.
_NAMES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("ffn_dim", "n_inner"),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "vocab_size": (),
}
_DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
# Types whose FFN has two matrices; other FFNs have a gate, an up and a down projection.
_UNGATED_TYPES = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "phi", "starcoder2"}
)

MAX_GROUP_GPUS = 8
_GROUP_NAME = re.compile(r"(\d+) x (.+)")
# vLLM pads the vocabulary to a multiple of this number.
_VOCAB_MULTIPLE = 64

NUMBERS = (
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "bf16_flops",
    "pcie_bandwidth_bytes_per_s",
)


class LatencyError(ValueError):
    """Base of the package's errors; the message names the error, the place and a remedy."""


class ShapeError(LatencyError):
    """A checkpoint's configuration lacks a field or contradicts itself."""


class FitError(LatencyError):
    """The points do not determine the constants: too few, or all alike."""


class DataError(LatencyError):
    """Packaged or stored data lack an entry or a part."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a decoder-only transformer.

    ``intermediate_size`` is the width of the feed-forward network that a token passes: for a
    mixture of experts, the sum over the chosen experts. ``num_parameters`` counts all experts.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ShapeError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )

    @property
    def weight_bytes(self) -> int:
        """Device bytes of the weights, all devices of a tensor-parallel group together."""
        return self.num_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_dtype_bytes

    def kv_bytes_on(self, num_gpus: int) -> int:
        """Return the bytes of one token's KV on all GPUs of a group: few KV heads are copied."""
        heads = held_kv_heads(self.num_kv_heads, num_gpus)
        return self.kv_bytes_per_token // self.num_kv_heads * heads

    def why_undivided(self, num_gpus: int) -> str:
        """Return why the GPUs of a group cannot share the model equally; empty if they can."""
        return why_undivided(
            num_gpus,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            width=self.intermediate_size,
        )

    @property
    def matmul_term(self) -> int:
        """``4h^2 + 2hm``: a layer's projections in Aegaeon's equations 5 and 6."""
        return 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size


def from_hf_config(
    config: Mapping[str, Any], num_parameters: int | None = None, dtype: str | None = None
) -> ModelShape:
    """Return the shape in a checkpoint's ``config.json``.

    ``config`` is the file as a dictionary; of a multimodal model, its ``text_config`` counts.
    ``num_parameters`` may come from the checkpoint's index; otherwise parameters are counted from
    the dimensions, which is exact for the Llama family (Llama, Yi, InternLM2, Mixtral) and misses
    at most the biases of other families. ``dtype`` of the weights and the KV defaults to the
    configuration's, else 16 bits.

    Raises ShapeError: the message names a missing or invalid key, an unknown dtype, or an
    unsupported kind of attention.
    """
    text = config.get("text_config", config)
    if text.get("kv_lora_rank"):
        raise ShapeError(
            "config.json: kv_lora_rank means compressed KV, which ModelShape does not describe"
        )
    hidden = _read(text, "hidden_size")
    heads = _read(text, "num_attention_heads")
    if "head_dim" not in text and hidden % heads:
        raise ShapeError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is "
            "no head_dim"
        )
    dtype_bytes = _dtype_bytes(text, dtype)
    return ModelShape(
        num_layers=_read(text, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_ffn_width(text) * _experts(text)[1],
        num_heads=heads,
        num_kv_heads=_read(text, "num_key_value_heads", default=heads),
        head_dim=_read(text, "head_dim", default=hidden // heads),
        num_parameters=_count_parameters(text) if num_parameters is None else num_parameters,
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=dtype_bytes,
    )


@cache
def builtin_shapes() -> dict[str, ModelShape]:
    """Return the shapes of ``shapes.toml`` by model name."""
    entries = tomllib.loads(
        resources.files("gpupoold.latency").joinpath("shapes.toml").read_text("utf-8")
    )
    return {
        name: ModelShape(**{key: value for key, value in entry.items() if key != "source"})
        for name, entry in entries.items()
    }


def builtin_shape(name: str) -> ModelShape:
    """Return the shape of a packaged model, for example ``Llama-3.1-8B``.

    Raises DataError: the name is unknown; the message lists the known names.
    """
    shapes = builtin_shapes()
    if name not in shapes:
        raise DataError(f"no built-in shape {name!r}: there are {', '.join(sorted(shapes))}")
    return shapes[name]


def _read(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    names = (key, *_NAMES.get(key, ()))
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ShapeError(f"config.json: {name} must be a positive integer, got {value!r}")
        return value
    if default is None:
        raise ShapeError(f"config.json: missing key {' or '.join(names)}")
    return default


def _dtype_bytes(config: Mapping[str, Any], dtype: str | None) -> int:
    name = str(dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    name = name.removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        raise ShapeError(f"unknown dtype {name!r}: use {', '.join(sorted(_DTYPE_BYTES))}")
    return _DTYPE_BYTES[name]


def _experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of experts in a layer, and of experts per token."""
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key):
            return _read(config, key), _read(config, "num_experts_per_tok")
    return 1, 1


def _ffn_width(config: Mapping[str, Any]) -> int:
    if config.get("moe_intermediate_size"):
        return _read(config, "moe_intermediate_size")
    # The first Qwen's files state the width of gate and up projection together.
    halves = 2 if config.get("model_type") == "qwen" else 1
    gpt_default = 4 * _read(config, "hidden_size") if "n_embd" in config else None
    return _read(config, "intermediate_size", gpt_default) // halves


def _count_parameters(config: Mapping[str, Any]) -> int:
    hidden = _read(config, "hidden_size")
    heads = _read(config, "num_attention_heads")
    kv_heads = _read(config, "num_key_value_heads", default=heads)
    head_dim = _read(config, "head_dim", default=hidden // heads)
    num_experts, _ = _experts(config)
    matrices = 2 if config.get("model_type") in _UNGATED_TYPES else 3
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    router = hidden * num_experts if num_experts > 1 else 0
    ffn = num_experts * matrices * hidden * _ffn_width(config) + router
    layers = _read(config, "num_hidden_layers") * (attention + ffn + 2 * hidden)
    embeddings = 1 if config.get("tie_word_embeddings") else 2
    return layers + hidden + embeddings * _read(config, "vocab_size") * hidden


def why_undivided(
    degree: int,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    width: int | None = None,
    vocab_size: int | None = None,
) -> str:
    """Return why ``degree`` GPUs cannot share a model equally; empty if they can.

    ``width`` is that of the feed-forward network, or of an expert. None for what is unknown.

    The rules are those of vLLM's tensor parallelism: each GPU computes an equal part of the
    attention heads, of the feed-forward network and of the vocabulary. KV heads are copied if there
    are fewer heads than GPUs.
    """
    if num_heads is not None and num_heads % degree:
        return f"{num_heads} attention heads are not divisible by {degree}"
    if num_kv_heads is not None and num_kv_heads % degree and degree % num_kv_heads:
        return f"{num_kv_heads} KV heads neither divide {degree} nor are divisible by {degree}"
    if width is not None and width % degree:
        return f"the feed-forward width of {width} is not divisible by {degree}"
    if vocab_size is not None:
        padded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        if padded % degree:
            return f"the padded vocabulary of {padded} is not divisible by {degree}"
    return ""


def group_name(num_gpus: int, gpu: str) -> str:
    """Return the name of a kind of device: the GPU's, behind the number of GPUs of a group."""
    return f"{num_gpus} x {gpu}" if num_gpus > 1 else gpu


def parse_group_name(name: str) -> tuple[int, str]:
    """Return the number of GPUs and the GPU's name of a kind of device."""
    found = _GROUP_NAME.fullmatch(name)
    return (int(found[1]), found[2]) if found else (1, name)


def held_kv_heads(num_kv_heads: int, degree: int) -> int:
    """Return the KV heads on all GPUs together: fewer heads than GPUs are copied."""
    return max(num_kv_heads, degree)


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A kind of GPU.

    ``pcie_bandwidth_bytes_per_s`` is the practical rate of host-to-device copies; if
    ``is_pcie_measured`` is false, the rate of another GPU with the same link. ``bf16_flops`` is
    dense. ``sources`` has a sentence for each field of ``NUMBERS`` and for ``host_link``.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    bf16_flops: float
    pcie_bandwidth_bytes_per_s: float
    is_pcie_measured: bool
    host_link: str
    aliases: tuple[str, ...]
    sources: Mapping[str, str]


@cache
def hardware_profiles() -> dict[str, HardwareProfile]:
    """Return all packaged profiles by name.

    Raises DataError: the message names a GPU and a number without source.
    """
    text = resources.files("gpupoold.latency").joinpath("hardware.toml").read_text("utf-8")
    return {name: profile_from(name, entry) for name, entry in tomllib.loads(text).items()}


def hardware(name: str) -> HardwareProfile:
    """Return the profile of a GPU by its short name, or by the driver's name.

    Raises DataError: the name is unknown; the message lists the known names.
    """
    profiles = hardware_profiles()
    wanted = name.casefold()
    for profile in profiles.values():
        if wanted in {known.casefold() for known in (profile.name, *profile.aliases)}:
            return profile
    raise DataError(f"no hardware profile {name!r}: there are {', '.join(profiles)}")


def profile_from(name: str, entry: Mapping[str, Any]) -> HardwareProfile:
    """Check one entry of the file and return its profile.

    Raises DataError: a field or a number's source is missing, or a number is not positive.
    """
    sources = entry.get("sources", {})
    for key in (*NUMBERS, "host_link", "is_pcie_measured"):
        if key not in entry:
            raise DataError(f"hardware.toml: [{name}] has no {key}")
        if key != "is_pcie_measured" and not sources.get(key):
            raise DataError(f"hardware.toml: [{name}.sources] has no source for {key}")
    for key in NUMBERS:
        if entry[key] <= 0:
            raise DataError(f"hardware.toml: [{name}] {key} must be positive, got {entry[key]}")
    return HardwareProfile(
        name=name,
        memory_bytes=int(entry["memory_bytes"]),
        memory_bandwidth_bytes_per_s=float(entry["memory_bandwidth_bytes_per_s"]),
        bf16_flops=float(entry["bf16_flops"]),
        pcie_bandwidth_bytes_per_s=float(entry["pcie_bandwidth_bytes_per_s"]),
        is_pcie_measured=bool(entry["is_pcie_measured"]),
        host_link=str(entry["host_link"]),
        aliases=tuple(entry.get("aliases", ())),
        sources=MappingProxyType(dict(sources)),
    )
