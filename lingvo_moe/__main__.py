"""`python -m lingvo_moe COMMAND`: see `lingvo_moe.cli.main`."""

from lingvo_moe.cli import main

if __name__ == "__main__":
    main.run()
