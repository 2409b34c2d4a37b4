"""Known differences between gpupool and ``vllm serve``: reasons by patterns of tests, by judge."""

from __future__ import annotations

from benchmarks.judges.verdicts import Known

_FIELDS = (
    "vLLM's answers lack required fields, or have null in place of a value; gpupool adds or "
    "leaves out the fields (`gpupoold/frontend/answer_fields.py`)"
)

KNOWN: Known = {
    "vllm-tests": {
        ".*::test_show_version": "`/version` is gpupool's version",
        ".*::test_server_load.*": "gpupool has no `/load`; its queues are in `/metrics`",
        ".*::test_tokenizer_info_.*": "gpupool has no `/tokenizer_info`",
        ".*/pooling/.*::test_invocations.*": "gpupool has no `/invocations`, a path of one hosting "
        "service that repeats other paths",
        ".*/classify/test_online.py::test_(score|rerank).*": "vLLM has no such path with this "
        "model: status 404 with `detail`; gpupool has it for other models: 404 with OpenAI's error",
    },
    "llm-comply": {
        "openai-chat/chat-(basic-response|multi-turn|system-prompt|tool-calling)": _FIELDS,
        "anthropic/anth-(basic-response|multi-turn|system-prompt|tool-calling)": _FIELDS,
        "open-responses/(assistant-phase|basic-response|multi-turn|system-prompt)": _FIELDS,
        "open-responses/(tool-calling|streaming-response|streaming-usage)": _FIELDS,
        "open-responses/response-output-phase-schema": _FIELDS,
    },
}
