"""`python -m hispec.train` is `hispec-train`."""

from .command import main

raise SystemExit(main())
