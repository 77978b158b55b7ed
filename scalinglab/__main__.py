"""`python -m scalinglab` is the command line."""

from scalinglab.cli import main

if __name__ == "__main__":
    main()
