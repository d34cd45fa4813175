"""`python -m memcompiler`."""

from memcompiler.cli import main

if __name__ == "__main__":
    main()
