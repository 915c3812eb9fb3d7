"""`python -m lingvo_moe COMMAND`: see `lingvo_moe.cli.main`."""

import sys

from lingvo_moe.cli import app, main

if __name__ == "__main__":
    app.leave(main.main(sys.argv))
