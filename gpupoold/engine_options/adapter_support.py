"""The options with which an engine takes LoRA adapters. Pure.

An engine takes adapters if its options have ``max_lora_rank`` or ``max_loras``.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpupoold.errors import Refused

# vLLM's LoRAConfig accepts these ranks only.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_MAX_LORAS = 4
DEFAULT_MAX_CPU_LORAS = 32
_DEFAULT_RANK = 16
_RANK, _PER_STEP, _IN_TOTAL = "max_lora_rank", "max_loras", "max_cpu_loras"
_ENABLE = "enable_lora"


def takes_adapters(options: Mapping[str, str]) -> bool:
    """Return whether an engine with these options takes adapters."""
    return _RANK in options or _PER_STEP in options


def with_adapter_support(options: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's options with the defaults and the switch for adapters, if it takes any."""
    if not takes_adapters(options):
        return dict(options)
    per_step = _number(options, _PER_STEP, DEFAULT_MAX_LORAS)
    defaults = {
        _RANK: str(_DEFAULT_RANK),
        _PER_STEP: str(per_step),
        _IN_TOTAL: str(max(per_step, DEFAULT_MAX_CPU_LORAS)),
    }
    return {**defaults, **options, _ENABLE: "true"}


def without_adapter_support(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that have an effect on the weights of an engine without adapters."""
    ours = (_ENABLE, _RANK, _PER_STEP, _IN_TOTAL)
    return {name: value for name, value in options.items() if name not in ours}


def options_for(options: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return the options to change so that an engine takes adapters of ``rank``; maybe none."""
    if takes_adapters(options) and rank <= _number(options, _RANK, _DEFAULT_RANK):
        return {}
    least = _DEFAULT_RANK if not takes_adapters(options) else 1
    needed = min(one for one in RANKS if one >= max(rank, least))
    changes = {_RANK: str(needed)}
    if _PER_STEP not in options:
        changes[_PER_STEP] = str(DEFAULT_MAX_LORAS)
    return changes


def num_slots(options: Mapping[str, str]) -> int:
    """Return the number of adapters in one step, 0 for an engine without adapters."""
    return _number(options, _PER_STEP, DEFAULT_MAX_LORAS) if takes_adapters(options) else 0


def max_rank(options: Mapping[str, str]) -> int:
    """Return the largest rank of an engine's adapters."""
    return _number(options, _RANK, _DEFAULT_RANK)


def check_num_adapters(model: str, options: Mapping[str, str], num_adapters: int) -> None:
    """Check that a model may have ``num_adapters``.

    Raises:
        Refused: there are too many for the engine.
    """
    limit = _number(with_adapter_support(options), _IN_TOTAL, DEFAULT_MAX_CPU_LORAS)
    if num_adapters > limit:
        raise Refused(
            f"{model} would have {num_adapters} adapters, and its engine keeps at most {limit}",
            f"remove an adapter, or `gpupool set {model} --engine max-cpu-loras={num_adapters}`",
        )


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    """Return an option's number; the default if the text is wrong, which vLLM's parser reports."""
    text = options.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default
