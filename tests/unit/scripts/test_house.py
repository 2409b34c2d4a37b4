"""What the report of the product's width counts."""

from __future__ import annotations

from scripts.house import House, Module, read_checkout, report

RECORD = """
from dataclasses import dataclass
@dataclass(frozen=True)
class {name}:
    a: int
    b: int
    c: int
    d: int
    e: int
"""


def house(**texts: str) -> House:
    names = {name.replace("__", "."): text for name, text in texts.items()}
    return House({name: Module(name, "." not in name, text) for name, text in names.items()})


def test_short_module_beside_its_only_importer_is_found() -> None:
    built = house(
        gpupoold="",
        gpupoold__a="import gpupoold.b\nfrom gpupoold.c import x",
        gpupoold__b="",
        gpupoold__c="x = 1\n" * 110,
        gpupoold__sub__d="from gpupoold import a",
    )
    assert built.single_importer() == {
        "gpupoold.a": "gpupoold.sub.d",
        "gpupoold.b": "gpupoold.a",
        "gpupoold.c": "gpupoold.a",
    }
    assert built.short() == {"gpupoold.b": "gpupoold.a"}


def test_records_that_share_fields_are_a_pair() -> None:
    built = house(
        gpupoold__a=RECORD.format(name="First"),
        gpupoold__b=RECORD.format(name="Second") + "    f: int\n",
        gpupoold__c="class Body(BaseModel):\n    a: int\nclass More(Body):\n    b: int\n",
    )
    assert len(built.records()) == 4
    ((first, second),) = built.record_pairs()
    assert (first.name, second.name) == ("gpupoold.a.First", "gpupoold.b.Second")


def test_constructor_with_many_parameters_is_found() -> None:
    names = ", ".join(f"p{i}: int" for i in range(8))
    text = f"class Box:\n    def __init__(self, {names}) -> None: ...\n"
    assert house(gpupoold__a=text).constructors() == {"gpupoold.a.Box": 8}


def test_report_of_this_checkout_has_a_count_in_each_line() -> None:
    lines = list(report(read_checkout()))
    assert all(line.split()[-1].replace(",", "").isdigit() for line in lines)
