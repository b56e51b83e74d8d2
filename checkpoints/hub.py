"""The Hugging Face Hub: which names are hub ids, and what its errors mean for a user."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


def is_hub_id(name: str) -> bool:
    """Whether `name` can only mean a repository on the hub: `user/name`, and no such path here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).exists()


def download(
    repo: str,
    revision: str | None,  # branch, tag or commit; None is main
    files: list[str],
) -> Path:
    """The folder with those of `files` that the repository has; raises ValueError with a remedy.

    What is in the local cache is found without a network.
    """
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=files))
    except (OSError, HFValidationError) as error:
        raise explain(error, repo, revision) from error


def explain(error: BaseException, repo: str, revision: str | None) -> ValueError:
    """One sentence for what a hub client raised, found through the chain of its causes."""
    where = f"{repo!r} at revision {revision!r}" if revision else repr(repo)
    found: BaseException | None = error
    while found is not None:
        # The order matters: a gated repository is also a not-found one.
        if isinstance(found, GatedRepoError):
            return ValueError(f"{where} is gated; ask for access on its hub page, then run `hf auth login`")
        if isinstance(found, RevisionNotFoundError):
            return ValueError(f"{where} does not exist on the hub; check the revision")
        if isinstance(found, RepositoryNotFoundError):
            return ValueError(
                f"{where} is no folder here and not on the hub, or it is private; "
                "check the name, or run `hf auth login`"
            )
        if isinstance(found, LocalEntryNotFoundError | ConnectionError):
            return ValueError(
                f"{where} is no folder here and not in the local cache, and the hub cannot be reached; "
                "check the name, connect once, or give a folder"
            )
        if isinstance(found, EntryNotFoundError):
            return ValueError(f"{where} lacks a file that is needed ({_line(found)}); check the name")
        if isinstance(found, HfHubHTTPError):
            return ValueError(f"the hub refused {where} ({_line(found)}); try again later")
        found = found.__cause__ or found.__context__
    return ValueError(f"{where} cannot be loaded ({_line(error)}); check the name and its files")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
