"""Known differences between gpupool and ``vllm serve``: reasons by patterns of tests, by judge."""

from __future__ import annotations

from benchmarks.judges.verdicts import Known

_FIELDS = (
    "vLLM's answers lack required fields, or have null in place of a value; gpupool adds the "
    "fields (`gpupoold/frontend/answer_fields.py`)"
)

KNOWN: Known = {
    "llm-comply": {
        "anthropic/anth-(basic-response|multi-turn|system-prompt|tool-calling)": _FIELDS,
        "open-responses/(assistant-phase|basic-response|multi-turn|system-prompt)": _FIELDS,
        "open-responses/(tool-calling|streaming-response|streaming-usage)": _FIELDS,
        "open-responses/response-output-phase-schema": _FIELDS,
    }
}
