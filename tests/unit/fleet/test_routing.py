"""Tests of ``fleet/routing.py``."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gpupoold.domain import Priority
from gpupoold.fleet.cluster import FleetTable, Node
from gpupoold.fleet.routing import RoutedBody, conversation_of, order
from tests.unit.fleet.fleets import model, node


def wanted(**fields: Any) -> RoutedBody:
    return msgspec.json.decode(json.dumps(fields), type=RoutedBody)


def names(*given: Node, conversation: bytes = b"", sent: dict[str, int] | None = None) -> list[str]:
    return [one.name for one in order(FleetTable(1, "", given), "m", conversation, sent or {})]


def test_the_earliest_first() -> None:
    late, soon = model("m", first_token_in_s=2.0), model("m", first_token_in_s=0.1)
    unknown = model("m", first_token_in_s=None)
    assert names(node("a", unknown), node("b", late), node("c", soon)) == ["c", "b", "a"]


def test_only_nodes_that_serve() -> None:
    assert not names(
        node("a", model("m", state="loading")),
        node("b"),
        node("c", model("m"), is_draining=True),
        node("d", model("m"), is_lost=True),
    )
    table = FleetTable(1, "", (node("a", model("m")), node("b", model("m"))))
    assert [one.name for one in order(table, "m", b"", {}, {"a"})] == ["b"]


def test_a_retiring_model_only_without_other_nodes() -> None:
    retiring = node("a", model("m"), retiring=frozenset({"m"}))
    assert names(retiring, node("b", model("m", first_token_in_s=9.0))) == ["b"]
    assert names(retiring, node("b", model("m", state="loading"))) == ["a"]
    assert names(node("a", model("m"), retiring=frozenset({"n"}))) == ["a"]


def test_requests_on_their_way_count() -> None:
    both = node("a", model("m", num_live=3)), node("b", model("m", first_token_in_s=0.12))
    assert names(*both) == ["a", "b"]
    assert names(*both, sent={"a": 2}) == ["b", "a"]


def test_a_conversation_stays_where_it_was_while_that_is_quick_enough() -> None:
    def ask(wait_s: float) -> set[str]:
        given = [node(f"n{n}", model("m", first_token_in_s=0.1)) for n in range(4)]
        found = set()
        for number in range(40):
            conversation = conversation_of("m", wanted(prompt=str(number)))
            first = names(*given, conversation=conversation)[0]
            assert names(*reversed(given), conversation=conversation)[0] == first
            slower = [
                node(one.name, model("m", first_token_in_s=wait_s)) if one.name == first else one
                for one in given
            ]
            if names(*slower, conversation=conversation)[0] == first:
                found.add(first)
        return found

    assert len(ask(0.2)) == 4
    assert not ask(9.0)


def test_low_priority_leaves_the_earliest_nodes_to_others() -> None:
    waits_s = {"a": 0.1, "b": 3.0, "c": 4.0, "d": 9.0}
    given = tuple(node(name, model("m", first_token_in_s=s)) for name, s in waits_s.items())

    def first(priority: Priority, *nodes: Node, conversation: bytes = b"") -> str:
        table = FleetTable(1, "", nodes)
        return order(table, "m", conversation, {}, (), priority)[0].name

    assert first(Priority.HIGH, *given) == first(Priority.NORMAL, *given) == "a"
    assert first(Priority.LOW, *given) == "c", "within half of the target of 10 s"
    assert first(Priority.LOW, given[3]) == "d"
    homes = {first(Priority.LOW, *given, conversation=bytes([n])) for n in range(50)}
    assert homes == {"a", "b", "c"}, "a conversation stays, but not where it would be late"


def test_turns_of_a_conversation_have_one_digest() -> None:
    def of(*words: str, model: str = "m") -> bytes:
        messages = [{"role": "user", "content": one} for one in words]
        return conversation_of(model, wanted(messages=messages))

    assert of("system", "hello") == of("system", "hello", "hi", "more")
    assert len({of("system", "hello"), of("system", "bye"), of("s"), of("s", model="n")}) == 4
    assert conversation_of("m", wanted(messages=5)) == b""


def test_other_names_of_a_model() -> None:
    table = FleetTable(1, "", (node("a", model("m", names=["m", "preset"])),))
    assert table.names() == {"m": "m", "preset": "m"}
