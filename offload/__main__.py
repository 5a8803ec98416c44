"""``python -m offload``: the same commands as the ``offload`` script."""

from offload.cli import main

if __name__ == "__main__":
    main(prog_name="offload")
