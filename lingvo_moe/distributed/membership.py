"""Which process of which run this is, from flags or from the variables that a launcher sets. It imports no JAX."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Mapping

from lingvo_moe.errors import UserError

# By launcher, the variables in which each process finds the number of processes and its own. Open MPI comes first,
# because under Slurm it starts its daemons as a job step.
_LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}


@dataclasses.dataclass(frozen=True)
class Membership:
    """The rank of this process in a run of several. JAX detects what is None from its cluster.

    Attributes:
      count: the number of processes.
      index: the number of this process, from 0.
      coordinator: `HOST:PORT` where process 0 listens.
    """

    count: int
    index: int | None = None
    coordinator: str | None = None

    def __post_init__(self):
        """Raises UserError for values that no run can have."""
        if self.count < 1 or not 0 <= (self.index or 0) < self.count:
            given = f"--processes={self.count}" + (f" --process={self.index}" if self.index is not None else "")
            raise UserError(f"{given}: processes are numbered from 0 to one less than their number.")
        if self.coordinator is not None:
            self._check_address(self.coordinator)

    @property
    def name(self) -> str:
        """`process 1 of 2`."""
        return f"a process of {self.count}" if self.index is None else f"process {self.index} of {self.count}"

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of `coordinator`."""
        host, _, port = (self.coordinator or "").rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @staticmethod
    def _check_address(coordinator: str):
        host, colon, port = coordinator.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
            raise UserError(
                f"--coordinator={coordinator}: expected HOST:PORT, an address of the machine of process 0 and a free "
                f"port there, for instance 10.0.0.1:2345."
            )


def find(
    coordinator: str | None, processes: int | None, process: int | None, environment: Mapping[str, str]
) -> Membership | None:
    """Returns the rank of this process in its run, or None for a run of one process.

    A flag wins over what a launcher has set. `--processes=1` alone makes a run of one process under any launcher.

    Args:
      coordinator: `--coordinator`.
      processes: `--processes`.
      process: `--process`.
      environment: the environment variables.

    Raises:
      UserError: flags that contradict each other or do not suffice, or a launcher's variable that is no number.
    """
    launched = _launched(environment)
    detected_count, detected_index = launched or (1, None)
    if processes is None and detected_count == 1:
        if coordinator is not None or process is not None:
            given = f"--coordinator={coordinator}" if coordinator is not None else f"--process={process}"
            raise UserError(
                f"{given} without --processes: several processes need --coordinator, --processes and --process, each "
                f"its own --process (docs/processes.md)."
            )
        return None
    count = detected_count if processes is None else processes
    index = process if process is not None else detected_index if count == detected_count else None
    found = Membership(count, index, coordinator)
    if count > 1 and None in (coordinator, index) and not launched and not _in_cluster(environment):
        raise UserError(
            f"--processes={count}: neither Slurm nor Open MPI has started this process, and this is no pod of "
            f"Kubernetes or machine of Cloud TPU; pass --coordinator, --processes and --process, each process its own "
            f"--process (docs/processes.md)."
        )
    return found if count > 1 else None


def _launched(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns the number of processes and that of this one from the first launcher whose variables are set."""
    for launcher, variables in _LAUNCHERS.items():
        if not all(variable in environment for variable in variables):
            continue
        for variable in variables:
            if not environment[variable].isdecimal():
                raise UserError(
                    f"the environment has {variable}={environment[variable]}, where {launcher} writes a whole number; "
                    f"unset {' and '.join(variables)}, or start the processes with {launcher}."
                )
        return int(environment[variables[0]]), int(environment[variables[1]])
    return None


def _in_cluster(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX may find the other processes through Kubernetes or the metadata of a Cloud TPU."""
    return bool("KUBERNETES_SERVICE_HOST" in environment or glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
