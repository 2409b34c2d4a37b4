"""The Hugging Face hub: listing a repository, opening a file, and readable errors.

``huggingface_hub`` is imported at the first download, not with this module, to save memory in a
daemon that never downloads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpupoold.errors import Failed, GpupoolError, Refused, UsageError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils._xet import XetFileData

DEFAULT_ENDPOINT = "https://huggingface.co"
LISTING_TIMEOUT_S = 20.0
READ_TIMEOUT_S = 20.0
_TRUE = frozenset({"1", "on", "yes", "true"})
_TOKEN_HINT = (
    "set HF_TOKEN of an account with access in the daemon's environment (under systemd in "
    "/etc/gpupool/environment) and restart the daemon"
)
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class Interrupted(Exception):
    """A failure of the connection or the hub that a retry may overcome."""


class RangeRefused(Exception):
    """The hub refuses to continue at the requested offset: start again from 0."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; ``digest`` is the SHA-256 (LFS) or the git blob SHA-1."""

    path: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file as the hub's answer to ``HEAD`` states it; each fact may be missing."""

    num_bytes: int | None
    xet: XetFileData | None


@dataclass(frozen=True)
class Hub:
    """A repository on the hub ``$HF_ENDPOINT``, for the user of ``$HF_TOKEN``.

    ``model_dirs`` only appear in hints. Thread-safe.
    """

    repo_id: str
    model_dirs: tuple[Path, ...] = ()
    endpoint: str = field(
        default_factory=lambda: (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    )

    @property
    def scheme(self) -> str:
        return urlsplit(self.endpoint).scheme

    @property
    def netloc(self) -> str:
        return urlsplit(self.endpoint).netloc

    def list_files(self, revision: str | None) -> tuple[str, tuple[HubFile, ...]]:
        """Return the commit of the revision (None: the default branch) and all its files.

        A size of -1 means that the hub's listing has no size.

        Raises:
            Refused: there is no such repository or revision, or no access.
            Failed: the hub cannot be reached or gives an invalid answer.
            UsageError: the repository id is malformed.
        """
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
            raise self._offline()
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi(endpoint=self.endpoint, library_name="gpupool")
        with self._plain_errors(revision):
            try:
                info = api.model_info(
                    self.repo_id, revision=revision, files_metadata=True, timeout=LISTING_TIMEOUT_S
                )
                siblings = info.siblings or []
                files = tuple(
                    HubFile(s.rfilename, s.lfs.size, s.lfs.sha256)
                    if s.lfs is not None
                    else HubFile(
                        s.rfilename, -1 if s.size is None else int(s.size), str(s.blob_id or "")
                    )
                    for s in siblings
                )
            except (HfHubHTTPError, HFValidationError):
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._not_a_hub(error) from error
        if not info.sha:
            raise self._not_a_hub("no commit in the answer")
        return info.sha, files

    def file_facts(self, commit: str, path: str) -> FileFacts:
        """Ask for the size and the Xet address of a file.

        Raises:
            Interrupted: try again.
            Refused: no access.
            Failed: the hub refuses permanently.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.repo_id, path, revision=commit, endpoint=self.endpoint)
        with self._plain_errors(commit), self._transient_errors(commit):
            stated = get_hf_file_metadata(
                url, timeout=READ_TIMEOUT_S, library_name="gpupool", endpoint=self.endpoint
            )
        return FileFacts(stated.size, stated.xet_file_data)

    @contextmanager
    def open_file(
        self, commit: str, path: str, offset: int, num_bytes: int | None = None
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Open a file from ``offset`` on, or from 0 if the hub ignores the offset.

        The hub sends ``num_bytes`` bytes, or more if the hub ignores the limit.

        Yields the position of the first byte, and an iterator of the bytes.

        Raises:
            Interrupted: try again.
            RangeRefused: try again with offset 0.
            Refused: no access.
            Failed: the hub refuses permanently.
        """
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, not in __all__
            build_hf_headers,
            hf_raise_for_status,
        )

        url = hf_hub_url(self.repo_id, path, revision=commit, endpoint=self.endpoint)
        headers = build_hf_headers(library_name="gpupool")
        # Offsets count bytes of the file, so the transfer must not be compressed.
        headers["Accept-Encoding"] = "identity"
        if offset or num_bytes:
            last = offset + num_bytes - 1 if num_bytes else ""
            headers["Range"] = f"bytes={offset}-{last}"
        with (
            self._plain_errors(commit),
            self._transient_errors(commit),
            get_session().stream("GET", url, headers=headers, timeout=READ_TIMEOUT_S) as response,
        ):
            if response.status_code == 416:
                raise RangeRefused
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            content_range = response.headers.get("Content-Range", "")  # such as bytes 5-9/10
            begin = content_range.removeprefix("bytes ").partition("-")[0]
            if response.status_code == 206 and begin != str(offset):
                raise RangeRefused
            start = offset if response.status_code == 206 else 0
            # In pieces as received: a larger piece would be lost with the connection.
            yield start, response.iter_bytes()

    @contextmanager
    def _transient_errors(self, commit: str) -> Iterator[None]:
        """Raise ``Interrupted`` for broken connections and temporary failures of the hub."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except HfHubHTTPError as error:
            if error.response.status_code not in _TRANSIENT_STATUS:
                raise
            raise Interrupted(self._http_error(error, commit).message) from error
        except Exception as error:
            if not _is_client_error(error):
                raise
            raise Interrupted(self._unreachable(error).message) from error

    @contextmanager
    def _plain_errors(self, revision: str | None) -> Iterator[None]:
        """Convert errors of the hub library to gpupool's errors with readable messages."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        try:
            yield
        except HFValidationError as error:
            raise UsageError(f"malformed Hugging Face id {self.repo_id!r}: {error}") from error
        except OfflineModeIsEnabled as error:
            raise self._offline() from error
        except HfHubHTTPError as error:
            raise self._http_error(error, revision) from error
        except Exception as error:
            if not _is_client_error(error):
                raise
            raise self._unreachable(error) from error

    def _http_error(self, error: HfHubHTTPError, revision: str | None) -> GpupoolError:
        from huggingface_hub.errors import (
            DisabledRepoError,
            GatedRepoError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        status = error.response.status_code
        where = f"{self.repo_id} at {self.endpoint}"
        match error:
            case GatedRepoError():
                return Refused(
                    f"access to {where} is restricted by its owner",
                    f"ask for access at {self.endpoint}/{self.repo_id}, then {_TOKEN_HINT}",
                )
            case RepositoryNotFoundError():
                return Refused(
                    f"there is no repository {where}, or it is private",
                    f"check the name; for a private repository {_TOKEN_HINT}",
                )
            case RevisionNotFoundError():
                return Refused(
                    f"{where} has no revision {revision or 'main'!r}",
                    "give a branch, tag or commit of the repository with --revision",
                )
            case DisabledRepoError():
                return Refused(f"{where} has been disabled by the hub")
        if status in (401, 403):
            return Refused(
                f"the hub does not let this daemon read {where} (HTTP {status})", _TOKEN_HINT
            )
        return Failed(f"the hub answered HTTP {status} for {where}", self._other_ways())

    def _unreachable(self, error: Exception) -> Failed:
        detail = str(error) or type(error).__name__
        return Failed(
            f"could not reach the Hugging Face hub at {self.endpoint}: {detail}", self._other_ways()
        )

    def _offline(self) -> Refused:
        return Refused(
            f"{self.repo_id} is not on this machine and HF_HUB_OFFLINE forbids downloads",
            self._other_ways(),
        )

    def _not_a_hub(self, problem: object) -> Failed:
        return Failed(
            f"{self.endpoint} does not answer like a Hugging Face hub: {problem}",
            "check HF_ENDPOINT and any proxy in between",
        )

    def _other_ways(self) -> str:
        if not self.model_dirs:
            return "give --source PATH"
        folders = ", ".join(map(str, self.model_dirs))
        return f"give --source PATH or put the checkpoint in one of {folders}"


def _is_client_error(error: Exception) -> bool:
    """Return whether the error comes from the hub library's HTTP client: httpx or httpx2."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2")
