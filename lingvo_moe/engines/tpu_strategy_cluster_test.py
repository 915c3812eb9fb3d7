"""State and batches reach hosts that are other processes: TensorFlow servers on this machine, each with four "cores".

The servers do what the machines of a slice do, except for the TPU: they hold variables, which this process loads, feeds
and reads over the network.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lingvo_moe.utils import free_ports

pytestmark = pytest.mark.slow

_SERVER = """
import sys
import lingvo_moe
import tensorflow as tf
cluster = tf.train.ClusterSpec({"worker": sys.argv[2:]})
server = tf.distribute.Server(cluster, job_name="worker", task_index=int(sys.argv[1]))
print("listening", flush=True)
sys.stdin.read()
"""

_CLIENT = """
import sys
import numpy as np
from lingvo_moe.engines.tpu_strategy import Feed
from lingvo_moe.engines.tpu_strategy_variables import TensorSharding, ShardedVariable
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.lazy import tf


class Engine:
    hosts = devices = [f"/job:worker/replica:0/task:{core // 4}/device:CPU:0" for core in range(8)]


cluster = tf.train.ClusterSpec({"worker": sys.argv[1:]})
tf.config.experimental_connect_to_cluster(cluster, make_master_device_default=False)
layout, random = Layout.of(DeviceMesh((8,))), np.random.default_rng(0)
for logical_axes in ("EMH", "mbh"):
    value = random.normal(size=(8, 16, 4)).astype(np.float32)
    sharding = TensorSharding(Spec(value.shape, "float32", logical_axes), layout)
    variable = ShardedVariable(sharding, Engine.devices, logical_axes)
    variable.load(value)
    assert [part.device for part in variable._variables] == Engine.devices
    np.testing.assert_array_equal(np.asarray(variable), value)

ids = np.arange(32, dtype=np.int32).reshape(8, 4)
first, second = Feed(Engine, {"ids": Spec((8, 4), "int32", "BT")}, layout, 2).send([{"ids": ids}, {"ids": -ids}])["ids"]
for host, tensor, rows in ((0, first, ids[:4]), (1, second, ids[4:])):
    assert f"task:{host}" in tensor.backing_device, tensor.backing_device
    np.testing.assert_array_equal(tensor.numpy(), np.stack([rows, -rows], axis=1)[:, :, np.newaxis])
assert "job:worker" not in tf.constant(1.0).device, "what is not for the slice stays here"
"""


def _start(code: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_state_and_batches_lie_on_the_hosts_of_their_cores():
    addresses = free_ports.addresses(2)
    servers = [_start(_SERVER, str(task), *addresses) for task in range(2)]
    try:
        for server in servers:
            assert server.stdout.readline() == "listening\n", server.communicate()[1]
        client = _start(_CLIENT, *addresses)
        stderr = client.communicate(timeout=120)[1]
        assert client.returncode == 0, stderr
    finally:
        for server in servers:
            server.kill()
            server.communicate()
