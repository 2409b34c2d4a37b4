"""The choice of a repository's files to download. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.formats import check_format
from gpupoold.errors import Refused

Content = Literal["checkpoint", "adapter"]


def choose_files(
    repo_id: str,
    listed: Sequence[str],
    content: Content,
    *,
    allow_pickle: bool,
    allow_remote_code: bool,
) -> tuple[str, ...]:
    """Return the files of a repository that serving needs; ``listed`` are all its files.

    Raises:
        Refused: the repository has something else, or no permitted weights.
    """
    if content == "adapter":
        if layout.ADAPTER_CONFIG_FILE not in listed:
            raise Refused(
                f"{repo_id} has no {layout.ADAPTER_CONFIG_FILE}, so it is no adapter",
                "add a whole model with `gpupool add-model`",
            )
        wanted = layout.adapter_files_to_download(listed, allow_pickle=allow_pickle)
    else:
        if layout.CONFIG_FILE not in listed:
            check_format(repo_id, listed)
        wanted = layout.files_to_download(
            listed, allow_pickle=allow_pickle, allow_remote_code=allow_remote_code
        )
    if not any(layout.is_weight_file(path) for path in wanted):
        raise _no_weights(repo_id, listed, content)
    return wanted


def _no_weights(repo_id: str, listed: Sequence[str], content: Content) -> Refused:
    if layout.pickle_files(path for path in listed if "/" not in path):
        return Refused(
            f"{repo_id} has its weights only in pickle files, which can run any code when loaded",
            "use a safetensors version, or set allow_pickle = true under [security]",
        )
    if content == "adapter":
        hint = f"use a repository with {layout.ADAPTER_WEIGHTS_FILE}"
    else:
        check_format(repo_id, listed)
        hint = "use a repository with the model in Hugging Face's format"
    return Refused(f"{repo_id} has no weights (*.safetensors)", hint)
