"""The command line as a soak run starts it: SIGUSR1 dumps the stacks of all threads to the file SOAK_STACKS."""

from __future__ import annotations

import faulthandler
import os
import signal

VARIABLE = "SOAK_STACKS"


def main():
    """Runs the command line; the signal is handled in C, also while Python waits for a step or for the disk."""
    dump = open(os.environ[VARIABLE], "w", encoding="utf-8")  # noqa: SIM115  (stays open as long as the process)
    faulthandler.register(signal.SIGUSR1, dump)
    # Imported late: it takes a second, in which the signal would end the process.
    from lingvo_moe.cli import main

    main.run()


if __name__ == "__main__":
    main()
