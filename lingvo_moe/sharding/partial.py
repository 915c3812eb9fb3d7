"""Partial values: sums over the devices of a mesh axis whose reduction is deferred.

The third state of a tensor beside split and broadcast in OneFlow's notation (S, B, P; Yuan et al. 2021, arXiv
2110.15032), which calls it partial; "unreduced" is more precise, and U is its logical axis here, as P is a pipeline's
stages and S and B are tokens and batch. XLA needs no operator for it. A product whose contracted dimension is sharded
keeps that dimension's shards apart, as a dimension of its own: `BUh,UhO->UBO`, with U on the mesh axis of the shards.
Each device then holds one term of the sum. Linear operators pass U on; `reduce` sums over it, which the partitioner
writes as an AllReduce, or as a ReduceScatter where the layout shards the sum along the mesh axis.
docs/partial_values.md has the evidence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import UNREDUCED, Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Partial:
    """A tensor that is the sum of `terms` over their first dimension.

    It can be added to and subtracted from another one, scaled, and multiplied by complete tensors (`product`). Every
    other operator refuses it, as what is not linear needs the sum: TensorFlow's and the arithmetic of Python with a
    UserError (a ValueError), other operators of Python and NumPy's functions with a TypeError.

    Attributes:
      terms: `[U, ...]`; mesh axis `mesh_axis` shards U.
      logical_axes: of the sum, without U.
      mesh_axis: along which each device has a term of its own.
      layout: of complete tensors.
    """

    terms: tf.Tensor
    logical_axes: str
    mesh_axis: str
    layout: Layout

    __array_ufunc__ = None  # NumPy leaves its operators to this class

    @property
    def shape(self) -> tf.TensorShape:
        """Raises UserError, as conversion to a tensor does: operators with lists of operands read shapes first."""
        raise self._refusal()

    def __add__(self, other: Partial) -> Partial:
        """Adds term by term; raises UserError for a complete tensor, and for a sum along another mesh axis."""
        self._check_same_kind(other)
        return self._with(self.terms + other.terms)

    def __sub__(self, other: Partial) -> Partial:
        """Subtracts term by term; raises UserError as `+` does."""
        self._check_same_kind(other)
        return self._with(self.terms - other.terms)

    def __neg__(self) -> Partial:
        """Negates each term."""
        return self._with(-self.terms)

    def __pos__(self) -> Partial:
        """Returns the same sum."""
        return self

    def __mul__(self, factor: float | tf.Tensor) -> Partial:
        """Scales by a number or a complete scalar; raises UserError for another factor, see `product`."""
        self._check_scalar(factor)
        return self._with(self.terms * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | tf.Tensor) -> Partial:
        """Divides by a number or a complete scalar; raises UserError for another divisor."""
        self._check_scalar(divisor)
        return self._with(self.terms / divisor)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        """Raises UserError: TensorFlow calls it for every operator that is given this value, and may reword it."""
        del dtype, name
        raise self._refusal()

    def _refuse(self, *operands: Any, **options: Any) -> Any:
        """Raises UserError."""
        del operands, options
        raise self._refusal()

    __array__ = __bool__ = __float__ = __int__ = __iter__ = __getitem__ = _refuse
    __abs__ = __pow__ = __rpow__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__  # which defining `==` would take away

    def __radd__(self, other: Any) -> Partial:
        """Adds to the 0 with which `sum` begins; raises UserError for anything else."""
        if isinstance(other, int) and other == 0:
            return self
        raise self._added_to_complete()

    def __rsub__(self, other: Any) -> Partial:
        """Raises UserError: what it is subtracted from is no partial sum."""
        del other
        raise self._added_to_complete()

    def __str__(self) -> str:
        shape = tuple(self.terms.shape[1:])
        return f"the partial sum {self.logical_axes} {shape}, unreduced along mesh axis {self.mesh_axis},"

    def _refusal(self) -> UserError:
        return UserError(
            f"{self} is passed to an operator that needs a complete tensor: it may not be linear. Call `reduce` first; "
            f"+, -, scaling and `product` with a complete tensor take partial sums."
        )

    def _with(self, terms: tf.Tensor) -> Partial:
        return _annotated(terms, self.logical_axes, self.mesh_axis, self.layout)

    def _added_to_complete(self) -> UserError:
        return UserError(
            f"{self} is added to or subtracted from a complete tensor, which would count once for each term. "
            f"`reduce` it first."
        )

    def _check_same_kind(self, other):
        if not isinstance(other, Partial):
            raise self._added_to_complete()
        if (self.logical_axes, self.mesh_axis) != (
            other.logical_axes,
            other.mesh_axis,
        ) or self.terms.shape != other.terms.shape:
            raise UserError(f"{self} and {other} are not sums of the same kind; `reduce` one of them first.")

    def _check_scalar(self, factor):
        if isinstance(factor, Partial):
            raise UserError(f"{self} is multiplied by {factor}, which is not linear. `reduce` one of them first.")
        rank = factor.shape.rank if isinstance(factor, tf.Tensor) else np.ndim(factor)
        if rank:
            raise UserError(f"{self} is scaled by a tensor of rank {rank}; write a `product`, which names dimensions.")


def partial_sum(equation: str, left: tf.Tensor, right: tf.Tensor, layout: Layout) -> Partial:
    """A product whose sum over the shards of its contracted dimension is deferred: S(1), S(0) -> P.

    Args:
      equation: of an einsum, in logical axes: `BTH,HM->BTM`. The layout shards one of the contracted axes, the same
        way in both factors.
      left: a complete tensor.
      right: another.
      layout: of the factors, and of the sum.

    Raises:
      UserError: no contracted axis is sharded, more than one is, the factors shard it differently, or unequally; or the
        equation is malformed.
    """
    left_axes, right_axes, outputs = parse_product(equation)
    contracted, mesh_axis = _deferred(equation, layout)
    count = layout.mesh.axis_size(mesh_axis)
    parts = []
    for tensor, axes in ((left, left_axes), (right, right_axes)):
        size = tensor.shape[axes.index(contracted)]
        if size % count:
            raise UserError(
                f"partial_sum {equation}: {contracted} is {size}, which the {count} devices along mesh axis "
                f"{mesh_axis} do not divide; each needs an equal part."
            )
        parts.append(_split(layout.annotate(tensor, axes), axes, contracted, mesh_axis, layout))
    split_axes = [axes.replace(contracted, UNREDUCED + contracted) for axes in (left_axes, right_axes)]
    terms = tf.einsum(f"{','.join(split_axes)}->{UNREDUCED}{outputs}", *parts)
    return _annotated(terms, outputs, mesh_axis, layout)


def product(equation: str, left: Partial | tf.Tensor, right: Partial | tf.Tensor) -> Partial:
    """An einsum of a partial sum and a complete tensor, in either order: P, B -> P and B, P -> P.

    Args:
      equation: in logical axes, without U: `BTM,MH->BTH`.
      left: a partial sum, or a complete tensor that is not sharded along the mesh axis of the partial one.
      right: the other one.

    Raises:
      UserError: both or none of them are partial, logical axes other than the partial sum's, or a sharded factor.
    """
    left_axes, right_axes, outputs = parse_product(equation)
    if isinstance(left, Partial) and not isinstance(right, Partial):
        return _product(equation, left, left_axes, right, right_axes, outputs)
    if isinstance(right, Partial) and not isinstance(left, Partial):
        return _product(equation, right, right_axes, left, left_axes, outputs)
    raise UserError(
        f"product {equation}: one of the factors must be a partial sum. "
        + (
            f"{left} and {right} have no linear product: `reduce` one."
            if isinstance(left, Partial)
            else "Use tf.einsum."
        )
    )


def reduce(partial: Partial) -> tf.Tensor:
    """The deferred sum, a complete tensor with its layout's sharding: P -> B by AllReduce, P -> S by ReduceScatter."""
    return partial.layout.annotate(tf.reduce_sum(partial.terms, axis=0), partial.logical_axes)


def _product(
    equation: str, partial: Partial, partial_axes: str, factor: tf.Tensor, factor_axes: str, outputs: str
) -> Partial:
    if partial_axes != partial.logical_axes:
        raise UserError(f"product {equation}: {partial} has other logical axes than {partial_axes}.")
    if partial.mesh_axis in partial.layout.mesh_axes(factor_axes):
        raise UserError(
            f"product {equation}: the factor {factor_axes} is sharded along mesh axis {partial.mesh_axis}, of which "
            f"{partial} has one term on each device. `reduce` the sum first, or give the factor's dimension "
            f"a lower-case logical axis."
        )
    factor = partial.layout.annotate(factor, factor_axes)
    terms = tf.einsum(f"{UNREDUCED}{partial_axes},{factor_axes}->{UNREDUCED}{outputs}", partial.terms, factor)
    return _annotated(terms, outputs, partial.mesh_axis, partial.layout)


def _annotated(terms: tf.Tensor, logical_axes: str, mesh_axis: str, layout: Layout) -> Partial:
    terms = layout.unreduced(mesh_axis).annotate(terms, UNREDUCED + logical_axes)
    return Partial(terms, logical_axes, mesh_axis, layout)


def _split(tensor: tf.Tensor, axes: str, contracted: str, mesh_axis: str, layout: Layout) -> tf.Tensor:
    """`[..., K, ...]` to `[..., U, K / U, ...]`: the shards along a mesh axis as a dimension of their own.

    What is left of K is not sharded, also where the layout has another mesh axis for it: a sum over that axis would not
    be deferred.
    """
    position, count = axes.index(contracted), layout.mesh.axis_size(mesh_axis)
    shape = tensor.shape
    parts = tf.reshape(tensor, (*shape[:position], count, shape[position] // count, *shape[position + 1 :]))
    return layout.unreduced(mesh_axis).annotate(parts, axes.replace(contracted, UNREDUCED + contracted.lower()))


def _deferred(equation: str, layout: Layout) -> tuple[str, str]:
    """Returns the contracted logical axis that is sharded in both factors, and its mesh axis."""
    left, right, outputs = parse_product(equation)
    found = []
    for axis in (axis for axis in left if axis in right and axis not in outputs):
        of_left, of_right = (layout.mesh_axes(axes)[axes.index(axis)] for axes in (left, right))
        if of_left != of_right:
            raise UserError(
                f"partial_sum {equation}: {axis} is sharded along {of_left} in {left} and along {of_right} in {right}; "
                f"a partial sum needs the same sharding. Change an axis rule of the layout."
            )
        found += [(axis, of_left)] if of_left else []
    if len(found) != 1:
        raise UserError(
            f"partial_sum {equation}: the layout shards {len(found)} of the contracted axes; one must be. "
            f"{'Use tf.einsum: the product is complete.' if not found else 'Contract one of them at a time.'}"
        )
    contracted, _ = found[0]
    if contracted.lower() in left + right:
        raise UserError(
            f"partial_sum {equation}: {contracted} and {contracted.lower()} are two logical axes that differ in "
            f"case alone. Rename one."
        )
    return found[0]


def parse_product(equation: str) -> tuple[str, str, str]:
    """Returns the logical axes of two factors and of their product; raises UserError for another equation."""
    factors, arrow, outputs = equation.partition("->")
    left, comma, right = factors.partition(",")
    named = left + right + outputs
    if not (arrow and comma and named.isalpha()) or UNREDUCED in named:
        raise UserError(
            f"equation {equation!r} cannot be parsed; expected the logical axes of two factors and of their product, "
            f"without {UNREDUCED}: BTH,HM->BTM."
        )
    return left, right, outputs
