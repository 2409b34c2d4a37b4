"""Which of vLLM's own API tests are run, and why others are not."""

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

_ADAPTER = "needs a published adapter"
_EMBEDS = "sends embeddings of a published model's prompts (`--enable-prompt-embeds`)"
_IMAGE = "needs a vision model"
_NO_SERVER = "calls vLLM's classes in the process of the test, without a server"
_PUBLISHED = "compares with numbers or texts of a published model"
LEFT_OUT: Mapping[str, str] = {
    "entrypoints/pooling/embed/test_cohere_*.py, entrypoints/cohere": "is about `/v2/embed` and "
    "`/v2/chat`, which gpupool does not offer",
    "entrypoints/scale_out, entrypoints/generate, entrypoints/serve/dev, sagemaker, lora": "is "
    "about paths that gpupool does not offer, or has in its own form",
    "entrypoints/serve/instrumentator/test_*metrics.py, test_uds.py": "is about vLLM's own "
    "metrics and sockets",
    "entrypoints/serve/middleware, entrypoints/launchers, entrypoints/cli": "is about vLLM's own "
    "command line",
    "entrypoints/openai/chat_completion/test_chat.py": _ADAPTER,
    "entrypoints/openai/models/test_models.py": _ADAPTER,
    "entrypoints/openai/test_return_tokens_as_ids.py": _ADAPTER,
    "entrypoints/openai/completion/test_lora_resolvers.py": _ADAPTER,
    "entrypoints/openai/*/test_*_with_prompt_embeds.py": _EMBEDS,
    "entrypoints/openai/chat_completion/test_extra_content_fields.py": _IMAGE,
    "entrypoints/openai/test_openai_schema.py": "needs a vision model; `make fuzz` sends requests "
    "made from the same description",
    "entrypoints/pooling/**/test_*_vision.py": _IMAGE,
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py": "needs a model "
    "that thinks, and watermarks, which gpupool does not offer",
    "entrypoints/openai/chat_completion/test_thinking_token_budget.py": "needs a model that thinks",
    "entrypoints/openai/chat_completion/test_root_path.py": "needs a server behind a path, which "
    "gpupool does not offer",
    "entrypoints/openai/test_chunked_prompt.py": "is about the engine, and needs a long context",
    "entrypoints/openai/completion/test_prompt_validation.py": "is about vLLM's own command line",
    "entrypoints/openai/completion/test_t*.py": "needs a format of weights, or no tokenizer",
    "entrypoints/openai/responses/test_harmony.py, test_mcp_tools.py, "
    "test_parsable_context.py": "needs gpt-oss or Qwen3-8B, and a server of tools",
    "entrypoints/openai/**/test_serving_*.py, test_*_error*.py, test_protocol.py, "
    "test_*_utils.py, test_*_unit.py, test_*_validation.py": _NO_SERVER,
    "entrypoints/pooling/**/test_offline.py, test_*_unit.py, test_protocol.py": _NO_SERVER,
    "entrypoints/pooling/embed/test_online_dimensions.py, test_online_long_text.py": _PUBLISHED,
    "entrypoints/pooling/reward, **/test_*_mteb.py": _PUBLISHED,
    "entrypoints/pooling/scoring/test_late_interaction_*.py": _PUBLISHED,
    "entrypoints/openai/correctness": _PUBLISHED,
    "tool_use with other models than Hermes": "needs these models and their templates",
}
