"""`python -m lingvo_moe` as a soak run starts it: SIGUSR1 writes where every thread stands to the file named in SOAK_STACKS."""

from __future__ import annotations

import faulthandler
import os
import signal

VARIABLE = "SOAK_STACKS"


def main():
    """Runs the command line. The signal is answered in C, also while Python waits for a step or for the disk."""
    faulthandler.register(signal.SIGUSR1, open(os.environ[VARIABLE], "w", encoding="utf-8"))
    # Not before: importing takes a second in which the signal would end the process.
    from lingvo_moe.cli import main

    main.run()


if __name__ == "__main__":
    main()
