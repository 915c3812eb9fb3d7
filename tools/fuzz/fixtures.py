"""Valid inputs of every format that is read, made once; the fuzzer corrupts copies of them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import struct

import jax
import numpy as np

from lingvo_moe import tree
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.steps import weight_specs
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing.plans import training_plan
from lingvo_moe.training import hyperparameters, weights_conversion
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.summary import SummaryWriter
from tools.report import layers, measured, searches
from tools.report.layers import LayerPair
from tools.report.measured import Measured, Time
from tools.report.searches import LayoutSearch

# The steps of the older and of the newer checkpoint.
STEPS = (4, 8)
_PO = 'msgid ""\nmsgstr ""\n"Language: de\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"\n'


@dataclasses.dataclass(frozen=True)
class Fixtures:
    """The valid inputs.

    Attributes:
      directory: holds `corpus`, `tokenizers`, `log` (two checkpoints of the tiny model), `other` (one of another
        model), `catalogs`, `plans`, `card` (curves and scores of a translation model); `weights.safetensors`,
        `program.zip`, `sentences.txt`; results of tools, `layer_pairs.json`, `collective_times.json`,
        `layout_searches.json` and `ranking.json`.
    """

    directory: pathlib.Path


def make(directory: pathlib.Path) -> Fixtures:
    """Makes all inputs in an empty directory; lowers one program, compiles none."""
    data = tiny.make_data(directory)
    shutil.rmtree(directory / "texts")
    config = tiny.tiny(data)
    specs = config.steps.state_specs()
    for step in STEPS:
        _save(directory / "log", specs, step)
    hyperparameters.save(directory / "log", hyperparameters.of(tiny.MODEL, config))
    other = tiny.tiny(data, "model.hidden_dim=64").steps.state_specs()
    _save(directory / "other", other, STEPS[0])
    weights_conversion.to_safetensors(Checkpoints(directory / "log"), STEPS[1], directory / "weights.safetensors")
    assert weight_specs(config.model.weights()).keys() == specs["theta"].keys()
    config.steps.evaluate(config.input.specs()).save(str(directory / "program.zip"))
    _write_catalogs(directory / "catalogs")
    (directory / "plans").mkdir()
    for name in ("m4.MoE128E12L", "m4.MoE128E12L.both_sides"):
        training_plan("m4.MoE128E12L", 128, num_experts=128).save(str(directory / "plans" / f"{name}.json"))
    _write_results(directory)
    _write_card(directory / "card")
    (directory / "sentences.txt").write_text("der eert\nesuoh wen\n\n", encoding="utf-8")
    return Fixtures(directory)


def _save(logdir: pathlib.Path, specs: dict, step: int):
    """Saves a checkpoint of random values; `specs` are of a training state."""
    random = np.random.RandomState(step)

    def value(spec: Spec) -> jax.Array:
        return jax.numpy.asarray(random.normal(size=spec.shape).astype(spec.dtype))

    state = tree.map_leaves(value, specs) | {"step": jax.numpy.int32(step)}
    checkpoints = Checkpoints(logdir, keep=len(STEPS))
    checkpoints.save(tiny.MODEL, state, {"next": step, "rejected": 0})
    checkpoints.close()


def _write_results(directory: pathlib.Path):
    seconds = {"gating": 0.5, "experts": 1.0}
    pairs = [LayerPair(f"m4.MoE{n}E12L", n, n, 2048 * n, seconds, seconds, {"all-to-all": 0.1}) for n in (128, 2048)]
    layers.save(pairs, directory / "layer_pairs.json")
    times = [
        Time(name, size, 1, n, 0.5, 1.0) for n in (2, 4) for size in measured.SIZES for name in measured.OPERATIONS
    ]
    measured.save(Measured("a processor", 2, 20, tuple(times)), directory / "collective_times.json")
    searches.save([LayoutSearch("m4.MoE128E12L", 9, 2, 1.5, 2.0, 1.0, ("mesh=8",))], directory / "layout_searches.json")
    result = {"fits": True, "predicted_seconds": 1.0, "seconds": 1.1, "predicted_bytes": 1, "bytes": 2}
    (directory / "ranking.json").write_text(json.dumps({"seed": 1, "results": [result] * 2}), encoding="utf-8")


def _write_card(directory: pathlib.Path):
    for name, scalars in (("train", {"padding/target": 0.2}), ("valid", {"cross_entropy": 3.0, "source_gain": 1.0})):
        writer = SummaryWriter(directory / "log", name)
        writer.write(100, scalars)
        writer.close()
    measures = {"bleu": 11.0, "copy_bleu": 2.0, "chrf": 30.0, "copy_chrf": 8.0}
    scores = [{"language": name, "train_pairs": 50, "test_pairs": 10, **measures} for name in ("de", "fr")]
    (directory / "scores.json").write_text(json.dumps({"scores": scores}), encoding="utf-8")


def _write_catalogs(directory: pathlib.Path):
    """Writes a catalog of each format, and the English that one of them needs."""
    directory.mkdir()
    random = np.random.RandomState(0)
    texts = [" ".join(random.choice(tiny.WORDS, random.randint(2, 8))) for _ in range(150)]
    pairs = [(text, text[::-1]) for text in texts]
    (directory / "de.tsv").write_text("".join(f"{german}\t{english}\n" for english, german in pairs), encoding="utf-8")
    (directory / "all.tsv").write_text(
        "".join(f"fr\t{other}\t{english}\n" for english, other in pairs), encoding="utf-8"
    )
    (directory / "de.po").write_text(
        _PO + "".join(f'\nmsgid "{e}"\nmsgstr "{g}"\n' for e, g in pairs), encoding="utf-8"
    )
    for name, side in (("en", 0), ("de", 1)):
        messages = {f"key{number}": pair[side] for number, pair in enumerate(pairs)}
        (directory / f"{name}.json").write_text(json.dumps(messages), encoding="utf-8")
    (directory / "de.mo").write_bytes(_mo([("", "Language: de\nContent-Type: text/plain; charset=UTF-8\n"), *pairs]))


def _mo(pairs: list[tuple[str, str]]) -> bytes:
    """Returns a compiled catalog, as msgfmt writes one."""
    columns = [[text.encode() for text in column] for column in zip(*sorted(pairs))]
    starts = [28, 28 + 8 * len(pairs)]
    at, tables, texts = 28 + 16 * len(pairs), b"", b""
    for column in columns:
        for text in column:
            tables += struct.pack("<2I", len(text), at)
            texts, at = texts + text + b"\0", at + len(text) + 1
    return struct.pack("<7I", 0x950412DE, 0, len(pairs), *starts, 0, 0) + tables + texts
