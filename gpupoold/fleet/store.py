"""The controller's knowledge after a restart, in a JSON file of the head's state folder."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ValidationError

from gpupoold.api.schemas_access import AddKeyRequest
from gpupoold.errors import Failed
from gpupoold.fleet.nodes import FleetSpec
from gpupoold.system import durable

FILE = "fleet.json"


class StoredNode(BaseModel):
    """A node; ``url`` is the daemon's address for the entrance."""

    url: str
    is_draining: bool = False


class Stored(BaseModel):
    """The whole file.

    ``epoch`` counts the starts of controllers. ``keys`` are API keys by name, ``removed_keys`` the
    ids of keys to be removed from all nodes.
    """

    epoch: int = 0
    secret: str = ""
    nodes: dict[str, StoredNode] = {}
    models: dict[str, FleetSpec] = {}
    keys: dict[str, AddKeyRequest] = {}
    removed_keys: list[str] = []


def load(folder: Path) -> Stored:
    """Return the stored fleet, an empty fleet without a file.

    Raises:
        Failed: the file cannot be read.
    """
    path = folder / FILE
    try:
        return Stored.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Stored()
    except (OSError, ValidationError) as error:
        raise Failed(f"{path} cannot be read: {error}", "restore or remove the file") from error


def save(folder: Path, stored: Stored) -> None:
    """Replace the file atomically; only the owner may read the file.

    Raises:
        Failed: the file cannot be written.
    """
    path = folder / FILE
    try:
        durable.write_private(path, stored.model_dump_json(indent=1))
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error}") from error
