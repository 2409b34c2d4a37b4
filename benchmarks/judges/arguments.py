"""Arguments of ``vllm serve`` as both servers get them. Pure.

Tests of vLLM's release start servers with arguments for a GPU and a published model. Both servers
get the arguments that concern a tiny model on a CPU, and gpupool those as options of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpupoold.engine_options.names import OFFERED

DTYPE = "float32"
DEFAULT_MAX_MODEL_LEN = 2048

# Of the published model or of the test's machine, or without effect on answers. A chat template is
# the checkpoint's own.
_DROPPED = frozenset(
    (
        "chat_template",
        "config_format",
        "cpu_offload_gb",
        "distributed_executor_backend",
        "download_dir",
        "dtype",
        "enable_chunked_prefill",
        "enable_lora",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "hf_overrides",
        "host",
        "ignore_patterns",
        "load_format",
        "lora_modules",
        "max_cpu_loras",
        "max_lora_rank",
        "max_num_batched_tokens",
        "max_num_seqs",
        "no_enable_prefix_caching",
        "port",
        "seed",
        "structured_outputs_config.backend",
        "tensor_parallel_size",
        "tokenizer_mode",
        "tp",
        "trust_remote_code",
    )
)
# gpupool finds the parsers itself. More tokens and details change no test's outcome.
_SHARED: Mapping[str, tuple[str, ...]] = {
    "enable_auto_tool_choice": (),
    "tool_call_parser": ("hermes",),
    "enable_prompt_tokens_details": (),
}
_SHARED_MAX_MODEL_LEN = 8192
_OWN = frozenset({"served_model_name", "max_model_len"})


@dataclass(frozen=True, slots=True)
class ServerArguments:
    """What a test wants of a server, without the model.

    ``options`` has the words of each option by name: none for a flag.
    """

    names: tuple[str, ...] = ()
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text that is equal for arguments of equal effect, apart from names."""
        return f"{self.max_model_len} {sorted(self.options.items())}"

    def shared(self) -> ServerArguments:
        """Return arguments for a generating model that more tests have in common."""
        options = {**_SHARED, **self.options}
        return replace(self, max_model_len=_SHARED_MAX_MODEL_LEN, options=options)

    @property
    def vllm_words(self) -> list[str]:
        """The options as words for ``vllm serve``."""
        return [word for name, words in self.options.items() for word in (_flag(name), *words)]

    @property
    def gpupool_engine(self) -> dict[str, str]:
        """The options that a model of gpupool has; the rest is gpupool's own decision."""
        engine = {}
        for name, words in self.options.items():
            is_negative = name.startswith("no_") and name[3:] in OFFERED
            option = name[3:] if is_negative else name
            if option.partition(".")[0] in OFFERED:
                engine[option] = ",".join(words) if words else str(not is_negative).lower()
        return engine

    @property
    def left_to_gpupool(self) -> list[str]:
        """The options that gpupool decides itself: memory, schedule, processes, HTTP."""
        known = {*self.gpupool_engine, *(f"no_{name}" for name in self.gpupool_engine)}
        return [name for name in self.options if name not in known]


def read_arguments(words: Sequence[str]) -> ServerArguments:
    """Read the arguments of a test's server."""
    options = {name: values for name, values in _options(words) if name not in _DROPPED}
    names = options.get("served_model_name", ())
    [max_model_len] = options.get("max_model_len", (str(DEFAULT_MAX_MODEL_LEN),))
    rest = {name: values for name, values in options.items() if name not in _OWN}
    return ServerArguments(names, int(max_model_len), rest)


def _options(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each option, with underscores, and its words."""
    name, values = "", list[str]()
    for word in words:
        if not word.startswith("-") or _is_number(word):
            values.append(word)
            continue
        if name:
            yield name, tuple(values)
        flag, _, value = word.lstrip("-").partition("=")
        first, dot, keys = flag.partition(".")
        name, values = first.replace("-", "_") + dot + keys, [value] if value else []
    if name:
        yield name, tuple(values)


def _flag(name: str) -> str:
    first, dot, keys = name.partition(".")
    return f"--{first.replace('_', '-')}{dot}{keys}"


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()
