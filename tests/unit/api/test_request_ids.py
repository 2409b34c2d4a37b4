"""Ids that clients see, and the requests that they name."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpupoold.api.request_ids import API_PREFIXES, is_request, request_id_of
from gpupoold.frontend.request_context import RequestIds

HTTP_ID = RequestIds().http_id
# Where vLLM makes the id of an answer: of the request's id, or a default of the answer's type.
ANSWER_ID = re.compile(
    r"f\"([a-z]+[-_])\{self\._base_request_id"
    r"|request_id_prefix = \"([a-z]+)\""
    r"|    (?:id|request_id): str = Field\([^\"]*?f\"([a-z]+[-_])\{random_uuid"
)
# Ids of other things than answers, and of APIs that gpupool does not serve.
OTHERS = {"modelperm-", "sess-", "trsc-", "trsl-"}


@pytest.mark.parametrize(
    ("text", "request_id"),
    [("chatcmpl-ab12", "ab12"), ("cmpl-ab12-2", "ab12-2"), ("ab12", "ab12"), ("b1", "b1")],
)
def test_answers_name_their_requests(text: str, request_id: str) -> None:
    assert request_id_of(text) == request_id


def test_every_prefix_of_vllm_is_known() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    [folder] = spec.submodule_search_locations or [""]
    found = {
        match[1] or (match[2] and f"{match[2]}-") or match[3]
        for file in Path(folder, "entrypoints").rglob("*.py")
        for match in ANSWER_ID.finditer(file.read_text())
    }
    assert {"chatcmpl-", "cmpl-", "resp_", "score-", "embd-"} <= found
    assert found - OTHERS <= set(API_PREFIXES)


@pytest.mark.parametrize("prefix", ["", *API_PREFIXES])
def test_a_client_names_all_of_its_request(prefix: str) -> None:
    ids = RequestIds()
    seen, first, second = prefix + ids.http_id, ids.make(), ids.make()
    assert all(is_request(one, seen) for one in (first, second, f"0_{first}", f"3_{second}"))
    assert not is_request(HTTP_ID, seen)


def test_an_operator_names_one_request() -> None:
    assert is_request(f"1_{HTTP_ID}", f"1_{HTTP_ID}")
    assert not is_request(f"2_{HTTP_ID}", f"1_{HTTP_ID}")
    assert not is_request(HTTP_ID, f"{HTTP_ID}-2")
    assert is_request("cmpl-1", "cmpl-1")


@pytest.mark.parametrize("seen", ["", "chatcmpl-", "{id:.8}", "x{id}"])
def test_a_part_of_an_id_names_no_request(seen: str) -> None:
    assert not is_request(HTTP_ID, seen.format(id=HTTP_ID))
