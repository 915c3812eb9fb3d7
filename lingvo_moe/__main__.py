"""`python -m lingvo_moe COMMAND`: see `lingvo_moe.cli.main`."""

import os
import signal

from lingvo_moe.utils.exit_status import INTERRUPTED


def _end(number, frame):
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def run():
    """Runs the command line; Ctrl-C during its imports, which take a second, ends it with one line."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    from lingvo_moe.cli import main

    main.run()


if __name__ == "__main__":
    run()
