"""The released model: its files, which come with this package, and a translator with its weights.

    from lingvo_moe.inference import released

    translator = released.translator()
    [[best, *others]] = translator.translate(["Fichier introuvable"])
    print(best.text)

The weights are in int8, as `checkpoint convert --dtype=int8` writes them; the models of tokenizers may be compressed.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lingvo_moe import experiment as experiments
from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Spec
from lingvo_moe.steps import weight_specs

if TYPE_CHECKING:
    from lingvo_moe.inference.translator import Translator

MODEL = "m4.Pocket"
DIRECTORY = pathlib.Path(__file__).parent.parent / "released"


def is_available() -> bool:
    """Whether this copy of the package has the files."""
    return _weights().is_file()


def tokenizers() -> pathlib.Path:
    """The directory of the tokenizers."""
    return DIRECTORY / "tokenizers"


def translator(
    assignments: Sequence[str] = (),
    mesh: DeviceMesh = DeviceMesh(),
    platform: str | None = None,
    copy_english: bool = True,
) -> Translator:
    """Returns a translator with the released weights.

    Args:
      assignments: hyperparameters, see `translator.load`; those that would change the weights are refused.
      mesh: see `translator.load`.
      platform: likewise.
      copy_english: whether texts that are English already are copied; this model changes some.

    Raises:
      UserError: the files are missing, an assignment is wrong or gives the model other weights, or the devices are
        not there.
    """
    if not is_available():
        raise UserError(f"{_weights()}: no such file; this copy of the package has no released model.")
    check(assignments, mesh, "assignments")
    from lingvo_moe.inference import translator as translators  # slow to import; commands read the names above

    with logdir(mesh) as where:
        return translators.load(
            where, MODEL, [f"tokenizers={tokenizers()}", *assignments], mesh, platform, copy_english
        )


def check(assignments: Sequence[str], mesh: DeviceMesh | None, what: str):
    """Raises UserError, which begins with `what`, for hyperparameters that give the model other weights."""
    changed, own = _specs(assignments, mesh), _specs(())
    if path := next((path for path in sorted(changed | own) if changed.get(path) != own.get(path)), None):
        raise UserError(
            f"{what}: the released weights are of {MODEL} as it is; with these settings its weight {path} differs. "
            f"Leave them out, or pass --model and the --logdir of a training run with them."
        )


@contextlib.contextmanager
def logdir(mesh: DeviceMesh | None) -> Iterator[pathlib.Path]:
    """Yields a temporary log directory with the weights, made in a second or two.

    Args:
      mesh: of the devices that will run the model; None for its own. To write the directory starts JAX, whose number
        of virtual devices is then fixed.

    Raises:
      UserError: the temporary directory cannot be written to.
    """
    from lingvo_moe.engines import pjrt  # slow to import; mistakes in flags are reported before
    from lingvo_moe.training import weights_conversion

    if mesh:
        pjrt.request_cpu_devices(mesh.size)
    with weights_conversion.as_logdir(_weights(), MODEL, tree.unflatten(_specs(()))) as where:
        yield where


def _weights() -> pathlib.Path:
    return DIRECTORY / "weights.safetensors"


def _specs(assignments: Sequence[str], mesh: DeviceMesh | None = None) -> dict[str, Spec]:
    """Returns the shape and dtype of each weight of the model with some settings, by path."""
    experiment = experiments.get(MODEL, assignments, mesh, reads_batches=False)
    return tree.flatten(weight_specs(experiment.model.weights()))
