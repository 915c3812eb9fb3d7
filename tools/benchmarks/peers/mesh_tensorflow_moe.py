"""One layer of Mesh-TensorFlow's mixture of experts, forward and backward, on a mesh of one device."""

# Its packages are in an environment of its own: see environments.py.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
import types

from tools.benchmarks import protocol


def start(work: dict) -> protocol.Started:
    """See `protocol.serve`."""
    import mesh_tensorflow
    import numpy as np
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    tf.random.set_random_seed(work["seed"])
    shape = (work["rows"], work["length"], work["model_dim"])
    values = protocol.numbers(work)
    fed = tf.placeholder(tf.float32, shape)
    loss, gradients, copy = _lowered(work, fed)
    session = tf.Session(config=_one_thread(tf))
    session.run(tf.global_variables_initializer())
    session.run(copy)
    inputs = np.reshape(np.array(values, np.float32), shape)
    # A group computes every gradient and returns none, so that no copy is counted.
    fetched = [loss, tf.group(*gradients)]

    def step() -> float:
        return float(session.run(fetched, {fed: inputs})[0])

    facts = {
        "weights": sum(int(np.prod(v.shape)) for v in tf.trainable_variables()),
        "experts": work["experts"],
        "tokens": shape[0] * shape[1],
        "capacity": _capacity(tf.get_default_graph(), work),
        "first_loss": step(),
        "batch": protocol.digest(values[:1000]),
        "versions": {"mesh-tensorflow": _version(mesh_tensorflow), "tensorflow": tf.__version__},
    }
    return facts, lambda times: [step() for _ in range(times)]


def _one_thread(tf):
    """Returns the session's settings: one thread, and no removal of gradients as unread inputs of a group."""
    from tensorflow.core.protobuf import rewriter_config_pb2

    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.dependency_optimization = rewriter_config_pb2.RewriterConfig.OFF
    return config


def _lowered(work: dict, fed):
    """Returns (loss, gradients of input and weights, initialisation of the weights) as TensorFlow tensors."""
    import mesh_tensorflow as mtf
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow.transformer import moe

    mesh = mtf.Mesh(mtf.Graph(), "one_device")
    rows, length, model = (mtf.Dimension(name, work[name]) for name in ("rows", "length", "model_dim"))
    inputs = mtf.import_tf_tensor(mesh, fed, mtf.Shape([rows, length, model]))
    present = mtf.ones(mesh, mtf.Shape([rows, length]))
    outputs, aux_loss = moe.transformer_moe_layer_v1(
        inputs,
        model,
        _settings(work),
        train=True,
        variable_dtype=mtf.VariableDType(tf.float32, tf.float32, tf.float32),
        layout=mtf.convert_to_layout_rules(""),
        mesh_shape=mtf.convert_to_shape(""),
        nonpadding=present,
    )
    loss = mtf.reduce_mean(mtf.square(outputs)) + aux_loss
    variables = [variable.outputs[0] for variable in mesh.graph.trainable_variables]
    gradients = mtf.gradients([loss], [inputs, *variables])
    on_device = mtf.placement_mesh_impl.PlacementMeshImpl(mtf.Shape([]), mtf.LayoutRules([]), [""])
    lowering = mtf.Lowering(mesh.graph, {mesh: on_device})
    exported = [lowering.export_to_tf_tensor(tensor) for tensor in (loss, *gradients)]
    return exported[0], exported[1:], lowering.copy_masters_to_slices()


def _settings(work: dict) -> types.SimpleNamespace:
    """Returns the hyperparameters of the layer: GShard's gating, one group for all tokens."""
    return types.SimpleNamespace(
        moe_gating="top_2",
        moe_num_experts=work["experts"],
        moe_hidden_size=work["hidden_dim"],
        moe_group_size=work["rows"] * work["length"],
        moe_capacity_factor_train=work["capacity_factor"],
        moe_capacity_factor_eval=work["capacity_factor"],
        moe_min_expert_capacity=1,
        moe_dropout_rate=0.0,
        moe_loss_coef=1.0,
        moe_use_second_place_loss=False,
        moe_second_policy_train="random",
        moe_second_policy_eval="random",
        moe_second_threshold_train=0.2,
        moe_second_threshold_eval=0.2,
        moe_word_embed_mode=None,
        moe_z_loss=None,
        moe_output_dim=work["model_dim"],
        moe_use_experts_attention=False,
        moe_ntlb_top_k=2,
    )


def _capacity(graph, work: dict) -> int:
    """Returns the capacity of each expert from the graph: the size of the tensors of tokens by experts by capacity."""
    start = (work["rows"] * work["length"], work["experts"])
    shapes = {
        tuple(output.shape[-3:].as_list())
        for operation in graph.get_operations()
        for output in operation.outputs
        if output.shape.rank is not None and output.shape.rank >= 3
    }
    return max((shape[2] for shape in shapes if shape[:2] == start), default=0)


def _version(module) -> str:
    from importlib import metadata

    return metadata.version(module.__name__.replace("_", "-"))


if __name__ == "__main__":
    protocol.serve(start, sys.argv[1:])
