"""Pushing: an adapter's folder to a repository on the hub."""

import json
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from .adapter import CARD_FILE, CONFIG_FILE, RUN_FILE, VERIFIER_FILES, WEIGHTS_FILE, check_adapter
from .hub import HUB_ID, LOGIN, explain_refusal, is_passing
from .licence import find_licence
from .model_card import check_card, is_public_base, make_card
from .verifier_file import load_verifier

REPORT_FILES = ("report.md", "report.html")
FIGURES = "figures"
FIGURE_SUFFIXES = (".png", ".svg")
NUM_TRIES = 2
"""Of the whole upload; within each the client tries single requests up to six times."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What goes up."""

    files: Mapping[str, Path | bytes]
    """Path in the repository -> file here, or its content."""
    card: str
    """The text of README.md, which is one of the files."""

    @property
    def sizes(self) -> dict[str, int]:
        """Path in the repository -> bytes."""
        return {
            name: len(file) if isinstance(file, bytes) else file.stat().st_size
            for name, file in sorted(self.files.items())
        }


def push_adapter(
    folder: str | Path,
    repo: str,  # user/name
    *,
    private: bool = False,  # make the repository private
    revision: str | None = None,  # branch, made from main where it is missing; None is main
    token: str | None = None,  # None takes HF_TOKEN or that of `hf auth login`
    message: str | None = None,  # of the commit
) -> str:
    """Put an adapter into a repository on the hub, made where it is missing, and return its address.

    Everything goes up in one commit: the repository holds the old adapter or the new one, whatever happens, and
    what has arrived is not sent again by the next call. Of files that are there already, those of an adapter are
    replaced or removed, others stay. A README.md in `folder` goes up as it is; without one a card is made. Raises
    ValueError, with a remedy, for a broken adapter, a missing permission, or a connection that fails.
    """
    upload = prepare_upload(folder, repo, token=token)
    check_push(repo, private=private, token=token)
    api = _api(token)
    message = message or f"Upload {repo.split('/')[-1]} with hispec"
    with _explained(repo):
        # None leaves it to what an organization has chosen for its repositories.
        api.create_repo(repo, private=private or None, exist_ok=True)
        is_public = not api.model_info(repo).private
    if private and is_public:
        raise ValueError(_public(repo))
    with _explained(repo):
        if revision not in (None, "main"):
            api.create_branch(repo, branch=str(revision), exist_ok=True)
        commit = _try_again(lambda: _commit(api, repo, revision, upload, message))
        sizes = _sizes(api, repo, commit)
    _check_arrived(sizes, repo, upload)
    return f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")


def check_push(repo: str, *, private: bool = False, token: str | None = None) -> None:
    """Raise ValueError, with a remedy, where the hub would not let this token write to `repo`; changes nothing."""
    _check_name(repo)
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        # The client's own error would print it.
        raise ValueError("the token is empty, or holds spaces or line breaks; copy it again")
    api = _api(token)
    with _explained(repo):
        user = api.whoami()
    _check_namespace(user, repo)
    with _explained(repo):
        try:
            is_public = not api.model_info(repo).private
        except RepositoryNotFoundError:
            is_public = False
    if private and is_public:
        raise ValueError(_public(repo))


def prepare_upload(folder: str | Path, repo: str, *, token: str | None = None) -> Upload:
    """Check an adapter's folder, choose what belongs to it, and make its card; raises ValueError.

    Asks the hub for the base's licence and nothing else, and does without it.
    """
    _check_name(repo)
    folder = Path(folder).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        inner = folder / "adapter"
        hint = f"; did you mean {inner}?" if (inner / CONFIG_FILE).is_file() else "; give one that save_adapter wrote"
        raise ValueError(f"{folder} holds no {CONFIG_FILE}{hint}")
    found = [folder / name for name in (CONFIG_FILE, WEIGHTS_FILE, RUN_FILE, CARD_FILE, *VERIFIER_FILES, *REPORT_FILES)]
    figures = folder / FIGURES
    _check_not_linked(figures)
    if figures.is_dir():
        found += sorted(path for path in figures.iterdir() if path.suffix in FIGURE_SUFFIXES)
    files = {path.relative_to(folder).as_posix(): path for path in found if path.is_symlink() or path.exists()}
    for path in files.values():
        _check_not_linked(path)
    config = check_adapter(folder)
    if not files.keys().isdisjoint(VERIFIER_FILES):
        load_verifier(folder)
    base = config["base_model_name_or_path"]
    if base is not None and not is_public_base(base):
        raise ValueError(f"{folder / CONFIG_FILE} names the base {base!r}, which is no hub id; write user/name or null")
    run = _read_run(files.get(RUN_FILE))
    if CARD_FILE in files:
        card = _read_text(files[CARD_FILE])
        check_card(card, [folder.resolve(), Path.home()])
        return Upload(files=files, card=card)
    card = make_card(config, run, repo, find_licence(_api(token), base, config["revision"]), list(files))
    check_card(card, [folder.resolve(), Path.home()])
    return Upload(files={**files, CARD_FILE: card.encode()}, card=card)


def _commit(api: HfApi, repo: str, revision: str | None, upload: Upload, message: str) -> str:
    """The hash of the commit that holds the upload; where it is there already, of the one that does."""
    # Made anew for each try: they remember what the repository held.
    operations: list[Any] = [CommitOperationAdd(name, file) for name, file in upload.files.items()]
    # What a former adapter left would be taken for this one's.
    stale = [name for name in _sizes(api, repo, revision) if _is_ours(name) and name not in upload.files]
    operations += [CommitOperationDelete(name, is_folder=False) for name in stale]
    return str(api.create_commit(repo, operations, commit_message=message, revision=revision).oid)


def _check_arrived(sizes: Mapping[str, int], repo: str, upload: Upload) -> None:
    for name, size in upload.sizes.items():
        if sizes.get(name) != size:
            what = f"holds {sizes[name]} bytes, not {size}" if name in sizes else "is not there"
            raise ValueError(
                f"{name} {what} in {repo} after the push; take its name out of .gitignore there, and push again"
            )


def _sizes(api: HfApi, repo: str, revision: str | None) -> dict[str, int]:
    entries = api.list_repo_tree(repo, recursive=True, revision=revision)
    return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}


def _is_ours(name: str) -> bool:
    """Whether a path in a repository is one that an adapter may have."""
    path = Path(name)
    is_figure = path.parent == Path(FIGURES) and path.suffix in FIGURE_SUFFIXES
    return is_figure or name in (CONFIG_FILE, WEIGHTS_FILE, RUN_FILE, *VERIFIER_FILES, *REPORT_FILES)


def _try_again(commit: Callable[[], str]) -> str:
    for attempt in range(NUM_TRIES - 1):
        try:
            return commit()
        except Exception as error:
            # A commit whose answer was lost is found again: unchanged files make no second one.
            if not is_passing(error):
                raise
            time.sleep(2**attempt)
    return commit()


def _check_name(repo: str) -> None:
    if not HUB_ID.fullmatch(repo):
        raise ValueError(f"{repo!r} is no name for a repository; write user/name")


def _check_namespace(user: Mapping[str, Any], repo: str) -> None:
    owner, name = repo.split("/")[0], user.get("name")
    token = user.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise ValueError(f"the token may only read, so {repo} cannot be written; {LOGIN} with one that may write")
    organizations = {entry.get("name"): entry.get("roleInOrg") for entry in user.get("orgs", [])}
    if owner != name and owner not in organizations:
        raise ValueError(
            f"the token belongs to {name}, who is not in {owner}; push to {name}/{repo.split('/')[1]}, "
            "or use a token of that account"
        )
    if organizations.get(owner) == "read":
        raise ValueError(f"{name} may only read in the organization {owner}; ask there for the right to write")


def _check_not_linked(path: Path) -> None:
    """A link in a folder that a stranger made could send any file of this machine to the hub."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link; put the file itself there")
    if path.exists() and not (stat.S_ISREG(path.stat().st_mode) or path.name == FIGURES):
        raise ValueError(f"{path} is no file; take it away")


def _read_run(path: Path | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    try:
        run = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}); restore or remove it") from error
    if not isinstance(run, dict):
        raise ValueError(f"{path} holds no record of a run; restore or remove it")
    return run


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error.reason}); restore or remove it") from error


def _public(repo: str) -> str:
    return f"{repo} is there already and public; make it private in its settings, or push without --private"


def _api(token: str | None) -> HfApi:
    return HfApi(token=token, library_name="hispec")


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    try:
        yield
    # The client and its upload library raise errors of many kinds, which have no class in common.
    except Exception as error:
        raise explain_refusal(error, repo) from error
