"""Layouts: the einsum letters of a tensor are its sharding.

Every dimension of a weight or an activation has a letter, the papers' own:

  G groups   S tokens per group   E experts   C expert capacity   M model   H hidden (feed-forward)
  B batch    T, L length          N heads     D head size         V vocabulary   R repeats (stacked layers)

A lower-case letter names a dimension that is never cut: the gate weights, `me`, are whole on every device.

A `Layout` maps letters to the axes of a device mesh by two rules that reproduce the annotations of GShard Algorithm 2 and
GSPMD table 1 and figure 8b:

  1. Letters belong to priority classes. Each class claims its mesh axis before the next one; the class that takes leftovers
     gets the first of its axes that is still free.
  2. Inside a class the letter that stands first in the tensor wins: GSEC and GECM are cut along G, EGCM and EMH along E.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd

LOGICAL_AXES = "GSECMHBTLNDVR"


@dataclasses.dataclass(frozen=True)
class Spec:
    """A tensor that does not exist yet: shape, dtype name, and letters."""

    shape: tuple[int, ...]
    dtype: str
    logical_axes: str


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """A logical array of devices, ids in row-major order: `DeviceMesh((4, 2))` is 8 devices, axes x (4) and y (2)."""

    shape: tuple[int, ...] = (1,)
    axis_names: tuple[str, ...] = ("x", "y")

    def __post_init__(self):
        object.__setattr__(self, "axis_names", self.axis_names[: len(self.shape)])
        if not self.shape or any(size < 1 for size in self.shape) or len(self.axis_names) != len(self.shape):
            raise UserError(
                f"device mesh {self.shape} with axes {self.axis_names}: give one or two sizes >= 1, e.g. 8 or 4x2."
            )

    @property
    def size(self) -> int:
        """The number of devices."""
        return int(np.prod(self.shape))

    @property
    def devices(self) -> np.ndarray:
        """Device ids, of the mesh's shape."""
        return np.arange(self.size).reshape(self.shape)

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))

    @staticmethod
    def parse(text: str) -> DeviceMesh:
        """Reads `8` or `4x2`; raises UserError for anything else."""
        try:
            return DeviceMesh(tuple(int(size) for size in text.lower().split("x")))
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"device mesh {text!r} is not understood; write the number of devices (8) or two sizes (4x2)."
            )


@dataclasses.dataclass(frozen=True)
class AxisRule:
    """One priority class: its letters, and the mesh axes it may take, in order of preference.

    A class with `leftovers` takes the first of its axes that is still free, or none; any other class takes exactly its axis.
    """

    logical_axes: str
    axes: tuple[str, ...]
    leftovers: bool = False


# GShard Algorithm 2: one mesh axis; batch, groups and experts are cut, M and H are whole on every device.
GSHARD_1D = (AxisRule("BGE", ("x",)),)
# The same, and the dense layers' hidden dimension is cut where nothing else is: in their weights, optimizer_state and gradients, not in
# activations. Each device keeps and updates its part (weight-update sharding, Xu et al. 2020, arXiv 2004.13336) and a layer's
# weights are put together where it uses them.
GSHARD_1D_SHARDED_UPDATE = (*GSHARD_1D, AxisRule("H", ("x",), leftovers=True))
# GSPMD table 1, "2D finalized", and figure 8b: hidden, heads and vocabulary on y, the model dimension takes what is left.
GSPMD_2D = (AxisRule("BGE", ("x",)), AxisRule("HNV", ("y",)), AxisRule("M", ("y", "x"), leftovers=True))


# GSPMD table 1, the attempts before: the first cuts every tensor consistently, activations by half of the mesh alone; the
# second puts weights together where they are used, and keeps M of activations whole.
GSPMD_ATTEMPT_1 = (AxisRule("HNV", ("y",)), AxisRule("M", ("x",)))
GSPMD_ATTEMPT_2 = (AxisRule("BGE", ("x",)), AxisRule("HNV", ("y",)), AxisRule("M", ("x",), leftovers=True))
# What `Experiment.layout` may name, with the number of mesh axes each is for.
NAMED_RULES = {
    "gshard": (1, GSHARD_1D),
    "gshard_sharded_update": (1, GSHARD_1D_SHARDED_UPDATE),
    "gspmd": (2, GSPMD_2D),
    "gspmd_attempt_1": (2, GSPMD_ATTEMPT_1),
    "gspmd_attempt_2": (2, GSPMD_ATTEMPT_2),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A device mesh and its claims.

    Raises:
      ValueError: (from its methods) an unknown or repeated letter, or two letters of one tensor that claim one mesh axis.
    """

    mesh: DeviceMesh = DeviceMesh()
    rules: tuple[AxisRule, ...] = GSHARD_1D

    @staticmethod
    def of(mesh: DeviceMesh, name: str = "auto") -> Layout:
        """The layout of a name in NAMED_CLAIMS; `auto` is `gshard` on meshes of one axis, GSPMD's finalized one on two.

        Raises:
          UserError: an unknown name, or one for meshes of another number of axes.
        """
        if name == "auto":
            name = "gshard" if len(mesh.shape) == 1 else "gspmd"
        if name not in NAMED_RULES:
            raise UserError(
                f"layout {name!r} is unknown.{did_you_mean(name, NAMED_RULES)} Known: auto, {', '.join(NAMED_RULES)}."
            )
        axes, rules = NAMED_RULES[name]
        if axes != len(mesh.shape):
            raise UserError(
                f"layout {name} is for a mesh of {axes} axes, the mesh is {mesh}; choose another with --set "
                f"layout=auto or --mesh."
            )
        return Layout(mesh, rules)

    def axes(self, logical_axes: str) -> tuple[str | None, ...]:
        """Returns for each letter the mesh axis that cuts its dimension, or None: `"EGCM" -> ("x", None, None, "y")`."""
        self._check_logical_axes(logical_axes)
        owner: dict[str, str] = {}
        for rule in self.rules:
            present = sorted((letter for letter in rule.logical_axes if letter in logical_axes), key=logical_axes.index)
            axes = [axis for axis in rule.axes if axis in self.mesh.axis_names]
            if rule.leftovers:
                axes = [axis for axis in axes if axis not in owner][:1]
            if not present or not axes:
                continue
            if axes[0] in owner:
                raise ValueError(
                    f"tensor {logical_axes}: letters {owner[axes[0]]} and {present[0]} both claim mesh axis "
                    f"{axes[0]}; change one of the layout's claims, or annotate this tensor by hand."
                )
            owner[axes[0]] = present[0]
        axis_of = {letter: axis for axis, letter in owner.items()}
        return tuple(axis_of.get(letter) for letter in logical_axes)

    def dims_mapping(self, logical_axes: str) -> tuple[int, ...]:
        """Returns for each letter the index of its mesh axis, -1 where it is not cut (as `sharding.mesh_split` takes it)."""
        names = self.mesh.axis_names
        return tuple(
            spmd.REPLICATED_DIMENSION if axis is None else names.index(axis) for axis in self.axes(logical_axes)
        )

    def num_shards(self, logical_axes: str, letter: str) -> int:
        """Into how many parts the dimension `letter` of a tensor with these `letters` is cut."""
        axis = self.axes(logical_axes)[logical_axes.index(letter)]
        return 1 if axis is None else self.mesh.shape[self.mesh.axis_names.index(axis)]

    def annotate(self, tensor: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Annotates `tensor`, whose dimensions are `letters`, with its place on the mesh; the value is unchanged."""
        if len(logical_axes) != tensor.shape.rank:
            raise ValueError(
                f"letters {logical_axes!r} name {len(logical_axes)} dimensions, the tensor has shape {tuple(tensor.shape)}."
            )
        if self.mesh.size == 1:
            return tensor
        return spmd.mesh_split(tensor, self.mesh.devices, self.dims_mapping(logical_axes))

    def _check_logical_axes(self, logical_axes: str):
        for letter in logical_axes:
            if letter.upper() not in LOGICAL_AXES:
                raise ValueError(f"letter {letter!r} of {logical_axes!r} is not one of {LOGICAL_AXES}.")
            if logical_axes.count(letter) > 1:
                raise ValueError(f"letter {letter!r} stands twice in {logical_axes!r}; each dimension needs its own.")
