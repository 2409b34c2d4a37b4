"""Short names of well-known open models; other models are given with ``--source``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

BUILTIN_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "qwen-7b": "Qwen/Qwen2.5-7B-Instruct",
        "qwen1.5-7b": "Qwen/Qwen1.5-7B-Chat",
        "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
        "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
        "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
        "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
        "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
        "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
        "qwen2.5-coder-7b": "Qwen/Qwen2.5-Coder-7B-Instruct",
        "qwen3-0.6b": "Qwen/Qwen3-0.6B",
        "qwen3-1.7b": "Qwen/Qwen3-1.7B",
        "qwen3-4b": "Qwen/Qwen3-4B",
        "qwen3-8b": "Qwen/Qwen3-8B",
        "qwen3-14b": "Qwen/Qwen3-14B",
        "qwen2.5-vl-7b": "Qwen/Qwen2.5-VL-7B-Instruct",
        "qwen3-vl-8b": "Qwen/Qwen3-VL-8B-Instruct",
        "qwen3-embedding-0.6b": "Qwen/Qwen3-Embedding-0.6B",
        "bge-m3": "BAAI/bge-m3",
        "bge-reranker-v2-m3": "BAAI/bge-reranker-v2-m3",
        "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
        "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
        "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
        "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
        "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
        "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
        "mistral-nemo-12b": "mistralai/Mistral-Nemo-Instruct-2407",
        "gemma-2-2b": "google/gemma-2-2b-it",
        "gemma-2-9b": "google/gemma-2-9b-it",
        "gemma-3-1b": "google/gemma-3-1b-it",
        "gemma-3-4b": "google/gemma-3-4b-it",
        "gemma-3-12b": "google/gemma-3-12b-it",
        "gpt-oss-20b": "openai/gpt-oss-20b",
        "phi-2": "microsoft/phi-2",
        "phi-4": "microsoft/phi-4",
        "yi-6b": "01-ai/Yi-6B-Chat",
        "yi-9b": "01-ai/Yi-9B",
        "internlm2.5-7b": "internlm/internlm2_5-7b-chat",
        "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    }
)
