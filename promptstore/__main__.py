"""``python -m promptstore``: the command, where its script is not on the path."""

from promptstore.cli import main

if __name__ == "__main__":
    main(prog_name="promptstore")
