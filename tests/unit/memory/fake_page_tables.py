"""Physical memory and page tables of the fake CUDA driver, strict about misuse."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_ADDRESS = 1 << 44  # far from anything the process maps


def require(condition: bool, call: str, problem: str) -> None:
    """What the real driver would refuse, or do something undefined for, is a bug of ours."""
    if not condition:
        raise AssertionError(f"{call}: {problem}")


@dataclass(slots=True)
class Mapping:
    handle: int
    num_bytes: int
    is_accessible: bool = False


class PageTables:
    """Bytearrays that stand for physical memory, and where they are mapped."""

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.memory: dict[int, bytearray] = {}
        self.mapped: dict[int, Mapping] = {}
        self.reserved: dict[int, int] = {}
        self._next_address = _FIRST_ADDRESS

    def create(self, handle: int, num_bytes: int) -> None:
        require(num_bytes % self.granularity == 0, "create", "size")
        self.memory[handle] = bytearray(b"\xee" * num_bytes)

    def release(self, handle: int) -> None:
        mapped = any(mapping.handle == handle for mapping in self.mapped.values())
        require(not mapped, "release", "memory is still mapped")
        del self.memory[handle]

    def reserve(self, num_bytes: int, alignment: int) -> int:
        start = -(-self._next_address // alignment) * alignment
        self._next_address = start + num_bytes + self.granularity  # a gap: overruns are seen
        self.reserved[start] = num_bytes
        return start

    def free(self, address: int, num_bytes: int) -> None:
        require(self.reserved.get(address) == num_bytes, "free_addresses", "not reserved")
        inside = any(address <= page < address + num_bytes for page in self.mapped)
        require(not inside, "free_addresses", "still mapped")
        del self.reserved[address]

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        reserved = any(
            start <= address and address + num_bytes <= start + length
            for start, length in self.reserved.items()
        )
        require(reserved, "map", "addresses are not reserved")
        require(address % self.granularity == 0, "map", "alignment")
        require(handle in self.memory, "map", "no such memory")
        require(len(self.memory[handle]) == num_bytes, "map", "part of a page")
        require(address not in self.mapped, "map", "mapped already")
        self.mapped[address] = Mapping(handle, num_bytes)

    def allow_access(self, address: int, num_bytes: int) -> None:
        for page in self._pages(address, num_bytes, "allow_access"):
            self.mapped[page].is_accessible = True

    def unmap(self, address: int, num_bytes: int) -> None:
        for page in self._pages(address, num_bytes, "unmap"):
            del self.mapped[page]

    def __contains__(self, address: int) -> bool:
        """Return whether it is a device address."""
        return any(start <= address < start + n for start, n in self.reserved.items())

    def check(self, call: str, address: int, num_bytes: int) -> None:
        """The device may use the whole range."""
        at = address
        while at < address + num_bytes:
            page, offset, memory = self._locate(at)
            require(self.mapped[page].is_accessible, call, f"no access to {at:#x}")
            at += len(memory) - offset

    def read(self, address: int, num_bytes: int) -> bytes:
        self.check("read", address, num_bytes)
        found = bytearray()
        while len(found) < num_bytes:
            _, offset, memory = self._locate(address + len(found))
            found += memory[offset : offset + num_bytes - len(found)]
        return bytes(found)

    def write(self, address: int, data: bytes) -> None:
        self.check("write", address, len(data))
        while data:
            _, offset, memory = self._locate(address)
            length = min(len(data), len(memory) - offset)
            memory[offset : offset + length] = data[:length]
            data, address = data[length:], address + length

    def _pages(self, address: int, num_bytes: int, call: str) -> list[int]:
        """Starts of the mappings that make the range up exactly."""
        pages, at = [], address
        while at < address + num_bytes:
            require(at in self.mapped, call, f"{at:#x} is not mapped")
            pages.append(at)
            at += self.mapped[at].num_bytes
        require(at == address + num_bytes, call, "part of a mapping")
        return pages

    def _locate(self, address: int) -> tuple[int, int, bytearray]:
        for page, mapping in self.mapped.items():
            if page <= address < page + mapping.num_bytes:
                return page, address - page, self.memory[mapping.handle]
        raise AssertionError(f"illegal address {address:#x}")
