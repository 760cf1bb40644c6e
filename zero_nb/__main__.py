"""``python -m zero_nb``: the command line."""

from zero_nb.cli import main

if __name__ == "__main__":
    main()
