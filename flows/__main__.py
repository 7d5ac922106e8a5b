"""`python -m flows` is `diloco`."""

from flows.cli import main

if __name__ == "__main__":
    main()
