"""Engines by name, for `--engine=NAME`.

An engine of your own comes through `--import`:

    from lingvo_moe.engines.registry import EngineOptions, register_engine

    @register_engine("mine")
    def make(options: EngineOptions) -> MyEngine: ...
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Literal

from lingvo_moe import definitions
from lingvo_moe.engines.base import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.extensions import Registry

Purpose = Literal["train", "evaluate", "decode", "diagnose"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a command asks of an engine.

    Attributes:
      purpose: what the engine is for; a factory may raise UserError for what its engine cannot do.
      num_devices: the size of the mesh.
      all_accelerators: whether to take every accelerator there is, because the user named no number of devices.
      processes: how many processes share the devices.
      platform: `--platform`; None for whatever is there.
      tpu: `--tpu`; None if it was not given.
      executables: the directory where compiled programs are cached; None for no cache.
    """

    purpose: Purpose = "train"
    num_devices: int = 1
    all_accelerators: bool = False
    processes: int = 1
    platform: str | None = None
    tpu: str | None = None
    executables: pathlib.Path | None = None


Factory = Callable[[EngineOptions], Engine]


ENGINES: Registry[Factory] = Registry(
    "engine", check=lambda what, factory: definitions.check_call(what, factory, "options")
)


def register_engine(name: str) -> Callable[[Factory], Factory]:
    """Function decorator: makes the engine that the function returns available as `--engine=NAME`.

    The function raises UserError if the engine's devices cannot be found, or if it cannot do what the options ask for.

    Args:
      name: of the engine.

    Raises:
      UserError: the name is missing, malformed or belongs to another function; or the function does not take the
        options alone.
    """
    return ENGINES.decorator("register_engine", name)


def make(name: str, options: EngineOptions) -> Engine:
    """Makes the engine of a registered name; raises UserError if there is none or it made none, or as its factory."""
    factory = ENGINES.get(name)
    with definitions.named(lambda: f"engine {name!r}", factory):
        engine = factory(options)
        definitions.check(f"engine {name!r}: the result, {definitions.form(engine)},", engine, Engine)
    return engine


@register_engine("pjrt")
def _make_pjrt(options: EngineOptions) -> Engine:
    # These import JAX, which must not come before TensorFlow has found a TPU.
    from lingvo_moe.engines import compilation, pjrt

    if options.executables:
        compilation.use_compilation_cache(options.executables)
    return pjrt.Engine(options.num_devices, options.platform, options.all_accelerators, options.processes)


@register_engine("tpu_strategy")
def _make_tpu_strategy(options: EngineOptions) -> Engine:
    if options.purpose != "train":
        raise UserError(
            "--engine=tpu_strategy only trains; evaluate, translate and diagnose with --engine=pjrt, which reads the "
            "same checkpoints."
        )
    _keep_jax_from_the_tpu()
    from lingvo_moe.engines import tpu_strategy

    return tpu_strategy.Engine.connect(options.tpu or "")


def _keep_jax_from_the_tpu():
    """Orbax imports JAX, which takes any TPU it finds; this one belongs to TensorFlow."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX is imported
    if "jax" in sys.modules:  # a module of --import may have imported it
        sys.modules["jax"].config.update("jax_platforms", "cpu")
