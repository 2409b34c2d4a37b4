"""Which of vLLM's own API tests are run."""

from __future__ import annotations

from collections.abc import Mapping

# In this order files with equal arguments share a server.
FILES = (
    "entrypoints/anthropic/test_messages.py",
    "tool_use/test_chat_completions.py",
    "tool_use/test_tool_calls.py",
    "tool_use/test_parallel_tool_calls.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_batched_chat_completions.py",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "entrypoints/openai/chat_completion/test_include_reasoning.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/responses/test_basic.py",
    "entrypoints/openai/responses/test_function_call.py",
    "entrypoints/openai/responses/test_stateful.py",
    "entrypoints/openai/responses/test_structured_output.py",
    "entrypoints/openai/responses/test_simple.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/pooling/basic/test_truncation.py",
    "entrypoints/pooling/embed/test_online.py",
    "entrypoints/pooling/token_embed/test_online.py",
    "entrypoints/pooling/scoring/test_bi_encoder_online.py",
    "entrypoints/pooling/scoring/test_cross_encoder_online.py",
    "entrypoints/pooling/classify/test_online.py",
    "entrypoints/pooling/token_classify/test_online.py",
)

TRAINED = "tiny-trained"
"""The checkpoint that stands for models of chats; the others are made by ``tiny_pooling``."""

MODELS: Mapping[str, str] = {
    "NousResearch/Hermes-3-Llama-3.1-8B": TRAINED,
    "HuggingFaceTB/SmolLM2-135M-Instruct": TRAINED,
    "Qwen/Qwen2-1.5B-Instruct": TRAINED,
    "Qwen/Qwen2.5-1.5B-Instruct": TRAINED,
    "Qwen/Qwen3-0.6B": TRAINED,
    "Qwen/Qwen3-1.7B": TRAINED,
    "Qwen/Qwen3-8B": TRAINED,
    "claude-3-7-sonnet-latest": TRAINED,
    "facebook/opt-125m": TRAINED,
    "BAAI/bge-base-en-v1.5": "tiny-bert-embed",
    "BAAI/bge-reranker-base": "tiny-bert-rerank",
    "intfloat/multilingual-e5-small": "tiny-bert-embed",
    "jason9693/Qwen2.5-1.5B-apeach": "tiny-bert-classify",
    "sentence-transformers/all-MiniLM-L12-v2": "tiny-bert-embed",
}
"""The tiny checkpoint that stands for each published model in the tests."""
