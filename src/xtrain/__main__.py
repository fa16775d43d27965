"""`python -m xtrain`: the same as the `xtrain` command."""

from xtrain.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
