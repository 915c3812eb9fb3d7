"""Programs: a pure function as StableHLO, with the shape, dtype and sharding of every input and output.

A program is lowered from specs alone, so that tracing a model of a trillion weights creates none of them. It is all
that an engine needs: loading and running a saved program requires neither TensorFlow nor the model's code.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lingvo_moe import definitions, tree
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.utils import output_files

_FORMAT = 2
# Old enough for every runtime that reads a bundle, and new enough for what TensorFlow emits.
_STABLEHLO_VERSION = "1.8.0"
_NO_GRADIENT = "None (a gradient is, where the loss does not depend on a weight or the tape does not watch it)"
# Of `Program.windowed_einsum_mib`: what the compiler does by itself.
COMPILER_DEFAULT = -1
# The parts of the training state, if it has them, that the program `diagnose` reads.
DIAGNOSED = ("step", "seed", "theta", "ema_gap")


@dataclasses.dataclass(frozen=True)
class Argument:
    """An input or output of a program.

    Attributes:
      path: in the tree of inputs or outputs.
      shape, dtype: of the full array.
      dims_mapping: for each dimension the number of the mesh axis that shards it, -1 for none.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    dims_mapping: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A lowered function from a tree of inputs to a tree of outputs.

    Attributes:
      name: for profiles and messages.
      mesh: the device mesh of its sharding annotations.
      inputs, outputs: the leaves of the trees, in order.
      donated: paths of inputs that a call consumes; the output of the same path uses their memory.
      module: StableHLO as a portable artifact, which other versions of a runtime read as well.
      windowed_einsum_mib: the smallest tensor, in MiB, for which XLA makes a windowed einsum, with CollectivePermutes
        in a loop, where it would gather or scatter this factor or result (GShard section 3.3.2). Sizes are those of
        the whole tensor. For TPUs alone; COMPILER_DEFAULT for what the compiler does by itself.
    """

    name: str
    mesh: DeviceMesh
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    donated: tuple[str, ...]
    module: bytes = dataclasses.field(repr=False)
    windowed_einsum_mib: int = COMPILER_DEFAULT

    def check_divisible(self):
        """Raises UserError where a mesh axis does not divide a dimension that it shards: no engine could run it."""
        for argument in (*self.inputs, *self.outputs):
            for size, axis in zip(argument.shape, argument.dims_mapping):
                devices = self.mesh.shape[axis] if axis >= 0 else 1
                if size % devices:
                    raise UserError(
                        f"program {self.name}: {argument.path} {list(argument.shape)} has a dimension of {size}, which "
                        f"mesh axis {self.mesh.axis_names[axis]} of {devices} devices does not divide. Use a number of "
                        f"devices that divides it (for instance {math.gcd(size, devices)}), or change the size."
                    )

    def save(self, path: str):
        """Writes the bundle, a zip file of `program.json` and `module.bin`, and replaces `path` atomically."""
        header = {
            "format": _FORMAT,
            "name": self.name,
            "mesh": list(self.mesh.shape),
            "axis_names": list(self.mesh.axis_names),
            "donated": list(self.donated),
            "windowed_einsum_mib": self.windowed_einsum_mib,
            "inputs": [dataclasses.asdict(a) for a in self.inputs],
            "outputs": [dataclasses.asdict(a) for a in self.outputs],
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
            for name, data in (("program.json", json.dumps(header, indent=1)), ("module.bin", self.module)):
                # Without a time stamp: equal programs are equal files.
                bundle.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        with output_files.atomic_path(path) as partial:
            partial.write_bytes(buffer.getvalue())

    @staticmethod
    def load(path: str) -> Program:
        """Reads a bundle; raises UserError if the file is missing, corrupt or not a bundle."""
        try:
            with zipfile.ZipFile(path) as bundle:
                header = json.loads(bundle.read("program.json"))
                if header["format"] != _FORMAT:
                    raise ValueError(f"program format {header['format']}; this version reads {_FORMAT}")
                module = bundle.read("module.bin")
            return Program(
                header["name"],
                DeviceMesh(tuple(header["mesh"]), tuple(header.get("axis_names", ()))),
                _arguments(header["inputs"]),
                _arguments(header["outputs"]),
                tuple(header["donated"]),
                module,
                _integer(header.get("windowed_einsum_mib", COMPILER_DEFAULT)),
            )
        except FileNotFoundError:
            raise UserError(f"{path}: no such program; write it with `python -m lingvo_moe export`.") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); name a file that `export` wrote.") from None
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            KeyError,
            TypeError,
            ValueError,
            RuntimeError,  # zipfile's, for a file that seems to be encrypted or of another version
        ) as error:
            raise UserError(f"{path}: not a program bundle, or a corrupt one ({error}); export it again.") from None


def lower(
    name: str,
    function: Callable[[dict], dict],
    inputs: Mapping[str, Any],
    output_axes: Mapping[str, str],
    layout: Layout,
    donated: tuple[str, ...] = (),
) -> Program:
    """Traces a TensorFlow function into a Program.

    Args:
      name: of the program.
      function: a pure function from a tree of tensors with the specs `inputs` to a tree of tensors.
      inputs: the tree of `Spec`s.
      output_axes: the logical axes of outputs, by path. An output with the path of an input has that input's logical
        axes; scalars have none.
      layout: maps logical axes to mesh axes.
      donated: first path components of the inputs to donate, which the function returns with equal shapes under the
        same paths.

    Raises:
      ValueError: an input or output does not have one logical axis for each dimension, or has one that is unknown.
      UserError: an input is not a `Spec`, or a donated name is not an input's; the function uses tensors other than its
        inputs, or does not return a tree of tensors of static shapes, or not the donated inputs with their shapes and
        dtypes.
    """
    definitions.check_type(f"program {name}: the layout", layout, Layout)
    specs = tree.flatten(inputs)
    arguments = tuple(_argument(name, path, spec, layout) for path, spec in specs.items())
    _check_donated_names(name, specs, donated)
    with spmd.annotating_for(layout.mesh.size):
        module, results = _trace(name, function, specs)
    _check_donated(name, arguments, results, donated)
    outputs = []
    for path, (shape, dtype) in results.items():
        logical_axes = specs[path].logical_axes if path in specs else output_axes.get(path, "")
        if len(logical_axes) != len(shape):
            raise ValueError(
                f"program {name}: output {path} has shape {shape}, but its logical axes are {logical_axes!r}."
            )
        outputs.append(Argument(path, shape, dtype, layout.dims_mapping(logical_axes)))
    consumed = tuple(path for path in specs if path.split("/")[0] in donated)
    return Program(name, layout.mesh, arguments, tuple(outputs), consumed, _portable(module))


def _argument(name: str, path: str, spec: Spec, layout: Layout) -> Argument:
    """Returns the input that a `Spec` declares, with TensorFlow's name of its dtype."""
    definitions.check_type(f"program {name}: input {path}", spec, Spec)
    if len(spec.logical_axes) != len(spec.shape):
        raise ValueError(
            f"program {name}: input {path} has shape {spec.shape}, but its logical axes are {spec.logical_axes!r}."
        )
    dtype = tf.as_dtype(spec.dtype).name
    return Argument(path, tuple(map(int, spec.shape)), dtype, layout.dims_mapping(spec.logical_axes))


def _check_donated_names(name: str, specs: dict[str, Spec], donated: tuple[str, ...]):
    """Raises UserError unless each name is the first path component of an input."""
    known = sorted({path.split("/")[0] for path in specs})
    if not set(donated) <= set(known):
        raise UserError(f"program {name}: donated is {donated!r}; expected a tuple of names among {', '.join(known)}.")


def _check_donated(
    name: str,
    arguments: tuple[Argument, ...],
    results: dict[str, tuple[tuple[int, ...], str]],
    donated: tuple[str, ...],
):
    """Raises UserError where an output cannot use the memory of the donated input of its path."""

    def of_donated(forms: Iterator[tuple[str, str]]) -> dict[str, str]:
        return {path: form for path, form in forms if path.split("/")[0] in donated}

    declared = of_donated(
        (argument.path, definitions.form_of(argument.dtype, argument.shape)) for argument in arguments
    )
    returned = of_donated((path, definitions.form_of(dtype, shape)) for path, (shape, dtype) in results.items())
    definitions.check_leaves(f"program {name}", returned, declared, "its donated input")


def _trace(
    name: str, function: Callable[[dict], dict], specs: dict[str, Spec]
) -> tuple[bytes, dict[str, tuple[tuple[int, ...], str]]]:
    """Returns StableHLO as MLIR bytecode, and the shape and dtype of every output by path."""
    results: dict[str, tuple[tuple[int, ...], str]] = {}

    def flat(*tensors):
        outputs = _checked_outputs(name, function(tree.unflatten(dict(zip(specs, tensors)))))
        results.update({path: (tuple(t.shape), t.dtype.name) for path, t in outputs.items()})
        return list(outputs.values())

    compiled = tf.function(flat, jit_compile=True, autograph=False)
    arguments = [tf.TensorSpec(spec.shape, spec.dtype) for spec in specs.values()]
    if captured := compiled.get_concrete_function(*arguments).captured_inputs:
        raise UserError(
            f"program {name}: the function uses a tensor or variable that was made outside of it "
            f"({', '.join(map(definitions.form, captured[:3]))}); make it an input, or make it inside."
        )
    return compiled.experimental_get_compiler_ir(*arguments)(stage="stablehlo_serialized"), results


def _checked_outputs(name: str, returned: dict) -> dict[str, Any]:
    """Returns the outputs of a function by path, as dense tensors; raises UserError for what is no tree of tensors."""
    definitions.check_type(f"program {name}: the result of the function", returned, dict)
    outputs = tree.flatten(returned)
    for path, value in outputs.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            described = _NO_GRADIENT if value is None else f"of type {type(value).__name__}"
            raise UserError(f"program {name}: output {path} is {described}; expected a tensor.")
        if not tf.TensorShape(value.shape).is_fully_defined():
            raise UserError(f"program {name}: output {path} has shape {value.shape}; programs have static shapes.")
        if isinstance(value, tf.IndexedSlices):  # the gradient of `tf.gather`; it would become three outputs
            outputs[path] = tf.convert_to_tensor(value)
    return outputs


def _portable(module: bytes) -> bytes:
    from jax.extend.mlir.dialects import stablehlo

    return stablehlo.serialize_portable_artifact_str(module, _STABLEHLO_VERSION)


def _integer(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not an integer")
    return value


def _arguments(rows: list[dict]) -> tuple[Argument, ...]:
    return tuple(Argument(row["path"], tuple(row["shape"]), row["dtype"], tuple(row["dims_mapping"])) for row in rows)
