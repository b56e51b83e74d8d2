"""`hispec-push`: an adapter to the Hugging Face Hub."""

import argparse
import sys
from collections.abc import Sequence

from .push import prepare_upload, push_adapter


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="hispec-push",
        description="Put an adapter into a repository on the Hugging Face Hub, with a model card. The files of the "
        "adapter that is there are replaced, in one commit.",
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="folder of the adapter, such as runs/NAME/adapter")
    parser.add_argument("repo", metavar="USER/NAME", help="repository; made where it is missing")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to; made from main where it is missing")
    parser.add_argument("--message", metavar="TEXT", help="message of the commit")
    parser.add_argument(
        "--token", help="access token (default: HF_TOKEN, or that of `hf auth login`, which no one else sees)"
    )
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="list the files, print the card, and send nothing"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 2 for what the user can mend, 130 after Ctrl-C."""
    options = build_parser().parse_args(argv)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print(
            f"\nhispec-push: interrupted; {options.repo} holds what it held before, or all of the adapter, and the "
            "same command again goes on where it was",
            file=sys.stderr,
        )
        return 130
    except (OSError, ValueError) as error:
        print(f"hispec-push: error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.dry_run:
        upload = prepare_upload(options.adapter, options.repo, token=options.token)
        for name, size in upload.sizes.items():
            print(f"{size:>12}  {name}", file=sys.stderr)
        print(upload.card, end="")
        return 0
    address = push_adapter(
        options.adapter,
        options.repo,
        private=options.private,
        revision=options.revision,
        token=options.token,
        message=options.message,
    )
    print(address)
    return 0
