"""`python -m hispec.infer` is `hispec-infer`."""

from .command import main

raise SystemExit(main())
