"""What was imported is exported as it was, and changed weights as changed tensors; another model is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from lingvo_moe.data.tokenizer import SIDES
from lingvo_moe.errors import UserError
from lingvo_moe.importing import export, hugging_face
from lingvo_moe.testing import hugging_face_models
from lingvo_moe.utils import tensor_files
from lingvo_moe.utils.hashes import sha256

LIKE, LOGDIR = "--like=model", "--logdir=log"
FILE, INDEX = "model.safetensors", hugging_face_models.INDEX


@dataclasses.dataclass(frozen=True)
class Case:
    """An imported model, its directory, and one for an export."""

    directory: pathlib.Path
    output: pathlib.Path

    @property
    def like(self) -> hugging_face.Described:
        return hugging_face.describe(self.directory, LIKE)

    @property
    def theta(self) -> dict[str, np.ndarray]:
        return hugging_face.read(self.directory, LIKE).theta

    @property
    def trained(self) -> export.Trained:
        """As the log directory of an import has it."""
        like = self.like
        shapes = {path: list(spec.shape) for path, spec in like.places.specs.items()}
        return export.Trained(like.name, like.model, shapes, [sha256(like.tokenizers[side].model) for side in SIDES])

    def export(self, theta: dict[str, np.ndarray], dtype: str = "float32"):
        export.check_output(self.output)
        export.write(self.output, self.directory, self.like, theta.__getitem__, dtype)


def make(path: pathlib.Path, model: str) -> Case:
    hugging_face_models.write(path / "model", model)
    return Case(path / "model", path / "out" / "exported")


@pytest.fixture(params=list(hugging_face_models.CONFIGS))
def case(request, tmp_path) -> Case:
    return make(tmp_path, request.param)


@pytest.fixture
def sparse(tmp_path) -> Case:
    return make(tmp_path, "nllb_moe")


def tensors_of(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def is_scaled(name: str) -> bool:
    """Whether import multiplies a tensor: that and the division are rounded, so the last bit may differ."""
    return (".experts." in name and ".fc2." in name) or name == "shared.weight"


def test_what_was_imported_comes_back(case):
    """All tensors and files, bit for bit but for scaled ones; it can be imported again."""
    theta = case.theta
    case.export(theta)
    found, expected = tensors_of(case.output), tensors_of(case.directory)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == np.float32 and found[name].shape == value.shape
        np.testing.assert_array_max_ulp(found[name], value, 1 if is_scaled(name) else 0)
    others = {path.name for path in case.directory.iterdir() if not path.name.startswith("model")}
    assert {path.name for path in case.output.iterdir()} == {*others, FILE}
    assert all((case.output / file).read_bytes() == (case.directory / file).read_bytes() for file in others)
    with safetensors.safe_open(case.output / FILE, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    again = hugging_face.read(case.output, LIKE)
    assert again.tokenizers == case.like.tokenizers and again.theta.keys() == theta.keys()
    for path, value in theta.items():
        is_of_t5 = "shared.weight" in expected and path == "embedding/table"
        np.testing.assert_array_max_ulp(again.theta[path], value, 1 if "wo" in path or is_of_t5 else 0)


def test_changed_weights_are_changed_tensors(sparse):
    """Those of the changed paths, and no others."""
    theta = sparse.theta
    changed = ("embedding/table", "encoder/layer_1/feed_forward/wi", "decoder/layer_0/self_attention/key_bias")
    sparse.export(theta | {path: theta[path] + 1 for path in changed})
    before = tensors_of(sparse.directory)
    differ = {
        name
        for name, value in tensors_of(sparse.output).items()
        if not np.array_equal(value, before[name]) and not is_scaled(name)
    }
    assert differ == {place.tensor for path in changed for place in sparse.like.places.of(path)}
    assert len(differ) == 1 + 2 * 4 + 2


@pytest.mark.parametrize("limit, files", [(160_000, 4), (50_000, 14), (700_000, 1)])
def test_large_models_are_in_several_files(sparse, monkeypatch, limit, files):
    """The index says in which file a tensor is. One that is larger than a file's limit has a file of its own."""
    monkeypatch.setattr(export, "MAX_FILE_BYTES", limit)
    theta = sparse.theta
    sparse.export(theta)
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    assert sorted(path.name for path in sparse.output.glob("*.safetensors")) == (names if files > 1 else [FILE])
    assert (sparse.output / INDEX).exists() == (files > 1)
    if files > 1:
        of_files = {name: load_file(sparse.output / name) for name in names}
        index = json.loads((sparse.output / INDEX).read_text())
        assert index["weight_map"] == {tensor: name for name, found in of_files.items() for tensor in found}
        assert index["metadata"] == json.loads((sparse.directory / INDEX).read_text())["metadata"]
        sizes = [sum(value.nbytes for value in found.values()) for found in of_files.values()]
        assert all(size <= limit or len(of_files[name]) == 1 for name, size in zip(names, sizes))
    again = hugging_face.read(sparse.output, LIKE).theta
    assert all(np.allclose(again[path], value, rtol=1e-6, atol=0) for path, value in theta.items())


def test_weights_that_were_bfloat16_come_back_as_bfloat16(sparse):
    """Bit for bit: one bit of a float32 is lost in rounding. The sizes of the index are those of the dtype."""
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors_of(sparse.directory).items()}
    for path in sparse.directory.glob("model*"):
        path.unlink()
    save_file(rounded, sparse.directory / FILE)
    sparse.export(sparse.theta, "bfloat16")
    for name, value in tensors_of(sparse.output).items():
        assert value.dtype == ml_dtypes.bfloat16 and value.tobytes() == rounded[name].tobytes(), name


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"encoder_layers": 6}, "model.num_layers is 8, but that of --like=model, as it is imported, is 10; name the"),
        ({"encoder_layers": 6, "decoder_layers": 2}, "model.num_encoder_layers is 4, but .* is 6"),
        ({"d_model": 64}, "model.model_dim is 32, but .* is 64"),
        ({"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}, "model.hidden_dim is 64, but .* is 32"),
        ({"encoder_attention_heads": 2, "decoder_attention_heads": 2}, "model.num_heads is 4, but .* is 2"),
        ({"vocab_size": 507}, "model.source_vocabulary is 506, but .* is 507"),
        ({"num_experts": 8}, "model.num_experts is 4, but .* is 8"),
        ({"decoder_sparse_step": 4}, r"model.layer_pattern is \('dense', 'moe'\), but .* is \('dense', 'dense', "),
        ({"encoder_sparse_step": 4}, r"model.encoder_layer_pattern is \(\), but .* is \('dense', 'dense', "),
    ],
)
def test_a_model_of_other_dimensions_is_refused(sparse, changes, message):
    """The message names the field, both values and the remedy."""
    trained = sparse.trained
    config = json.loads((sparse.directory / "config.json").read_text())
    (sparse.directory / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=f"^--logdir=log: {message}"):
        export.check(trained, LOGDIR, sparse.like, LIKE)


def test_a_model_that_hugging_face_would_compute_otherwise_is_refused(sparse, caplog):
    """Of another family, epsilon or tokenizer. A checkpoint without the tokenizer's hash is a warning."""
    trained, like = sparse.trained, sparse.like
    export.check(trained, LOGDIR, like, LIKE)
    assert not caplog.records
    export.check(trained._replace(tokenizer_hashes=None), LOGDIR, like, LIKE)
    assert "--logdir=log does not say which tokenizer its weights were trained with; --like=model" in caplog.text
    epsilon = dataclasses.replace(trained.model, norm_epsilon=0.001)
    table = {**trained.shapes, "embedding/table": [507, 32]}
    for changed, message in (
        (
            trained._replace(name="m4.Pocket"),
            "--logdir=log is of m4.Pocket; only the models m2m100.*, nllb.*, opus.* have",
        ),
        (trained._replace(model=epsilon), "--logdir=log: model.norm_epsilon is 0.001, but that of .* is 1e-05"),
        (trained._replace(shapes=table), r"the weight embedding/table has the shape \[507, 32\], but .* \[506, 32\]"),
        (
            trained._replace(tokenizer_hashes=["0", "0"]),
            "--logdir=log: its weights are those of another tokenizer than that of --like=model; name the directory",
        ),
    ):
        with pytest.raises(UserError, match=message):
            export.check(changed, LOGDIR, like, LIKE)


def test_an_interrupted_export_leaves_nothing(sparse, monkeypatch):
    """Neither a full disk in the third file nor Ctrl-C while weights are read; the same export works afterwards."""
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 160_000)
    theta, saved, original = sparse.theta, [], tensor_files.save

    def save(name, file, *others):
        saved.append(file)
        if len(saved) == 3:
            raise UserError(f"{name}: cannot be written")
        original(name, file, *others)

    with monkeypatch.context() as patched, pytest.raises(UserError, match="--output=.*exported: cannot be written"):
        patched.setattr(tensor_files, "save", save)
        sparse.export(theta)
    assert saved[0].name == "model-00001-of-00004.safetensors" and not list(sparse.output.parent.iterdir())

    def interrupt(path: str) -> np.ndarray:
        if path == "encoder/norm/bias":
            raise KeyboardInterrupt
        return theta[path]

    sparse.output.mkdir()
    with pytest.raises(KeyboardInterrupt):
        export.write(sparse.output, sparse.directory, sparse.like, interrupt, "float32")
    assert [*sparse.output.parent.iterdir()] == [sparse.output] and not list(sparse.output.iterdir())
    sparse.export(theta)
    assert tensors_of(sparse.output).keys() == tensors_of(sparse.directory).keys()


def test_an_existing_export_is_kept(sparse):
    """A file is, too."""
    sparse.export(sparse.theta)
    before = {path: path.read_bytes() for path in sparse.output.iterdir()}
    with pytest.raises(UserError, match="--output=.*exported is not empty; name a new directory"):
        export.check_output(sparse.output)
    assert before == {path: path.read_bytes() for path in sparse.output.iterdir()}
    with pytest.raises(UserError, match="--output=.*config.json is not a directory; expected the name of a directory"):
        export.check_output(sparse.output / "config.json")
