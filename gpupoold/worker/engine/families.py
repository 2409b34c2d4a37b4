"""Families: models that can use one engine in turn, and models that can use one compiled code.

Members of a family are fine-tunes of one model.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import ModelConfig, VllmConfig
from vllm.config.utils import hash_factors, normalize_value
from vllm.tokenizers import registry
from vllm.transformers_utils import config as transformers_config, processor

from gpupoold.memory.device import Device
from gpupoold.wire.messages import ModelToLoad
from gpupoold.worker.weights.loading import Sharing

UNREAD_FIELDS = frozenset(
    (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    )
)
"""Fields of config.json that training programs change, and that no step of text models reads."""

TOKEN_READERS = ("LongcatFlashNgramForCausalLM",)
"""Classes of vLLM's text models that read one of these."""

_IMAGE_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

_READ_ONCE = (
    registry.cached_get_tokenizer,
    processor.cached_get_processor,
    processor.cached_get_image_processor,
    processor.cached_get_video_processor,
    transformers_config.get_pooling_config,
    transformers_config.get_sentence_transformer_tokenizer_config,
    transformers_config.try_get_dense_modules,
    transformers_config.checkpoint_has_lm_head,
)

_stamps: dict[str, list[tuple[str, int, int]]] = {}  # of files, by path of the checkpoint
_layout_digests: dict[str, str] = {}  # by path of the checkpoint
_vllm_hash = VllmConfig.compute_hash


def sharing_of(model: ModelToLoad, config: VllmConfig, device: Device) -> Sharing:
    """Return what two models must have in common, beside the layout, to use one engine in turn.

    To be called before the engine is built, which changes ``config``.
    """
    reasons = {
        "its device has several GPUs": device.num_ranks > 1,
        "it has slots for adapters": config.lora_config is not None,
        "its steps have drafts": config.speculative_config is not None,
        "its checkpoint has code of its own": has_own_code(config.model_config),
    }
    if reason := next((reason for reason, is_given in reasons.items() if is_given), ""):
        return Sharing("", reason)
    options = [model.max_model_len, model.dtype, model.max_images, model.engine]
    encoded = msgspec.json.encode(options, order="sorted").decode()
    return Sharing(f"{family_hash(config)} {encoded}")


def share_compiled_code(config: VllmConfig, layout_digest: str) -> None:
    """Let a model use the compiled code of models of equal configuration and layout.

    vLLM finds compiled code by a hash that contains the path of the checkpoint, and of the
    drafter's, so that each fine-tune would be compiled anew. Weights are inputs of the code. The
    layout's digest replaces the paths: the digest covers shapes, fractions and host tensors of
    modules, of the drafter too, which may be constants of the code. vLLM's classes may come from
    the checkpoint: then the path stays.
    """
    for model in _models_of(config):
        _layout_digests[model.model] = layout_digest
    setattr(VllmConfig, "compute_hash", _family_hash)  # noqa: B010


def _family_hash(config: VllmConfig, *arguments: Any, **options: Any) -> str:
    models = _models_of(config)
    digests = {_layout_digests.get(model.model) for model in models}
    if len(digests) == 1 and (digest := digests.pop()) and not any(map(has_own_code, models)):
        config = _at(config, digest)
    return _vllm_hash(config, *arguments, **options)


def _models_of(config: VllmConfig) -> list[ModelConfig]:
    """Return the configurations of a model and of its drafter's model, if any."""
    drafts = config.speculative_config
    found = [config.model_config, None if drafts is None else drafts.draft_model_config]
    return [model for model in found if model is not None]


def family_hash(config: VllmConfig) -> str:
    """Return a hash of all that two models of one engine have in common, beside the layout.

    vLLM's own hash covers what decides on compiled code. An engine is also built for a way to pool,
    for the tokens around the reasoning and for sizes of images, which vLLM finds in other files
    than config.json. Fields of config.json that no step reads may differ.
    """
    model, quantization = config.model_config, config.quant_config
    files = [*_IMAGE_FILES, *(quantization.get_config_filenames() if quantization else ())]
    found = [Path(model.model, name) for name in files]
    texts = [file.read_bytes() if file.is_file() else b"" for file in found]
    others = normalize_value([model.pooler_config, config.reasoning_config, texts])
    alike = _at(config, "")
    is_text = model.runner_type == "generate" and not model.is_multimodal_model
    if is_text and model.architecture not in TOKEN_READERS:
        for name in ("hf_config", "hf_text_config"):
            fields = json.loads(getattr(model, name).to_json_string())
            read = {key: value for key, value in fields.items() if key not in UNREAD_FIELDS}
            setattr(alike.model_config, name, read)
    return hash_factors({"config": _vllm_hash(alike), "others": others})


def forget_changed_files(path: str) -> None:
    """Drop what vLLM has read of checkpoints if the files of the checkpoint at ``path`` changed.

    vLLM reads tokenizers, processors and the way to pool once per path in a process. A model may be
    removed, trained further, and added again from the same folder.
    """
    files = [(file, file.stat()) for file in sorted(Path(path).rglob("*")) if file.is_file()]
    stamps = [(str(file), stat.st_mtime_ns, stat.st_size) for file, stat in files]
    if _stamps.setdefault(path, stamps) != stamps:
        _stamps[path] = stamps
        for read in _READ_ONCE:
            read.cache_clear()


def has_own_code(model: ModelConfig) -> bool:
    """Return whether vLLM's classes of a model may come from the checkpoint."""
    return bool(model.trust_remote_code) and hasattr(model.hf_config, "auto_map")


def _at(config: VllmConfig, path: str) -> VllmConfig:
    """Return a configuration with another path of the model, and of its drafter."""
    config = copy.copy(config)
    config.model_config = copy.copy(config.model_config)
    config.speculative_config = copy.copy(config.speculative_config)
    if (drafts := config.speculative_config) is not None and drafts.draft_model_config is not None:
        drafts.draft_model_config = drafter = copy.copy(drafts.draft_model_config)
        for name in ("hf_config", "hf_text_config"):  # of EAGLE with the path
            fields = json.loads(getattr(drafter, name).to_json_string())
            setattr(drafter, name, _without_path(fields))
    for model in _models_of(config):
        model.model = path
    return config


def _without_path(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration, and of configurations inside, without the path."""
    return {
        name: _without_path(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name != "_name_or_path"
    }
