"""Layouts: the logical axes of a tensor determine its sharding.

Every dimension of a weight or an activation has a logical axis, named by the letter of the papers:

  G groups   S tokens per group   E experts   C expert capacity   M model   H hidden (feed-forward)
  B batch    T, L length          N heads     D head size         V vocabulary   R repeats (stacked layers)
  P pipeline stages   X, Y, Z spatial dimensions of an image or volume   I, O channels of a convolution
  U terms of an unreduced sum (see `partial`)

A lower-case letter names a dimension that is never sharded: the gate weights, `me`, are replicated on every device.

A `Layout` maps logical axes to mesh axes by axis rules (compare `logical_axis_rules` in T5X and MaxText). Two rules of
evaluation reproduce the annotations of GShard Algorithm 2 and of GSPMD table 1 and figure 8b:

  1. Axis rules apply in order. Each assigns a mesh axis; a fallback rule takes the first of its mesh axes that no
     earlier rule has assigned in this tensor.
  2. Where a tensor has several logical axes of one rule, the first of them in the tensor is sharded: GSEC and GECM
     along G, EGCM and EMH along E.

Parallelism is a choice of axis rules. Data parallelism shards B and G, expert parallelism E, tensor parallelism
(in-layer model parallelism) H, N and V. Sharding weights along the batch's mesh axis too, as FSDP and ZeRO do, is
weight-update sharding: H in `gshard_sharded_update`, M in `gspmd`.

A user's file adds layouts with `register_layout` (docs/extending.md). A layout's rules may also be written where its
name is expected, as `rules_text` writes them: `BGE:x,HNV:y,M~y/x` is `gspmd`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Sequence

import numpy as np

from lingvo_moe import definitions
from lingvo_moe.errors import UserError
from lingvo_moe.extensions import Registry
from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd

LOGICAL_AXES = "GSECMHBTLNDVRPUXYZIO"
UNREDUCED = "U"
# GSPMD section 5.2: of three axes the first, l, is for pipeline stages; x and y are those of two axes.
_MESH_AXES = {1: ("x",), 2: ("x", "y")}
AUTO = "auto"
_RULE = re.compile(r"(\w+)([:~])(\w+(?:/\w+)*)")


@dataclasses.dataclass(frozen=True)
class Spec:
    """The declaration of a tensor: shape, dtype name, and one logical axis per dimension."""

    shape: tuple[int, ...]
    dtype: str
    logical_axes: str


def mesh_axis_names(count: int) -> tuple[str, ...]:
    """The names of the axes of a mesh: x; x and y; l, x and y; further axes are z, z2, z3 and so on."""
    further = tuple(f"z{number}" if number > 1 else "z" for number in range(1, count - 2))
    return _MESH_AXES.get(count) or ("l", "x", "y", *further)


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """A logical array of devices, ids in row-major order: `DeviceMesh((4, 2))` is 8 devices, axes x (4) and y (2).

    Attributes:
      shape: the number of devices along each axis; any number of axes.
      axis_names: one per axis; by default those of `mesh_axis_names`.

    Raises:
      UserError: not a tuple of sizes from 1, or not one name for each axis.
    """

    shape: tuple[int, ...] = (1,)
    axis_names: tuple[str, ...] = ()

    def __post_init__(self):
        is_tuple = isinstance(self.shape, tuple) and all(isinstance(size, numbers.Integral) for size in self.shape)
        if not is_tuple or not self.shape or min(self.shape) < 1:
            raise UserError(
                f"device mesh {self.shape!r}: give sizes >= 1, e.g. 8, 4x2 or 2x2x2 (in Python (8,), (4, 2))."
            )
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))  # NumPy's, too
        object.__setattr__(self, "axis_names", self.axis_names or mesh_axis_names(len(self.shape)))
        if len(self.axis_names) != len(self.shape) or len(set(self.axis_names)) != len(self.shape):
            raise UserError(
                f"device mesh {self.shape} with axes {self.axis_names}: give one name for each of the "
                f"{len(self.shape)} sizes, or none for {mesh_axis_names(len(self.shape))}."
            )

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def devices(self) -> np.ndarray:
        """The device ids, an array of the mesh's shape."""
        return np.arange(self.size).reshape(self.shape)

    def axis_size(self, axis: str | None) -> int:
        """The number of devices along a mesh axis; 1 for None."""
        return 1 if axis is None else self.shape[self.axis_names.index(axis)]

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))

    @staticmethod
    def parse(text: str) -> DeviceMesh:
        """Reads `8`, `4x2` or `2x2x2`; raises UserError for anything else."""
        try:
            return DeviceMesh(tuple(int(size) for size in text.lower().split("x")))
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"device mesh {text!r} cannot be parsed; expected the number of devices (8) or the sizes of several "
                "axes (4x2, 2x2x2)."
            ) from None


@dataclasses.dataclass(frozen=True)
class AxisRule:
    """One rule of a layout: the logical axes it shards and the mesh axes it may assign to them.

    Attributes:
      logical_axes: upper-case letters. At most one of them is sharded in a tensor, the one that comes first in it.
      mesh_axes: one mesh axis, `("x",)`; a fallback rule may list several, in order of preference.
      fallback: take the first of `mesh_axes` that no earlier rule has assigned, or none. Without it, a mesh axis that
        is already assigned is an error.
    """

    logical_axes: str
    mesh_axes: tuple[str, ...]
    fallback: bool = False


@dataclasses.dataclass(frozen=True)
class NamedLayout:
    """A registered layout: its axis rules, the number of mesh axes they are for, and `Layout.annotated`."""

    rules: tuple[AxisRule, ...]
    num_mesh_axes: int
    annotated: tuple[str, ...] | None = None


LAYOUTS: Registry[NamedLayout] = Registry("layout", reserved=(AUTO,))


def register_layout(name: str, rules: Sequence[AxisRule], num_mesh_axes: int, annotated: tuple[str, ...] | None = None):
    """Registers a layout, which `Experiment.layout` and `--set layout=NAME` then select.

    Args:
      name: of the layout.
      rules: axis rules in order of priority.
      num_mesh_axes: the number of axes of the meshes that it is for: 1 (`--devices=8`: axis x), 2 (`--mesh=4x2`: x
        and y), 3 (`--mesh=2x2x2`: l, x and y), or more, see `mesh_axis_names`.
      annotated: see `Layout`; by default all tensors.

    Raises:
      UserError: malformed rules or `annotated`, or a name that another layout has.
    """
    if not isinstance(num_mesh_axes, int) or num_mesh_axes < 1:
        raise UserError(f"layout {name!r}: num_mesh_axes is {num_mesh_axes!r}; expected a number from 1.")
    _check_rules(name, rules, mesh_axis_names(num_mesh_axes))
    are_texts = isinstance(annotated, tuple) and all(isinstance(axes, str) for axes in annotated)
    if annotated is not None and not are_texts:
        raise UserError(
            f"layout {name!r}: annotated is {annotated!r}; expected None, or a tuple of the logical axes of tensors, "
            f'for instance ("BTM",).'
        )
    for axes in annotated or ():
        try:
            check_logical_axes(axes)
        except ValueError as error:
            raise UserError(f"layout {name!r}, annotated tensor {axes!r}: {error}") from None
    LAYOUTS.register(name, NamedLayout(tuple(rules), num_mesh_axes, annotated))


def rules_text(rules: Sequence[AxisRule]) -> str:
    """Returns axis rules as a text for `--set layout=TEXT`: `BGE:x`, and `M~y/x` for one that falls back."""
    return ",".join(f"{rule.logical_axes}{'~' if rule.fallback else ':'}{'/'.join(rule.mesh_axes)}" for rule in rules)


def parse_rules(text: str, mesh: DeviceMesh) -> tuple[AxisRule, ...]:
    """Reads what `rules_text` writes; raises UserError for anything else, and for axes that the mesh does not have."""
    rules = []
    for part in text.split(","):
        matched = _RULE.fullmatch(part.strip())
        if not matched:
            raise UserError(
                f"layout {text!r}: {part!r} is not an axis rule; write letters, ':' and a mesh axis, for instance "
                f"BGE:x, or '~' and mesh axes in order of preference, for instance M~y/x."
            )
        rules.append(AxisRule(matched[1], tuple(matched[3].split("/")), fallback=matched[2] == "~"))
    _check_rules(text, rules, mesh.axis_names)
    return tuple(rules)


def _check_rules(name: str, rules: Sequence[AxisRule], mesh_axes: tuple[str, ...]):
    """Raises UserError for malformed rules, and for a letter in two of them."""
    owner: dict[str, int] = {}
    for number, rule in enumerate(rules):
        problem = _problem(rule, mesh_axes)
        for axis in rule.logical_axes if not problem else "":
            if owner.setdefault(axis, number) != number:
                problem = f"logical axis {axis} is in rule {owner[axis]} already; name it in one rule"
        if problem:
            raise UserError(f"layout {name!r}, rule {number}, {rule}: {problem}.")


def _problem(rule: AxisRule, mesh_axes: tuple[str, ...]) -> str:
    """Returns what is wrong with an axis rule by itself, or an empty string."""
    if not isinstance(rule, AxisRule):
        return 'expected an AxisRule, for instance AxisRule("BGE", ("x",))'
    if not isinstance(rule.logical_axes, str) or not rule.logical_axes:
        return 'logical_axes must be a string of letters, for instance "BGE"'
    unknown = [axis for axis in rule.logical_axes if axis not in LOGICAL_AXES]
    if unknown:
        return f"logical axis {unknown[0]!r} is not one of {LOGICAL_AXES}"
    if UNREDUCED in rule.logical_axes:
        return f"{UNREDUCED} needs no rule: it is sharded along the mesh axis of the sum that is deferred"
    if len(set(rule.logical_axes)) != len(rule.logical_axes):
        return f"logical_axes {rule.logical_axes!r} repeats a letter"
    if not isinstance(rule.mesh_axes, tuple) or not rule.mesh_axes:
        return 'mesh_axes must be a tuple of mesh axes, for instance ("x",)'
    absent = [axis for axis in rule.mesh_axes if axis not in mesh_axes]
    if absent:
        return f"mesh axis {absent[0]!r} is not one of this layout's mesh axes, {', '.join(mesh_axes)}"
    if len(rule.mesh_axes) > 1 and not rule.fallback:
        return "several mesh_axes need fallback=True, which takes the first free one"
    return ""


def check_logical_axes(logical_axes: str):
    """Raises ValueError for an unknown or a repeated letter; a lower-case one is not sharded."""
    for axis in logical_axes:
        if axis.upper() not in LOGICAL_AXES:
            raise ValueError(f"logical axis {axis!r} of {logical_axes!r} is not one of {LOGICAL_AXES}.")
        if logical_axes.count(axis) > 1:
            raise ValueError(f"logical axis {axis!r} is repeated in {logical_axes!r}; each dimension needs its own.")


# GShard Algorithm 2: one mesh axis. Batch, groups and experts are sharded; M and H are replicated.
GSHARD_1D = (AxisRule("BGE", ("x",)),)
# The same, and the dense layers' hidden dimension is sharded where nothing else is: in their weights, optimizer state
# and gradients, not in activations. Each device keeps and updates its shard (weight-update sharding, Xu et al. 2020,
# arXiv 2004.13336), and a layer's weights are gathered where it uses them.
GSHARD_1D_SHARDED_UPDATE = (*GSHARD_1D, AxisRule("H", ("x",), fallback=True))
# GSPMD table 1, "2D finalized", and figure 8b: hidden, heads and vocabulary on y; the model dimension falls back to the
# axis that is left.
GSPMD_2D = (AxisRule("BGE", ("x",)), AxisRule("HNV", ("y",)), AxisRule("M", ("y", "x"), fallback=True))
# GSPMD table 1, the two attempts before: the first shards every tensor consistently, activations by half of the mesh
# alone; the second gathers weights where they are used, and leaves M of activations replicated.
GSPMD_ATTEMPT_1 = (AxisRule("HNV", ("y",)), AxisRule("M", ("x",)))
GSPMD_ATTEMPT_2 = (AxisRule("BGE", ("x",)), AxisRule("HNV", ("y",)), AxisRule("M", ("x",), fallback=True))

# Pipelines (GSPMD section 3.3): stages on the first axis, and so are stored layers, which are consecutive in a stage.
# On two axes experts and batch share the second (figure 2); on three the others are as in table 4: weights are not
# sharded along x, for each microbatch would gather them.
PIPELINE_1D = (AxisRule("PR", ("x",)),)
# The same, and the layers before and after the pipeline are data-parallel on the devices of its stages (section 5.3).
PIPELINE_1D_DATA = (AxisRule("PRB", ("x",)),)
PIPELINE_2D = (AxisRule("PR", ("x",)), AxisRule("BGE", ("y",)))
PIPELINE_3D = (
    AxisRule("PR", ("l",)),
    AxisRule("BGE", ("x",)),
    AxisRule("HNV", ("y",)),
    AxisRule("M", ("y",), fallback=True),
)

# Spatial partitioning (GSPMD section 5.6): devices share the first spatial dimension of images; on two axes, the first
# axis has data parallelism (table 8).
SPATIAL_1D = (AxisRule("X", ("x",)),)
SPATIAL_2D = (AxisRule("B", ("x",)), AxisRule("X", ("y",)))

# Few annotations (GSPMD section 3.5): those that the papers print, and XLA completes the others. The seven of table 1,
# whose S is our T and, of keys and values, L; and the five of figure 8b for layers with experts.
TABLE_1_TENSORS = ("MND", "NDM", "MH", "HM", "BTM", "BTND", "BLND", "BTH")
FIGURE_8B_TENSORS = ("GECM", "EGCM", "EMH", "EGCH", "EHM")
PAPERS_TENSORS = (*TABLE_1_TENSORS, *FIGURE_8B_TENSORS)

register_layout("gshard", GSHARD_1D, num_mesh_axes=1)
register_layout("gshard_sharded_update", GSHARD_1D_SHARDED_UPDATE, num_mesh_axes=1)
register_layout("gspmd", GSPMD_2D, num_mesh_axes=2)
register_layout("gshard_few", GSHARD_1D, num_mesh_axes=1, annotated=PAPERS_TENSORS)
register_layout("gspmd_few", GSPMD_2D, num_mesh_axes=2, annotated=PAPERS_TENSORS)
register_layout("gspmd_attempt_1", GSPMD_ATTEMPT_1, num_mesh_axes=2)
register_layout("gspmd_attempt_2", GSPMD_ATTEMPT_2, num_mesh_axes=2)
register_layout("pipeline", PIPELINE_1D, num_mesh_axes=1)
register_layout("pipeline_data", PIPELINE_1D_DATA, num_mesh_axes=1)
register_layout("pipeline_gshard", PIPELINE_2D, num_mesh_axes=2)
register_layout("pipeline_gspmd", PIPELINE_3D, num_mesh_axes=3)
register_layout("spatial", SPATIAL_1D, num_mesh_axes=1)
register_layout("spatial_data", SPATIAL_2D, num_mesh_axes=2)

_AUTO_LAYOUTS = {1: "gshard", 2: "gspmd", 3: "pipeline_gspmd"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A device mesh and the axis rules that shard tensors over it.

    Attributes:
      mesh: the devices.
      rules: in order of priority.
      outer_axes: the logical axes of the dimensions that vectorisation adds in front of every tensor, see `vectorized`.
      annotated: the completion mode: the logical axes of the tensors that `annotate` annotates, of one repeat; XLA
        completes the sharding of the others. None: it annotates all. Inputs and outputs of a program always have one.

    The methods raise ValueError for an unknown or repeated logical axis, and UserError where the rules assign two
    logical axes of one tensor to one mesh axis.
    """

    mesh: DeviceMesh = DeviceMesh()
    rules: tuple[AxisRule, ...] = GSHARD_1D
    outer_axes: str = ""
    annotated: tuple[str, ...] | None = None

    @staticmethod
    def of(mesh: DeviceMesh, name: str = AUTO) -> Layout:
        """Returns a registered layout, or one written as by `rules_text`, on a mesh.

        `auto` is `gshard` on a mesh of one axis, `gspmd` on one of two, and `pipeline_gspmd` on one of three.

        Raises:
          UserError: no mesh, an unknown name, malformed rules, a layout for another number of mesh axes, or `auto` on a
            mesh of more than three axes.
        """
        definitions.check_type("the mesh", mesh, DeviceMesh)
        definitions.check_type("the name of the layout", name, str)
        if name == AUTO and len(mesh.shape) not in _AUTO_LAYOUTS:
            raise UserError(
                f"the mesh {mesh} has {len(mesh.shape)} axes, for which no layout is the usual one; register one with "
                f"`register_layout` and choose it with --set layout=NAME (docs/extending.md)."
            )
        if ":" in name or "~" in name:
            return Layout(mesh, parse_rules(name, mesh))
        name = _AUTO_LAYOUTS[len(mesh.shape)] if name == AUTO else name
        layout = LAYOUTS.get(name)
        if layout.num_mesh_axes != len(mesh.shape):
            axes = f"{layout.num_mesh_axes} ax{'i' if layout.num_mesh_axes == 1 else 'e'}s"
            fitting = [other for other in LAYOUTS.names() if LAYOUTS.get(other).num_mesh_axes == len(mesh.shape)]
            raise UserError(
                f"layout {name} is for a mesh of {axes}, the mesh is {mesh}; choose another mesh with --devices or "
                f"--mesh, or a layout with --set layout=NAME: "
                f"{', '.join(fitting) or f'none has {len(mesh.shape)} axes'}."
            )
        return Layout(mesh, layout.rules, annotated=layout.annotated)

    @property
    def unused_axes(self) -> tuple[str, ...]:
        """The mesh axes along which nothing is sharded: the devices along them make the same computations."""
        used = {axis for rule in self.rules for axis in rule.mesh_axes}
        return tuple(axis for axis in self.mesh.axis_names if axis not in used and self.mesh.axis_size(axis) > 1)

    @property
    def is_one_device(self) -> bool:
        """Whether all tensors are on one device, none of them within a function that is vectorised."""
        return self.mesh.size == 1 and not self.outer_axes

    def vectorized(self, axis: str) -> Layout:
        """Returns the layout of a function that is vectorised over a new leading dimension, the logical axis `axis`.

        The function's tensors do not have the dimension, but vectorisation keeps annotations as they are, so these must
        already be for the tensor that has it.
        """
        return dataclasses.replace(self, outer_axes=axis + self.outer_axes)

    def within_stages(self) -> Layout:
        """Returns the layout inside of a pipeline: the mesh axis of its stages shards them and stored layers alone.

        A layout may shard other logical axes, as the batch, by the same devices before and after the pipeline.
        """
        return dataclasses.replace(self, rules=tuple(map(_of_stages_alone, self.rules)))

    def unreduced(self, mesh_axis: str) -> Layout:
        """Returns the layout of the terms of a sum over the devices along `mesh_axis`, which shards nothing but U.

        See `partial`: a mesh axis has one use in a tensor, so what else it shards is complete in each term, also where
        a rule has a second mesh axis for it: the sum would be on the first one.
        """
        kept = (rule for rule in self.rules if not (rule.fallback and rule.mesh_axes[0] == mesh_axis))
        others = [(rule, tuple(axis for axis in rule.mesh_axes if axis != mesh_axis)) for rule in kept]
        rules = (dataclasses.replace(rule, mesh_axes=axes) for rule, axes in others if axes)
        return dataclasses.replace(self, rules=(AxisRule(UNREDUCED, (mesh_axis,)), *rules))

    def mesh_axes(self, logical_axes: str) -> tuple[str | None, ...]:
        """Returns for each dimension the mesh axis that shards it, or None: `"EGCM" -> ("x", None, None, "y")`."""
        return self._mesh_axes(self.outer_axes + logical_axes)[len(self.outer_axes) :]

    def _mesh_axes(self, logical_axes: str) -> tuple[str | None, ...]:
        """The mesh axes as `mesh_axes` gives them, for the dimensions of the tensor after vectorisation."""
        check_logical_axes(logical_axes)
        sharded: dict[str, str] = {}  # mesh axis: logical axis
        for rule in self.rules:
            mesh_axes = [axis for axis in rule.mesh_axes if axis in self.mesh.axis_names]
            if rule.fallback:
                mesh_axes = [axis for axis in mesh_axes if axis not in sharded]
            present = [axis for axis in logical_axes if axis in rule.logical_axes]
            if not present or not mesh_axes:
                continue
            mesh_axis, logical_axis = mesh_axes[0], present[0]
            if mesh_axis in sharded:
                raise UserError(
                    f"tensor {logical_axes}: logical axes {sharded[mesh_axis]} and {logical_axis} are both assigned to "
                    f"mesh axis {mesh_axis}. Change the layout: name both in one axis rule, which shards the first of "
                    f"them, or let the later rule fall back ({logical_axis}~{mesh_axis})."
                )
            sharded[mesh_axis] = logical_axis
        mesh_axis_of = {logical: mesh for mesh, logical in sharded.items()}
        return tuple(mesh_axis_of.get(axis) for axis in logical_axes)

    def dims_mapping(self, logical_axes: str) -> tuple[int, ...]:
        """Returns for each dimension the index of its mesh axis, -1 where it is not sharded; see `spmd.mesh_split`."""
        return self._indices(self.mesh_axes(logical_axes))

    def _indices(self, mesh_axes: tuple[str | None, ...]) -> tuple[int, ...]:
        names = self.mesh.axis_names
        return tuple(spmd.REPLICATED_DIMENSION if axis is None else names.index(axis) for axis in mesh_axes)

    def num_shards(self, logical_axes: str, axis: str) -> int:
        """Returns the number of shards along the logical axis `axis` of a tensor with these `logical_axes`."""
        return self.mesh.axis_size(self.mesh_axes(logical_axes)[logical_axes.index(axis)])

    def annotate(self, tensor: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Annotates `tensor`, which has these `logical_axes`, with its sharding (a sharding constraint).

        The value is unchanged.

        Raises:
          ValueError: there are more or fewer logical axes than dimensions.
        """
        if len(logical_axes) != tf.TensorShape(tensor.shape).rank:
            raise ValueError(
                f"logical axes {logical_axes!r} name {len(logical_axes)} dimensions, the tensor has shape "
                f"{tuple(tensor.shape)}."
            )
        if self.mesh.size == 1 or not self._is_annotated(logical_axes):
            return tensor
        mapping = self._indices(self._mesh_axes(self.outer_axes + logical_axes))
        return spmd.mesh_split(tensor, self.mesh.devices, mapping, outer_dims=len(self.outer_axes))

    def _is_annotated(self, logical_axes: str) -> bool:
        """Whether a tensor is annotated: in this mode those that are listed, stacked over repeats too, and terms."""
        listed = self.annotated is None or logical_axes.lstrip("Rr") in self.annotated
        return listed or UNREDUCED in logical_axes


def _of_stages_alone(rule: AxisRule) -> AxisRule:
    """Returns the rule, of stages and stored layers alone if it is the rule of stages."""
    if "P" not in rule.logical_axes:
        return rule
    return dataclasses.replace(rule, logical_axes="".join(axis for axis in rule.logical_axes if axis in "PR"))
