"""`python -m hispec.checkpoints` is `hispec-push`."""

from .push_command import main

raise SystemExit(main())
