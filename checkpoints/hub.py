"""The Hugging Face Hub: which names are hub ids, and what its errors mean for a user."""

import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    # httpx's, or httpx2's: whichever the installed client speaks with.
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
LOGIN = "run `hf auth login`, or set HF_TOKEN"
UNREACHABLE = (LocalEntryNotFoundError, ConnectionError, TimeoutError, HTTPError)


def is_hub_id(name: str) -> bool:
    """Whether `name` can only mean a repository on the hub: `user/name`, and no such path here."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def download(
    repo: str,
    revision: str | None,  # branch, tag or commit; None is main
    files: list[str],  # names at the top of the repository; nothing else there is ever fetched
) -> Path:
    """The folder with those of `files` that the repository has; raises ValueError with a remedy.

    What is in the local cache is found without a network.
    """
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=files))
    except (OSError, HTTPError, HFValidationError) as error:
        raise explain(error, repo, revision) from error


def explain(error: BaseException, repo: str, revision: str | None) -> ValueError:
    """One sentence for what a hub client raised while it read, found through the chain of its causes."""
    where = f"{repo!r} at revision {revision!r}" if revision else repr(repo)
    for found in causes(error):
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
        if isinstance(found, HfHubHTTPError) and not isinstance(found, EntryNotFoundError):
            return ValueError(f"the hub refused {where} ({line_of(found)}); {_remedy(found)}")
        # The client tells "not in the cache" also where the hub answered; its answer is then the cause.
        if isinstance(found, UNREACHABLE) and status_of(error) is None:
            return ValueError(
                f"{where} is no folder here and not in the local cache, and the hub cannot be reached; "
                "check the name, connect once, or give a folder"
            )
        if isinstance(found, EntryNotFoundError) and not isinstance(found, LocalEntryNotFoundError):
            return ValueError(f"{where} lacks a file that is needed ({line_of(found)}); check the name")
    return ValueError(f"{where} cannot be loaded ({line_of(error)}); check the name and its files")


def explain_refusal(error: BaseException, repo: str) -> ValueError:
    """One sentence for what a hub client raised while it asked to write to `repo`, or wrote."""
    status, again = status_of(error), "the same command again goes on where it was"
    for found in causes(error):
        if isinstance(found, OfflineModeIsEnabled):
            return ValueError(f"{repo} cannot be pushed to in offline mode; unset HF_HUB_OFFLINE")
        if isinstance(found, LocalTokenNotFoundError):
            return ValueError(f"there is no token to push to {repo} with; {LOGIN}")
        if isinstance(found, HFValidationError):
            return ValueError(f"{repo!r} is no name for a repository ({line_of(found)}); write user/name")
    if status is not None:
        response = next(found for found in causes(error) if isinstance(found, HfHubHTTPError))
        return ValueError(f"the hub refused to take {repo} ({line_of(response)}); {_remedy(response)}")
    if any(isinstance(found, UNREACHABLE) for found in causes(error)):
        return ValueError(f"the connection to the hub failed while {repo} was pushed ({line_of(error)}); {again}")
    return ValueError(f"{repo} could not be pushed ({line_of(error)}); {again}")


def is_passing(error: BaseException) -> bool:
    """Whether trying again soon may help: the connection broke, or the hub had trouble of its own."""
    status = status_of(error)
    if status is not None:
        return status == 408 or status >= 500
    found = list(causes(error))
    return not any(isinstance(cause, OfflineModeIsEnabled) for cause in found) and any(
        isinstance(cause, UNREACHABLE) for cause in found
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what lies behind it."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def status_of(error: BaseException) -> int | None:
    """The HTTP status that the hub answered with; None where it did not answer."""
    return next((found.response.status_code for found in causes(error) if isinstance(found, HfHubHTTPError)), None)


def line_of(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:300]


def _remedy(error: HfHubHTTPError) -> str:
    return {
        401: f"the token is unknown or has expired; {LOGIN}",
        402: "its plan or quota does not allow that; see your settings on the hub",
        403: "the token lacks the permission; make one that has it on the hub's page of access tokens",
        404: "check the name",
        409: "something else is being written there; try again",
        413: "it is too large for the hub",
        429: "these were too many requests; wait a few minutes and try again",
        507: "the account has no storage left; make room there",
    }.get(error.response.status_code, "try again later")
