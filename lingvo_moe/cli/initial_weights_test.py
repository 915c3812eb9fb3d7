"""Protects `train --initial_weights` and `--initial_embeddings`: of the model's own sizes, for new training alone."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from lingvo_moe import experiment, overrides, tree
from lingvo_moe.cli import initial_weights
from lingvo_moe.cli.run_config import TrainConfig
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.vocabularies import piece_vectors, tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.steps import weight_specs
from lingvo_moe.testing.corpora import write_corpus
from lingvo_moe.training import weights_conversion, weights_file
from lingvo_moe.training.checkpoint import Checkpoints

NAME = "m4.Quickstart"
TINY = ["model.model_dim=16", "model.hidden_dim=8", "model.num_heads=2", "model.head_dim=8", "model.num_experts=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    pairs = [(f"Haus Nummer {i} steht dort.", f"House number {i} stands there.") for i in range(300)]
    corpus = Corpus.open(write_corpus(directory / "corpus", {"de": {"train": pairs}}))
    for name, sizes in (
        ("shared", {"shared": 400}),
        ("two", {"source": 400, "target": 60}),
        ("small", {"source": 310, "target": 60}),
    ):
        tokenizers, _ = tokenizer_trainer.train(corpus, directory / name, sizes, 5.0, 300)
        piece_vectors.make(str(directory / f"{name}.safetensors"), corpus, tokenizers, 256, max_sentences=300)
    return directory


@pytest.fixture
def config(directory, tmp_path) -> TrainConfig:
    return TrainConfig(
        model=NAME, logdir=str(tmp_path / "log"), initial_embeddings=str(directory / "shared.safetensors")
    )


def _experiment(directory, *changes: str):
    return overrides.apply(experiment.get(NAME), [f"tokenizers={directory / 'shared'}", *changes])


def test_the_tied_table_has_the_vectors_of_the_file(directory, config):
    """And random rows for the pieces that the tokenizer lacks."""
    same = _experiment(directory, "model.source_vocabulary=8000")
    (path, table), *others = initial_weights.embeddings(config, NAME, same).items()
    expected = piece_vectors.read(config.initial_embeddings, Tokenizers.load(directory / "shared"), "--flag")
    assert path == "embedding/table" and table.shape == (8000, 256) and not others
    np.testing.assert_array_equal(table[: len(expected.source)], expected.source)


def test_tables_of_two_vocabularies_have_the_vectors_of_their_sides(directory, config):
    two = dataclasses.replace(config, initial_embeddings=str(directory / "two.safetensors"))
    tokenizers = f"tokenizers={directory / 'two'}"
    tables = initial_weights.embeddings(two, NAME, _experiment(directory, tokenizers))
    assert {path: table.shape for path, table in tables.items()} == {
        "source_embedding/table": (24_000, 256),
        "embedding/table": (8000, 256),
    }
    expected = piece_vectors.read(two.initial_embeddings, Tokenizers.load(directory / "two"), "--flag")
    for path, side in (("source_embedding/table", expected.source), ("embedding/table", expected.target)):
        np.testing.assert_array_equal(tables[path][: len(side)], side)
    with pytest.raises(UserError, match="both sides share one table, but .*two has two tokenizers"):
        initial_weights.embeddings(two, NAME, _experiment(directory, tokenizers, "model.source_vocabulary=8000"))


def test_weights_of_a_file_are_read_and_the_file_is_named(tmp_path, caplog):
    """Exact values by path, and messages that name the user's file: no temporary copy is made."""
    specs = tree.flatten(weight_specs(experiment.get(NAME, TINY).model.weights()))
    theta = {path: np.full(spec.shape, number, spec.dtype) for number, (path, spec) in enumerate(specs.items())}
    with contextlib.closing(Checkpoints(tmp_path / "given", keep=1)) as checkpoints:
        checkpoints.save_weights(7, NAME, tree.unflatten(theta), "a test")
    file = tmp_path / "given.safetensors"
    weights_conversion.to_safetensors(checkpoints, 7, file)

    config = TrainConfig(model=NAME, logdir=str(tmp_path / "log"), initial_weights=str(file))
    caplog.set_level("INFO")
    directory, values = initial_weights.weights(config, NAME, experiment.get(NAME, TINY))
    assert directory is None and values.keys() == theta.keys()
    assert all(np.array_equal(value, theta[path]) for path, value in values.items())
    assert caplog.messages[-1] == f"starting with the weights of step 7 ({file})"
    with pytest.raises(UserError, match=f"--initial_weights={file} does not hold the weights of {NAME}: "):
        initial_weights.weights(config, NAME, experiment.get(NAME))

    config = dataclasses.replace(config, initial_weights=str(tmp_path / "given"))
    assert initial_weights.weights(config, NAME, experiment.get(NAME, TINY)) == (tmp_path / "given", {})


def test_a_file_says_which_tokenizers_it_was_trained_with(directory, tmp_path):
    """Those of the new training, or of --initial_tokenizers: with others, each row would stand for another piece."""
    small = experiment.get(NAME, [*TINY, "model.source_vocabulary=408", "model.target_vocabulary=400"])
    specs = tree.flatten(weight_specs(small.model.weights()))
    of_two = list(small.texts.open_readers("", directory / "two").fingerprints)
    theta = {path: np.zeros(spec.shape, spec.dtype) for path, spec in specs.items()}
    with contextlib.closing(Checkpoints(tmp_path / "given", keep=1)) as checkpoints:
        checkpoints.save_weights(7, NAME, tree.unflatten(theta), "a test", of_two)
    file = tmp_path / "given.safetensors"
    weights_conversion.to_safetensors(checkpoints, 7, file)
    for own, initial, pattern in (
        ("two", None, None),
        ("shared", "two", None),
        ("shared", None, "--initial_weights=.*: trained with other tokenizers than --tokenizers=.*shared. Pass those"),
        ("two", "small", "--initial_tokenizers=.*small: not the tokenizers that .*given.safetensors was trained with"),
    ):
        config = TrainConfig(
            model=NAME,
            logdir=str(tmp_path / "log"),
            initial_weights=str(file),
            initial_tokenizers=initial and str(directory / initial),
        )
        refused = pytest.raises(UserError, match=pattern) if pattern else contextlib.nullcontext()
        with refused:
            initial_weights.weights(config, NAME, overrides.apply(small, [f"tokenizers={directory / own}"]))


@pytest.mark.parametrize(
    ("flags", "unchecked"),
    [
        ({}, "--tokenizers=.*shared"),
        ({"initial_tokenizers": "two"}, "--initial_tokenizers=.*two"),
    ],
)
def test_a_file_that_does_not_name_its_tokenizers_is_a_warning(directory, tmp_path, caplog, flags, unchecked):
    """Nobody sees otherwise that each row may stand for another piece; the file and the flag are named."""
    file, small = _numbered_rows(tmp_path, 400)
    given = {flag: str(directory / name) for flag, name in flags.items()}
    config = TrainConfig(model=NAME, logdir=str(tmp_path / "log"), initial_weights=str(file), **given)
    initial_weights.weights(config, NAME, overrides.apply(small, [f"tokenizers={directory / 'shared'}"]))
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    pattern = f"--initial_weights={file} does not say which tokenizers .* that it was {unchecked} is not checked."
    assert re.fullmatch(pattern, warning)


def test_a_file_that_is_not_finite_is_refused(tmp_path):
    """Training would skip every step, and end with an error about its loss."""
    specs = tree.flatten(weight_specs(experiment.get(NAME, TINY).model.weights()))
    theta = {path: np.full(spec.shape, np.nan, spec.dtype) for path, spec in specs.items()}
    file = tmp_path / "given.safetensors"
    safetensors_numpy.save_file(theta, file, weights_file.metadata(weights_file.Facts(NAME, 7)))
    config = TrainConfig(model=NAME, logdir=str(tmp_path / "log"), initial_weights=str(file))
    with pytest.raises(
        UserError, match=f"--initial_weights={file}: .* has values that are not finite; use another file"
    ):
        initial_weights.weights(config, NAME, experiment.get(NAME, TINY))


def _numbered_rows(directory, vocabulary: int, *changes: str):
    """A file of weights of a tiny model whose rows are their numbers, from 1 on, and its experiment."""
    sizes = [f"model.{side}_vocabulary={vocabulary + extra}" for side, extra in (("source", 8), ("target", 0))]
    small = experiment.get(NAME, [*TINY, *sizes, *changes])
    theta = {}
    for path, spec in tree.flatten(weight_specs(small.model.weights())).items():
        theta[path] = np.broadcast_to(
            np.arange(1, spec.shape[0] + 1, dtype=spec.dtype)[(...,) + (None,) * (len(spec.shape) - 1)], spec.shape
        )
    with contextlib.closing(Checkpoints(directory / "given", keep=1)) as checkpoints:
        checkpoints.save_weights(7, NAME, tree.unflatten(theta), "a test")
    weights_conversion.to_safetensors(checkpoints, 7, directory / "given.safetensors")
    return directory / "given.safetensors", small


def test_embeddings_of_a_file_go_to_the_pieces_of_other_tokenizers(directory, tmp_path):
    """A row follows its piece, on either side; every other weight is as in the file."""
    file, small = _numbered_rows(tmp_path, 400)
    config = TrainConfig(
        model=NAME,
        logdir=str(tmp_path / "log"),
        initial_weights=str(file),
        initial_tokenizers=str(directory / "two"),
    )
    new = overrides.apply(small, [f"tokenizers={directory / 'shared'}"])
    plain = initial_weights.weights(dataclasses.replace(config, initial_tokenizers=None), NAME, new)[1]
    moved = initial_weights.weights(config, NAME, new)[1]
    before, after = Tokenizers.load(directory / "two"), Tokenizers.load(directory / "shared")
    for side, path in small.tied_model.tied_tables.items():
        old, pieces = (
            tokenizer.pieces(range(tokenizer.vocabulary_size))
            for tokenizer in (before.by_side[side], after.by_side[side])
        )
        kept = {row: old.index(piece) for row, piece in enumerate(pieces) if piece in old}
        assert len(kept) > 20 and any(row != other for row, other in kept.items())
        for row, other in kept.items():
            assert np.all(moved[path][row] == other + 1), pieces[row]
    tables = set(small.tied_model.tied_tables.values())
    assert all(np.array_equal(moved[path], value) for path, value in plain.items() if path not in tables)


def test_other_tokenizers_need_a_file_a_tied_model_and_room(directory, tmp_path):
    """The message names the flag and the remedy."""
    file, small = _numbered_rows(tmp_path, 302)
    flags = {"model": NAME, "logdir": str(tmp_path / "log"), "initial_tokenizers": str(directory / "two")}
    other = overrides.apply(small, [f"tokenizers={directory / 'small'}"])
    (tmp_path / "untied").mkdir()
    of_untied, untied = _numbered_rows(tmp_path / "untied", 302, "model.tied_embeddings=false")
    (tmp_path / "own").mkdir()
    of_own, own = _numbered_rows(tmp_path / "own", 302, "model.tied_softmax=false")
    (tmp_path / "biased").mkdir()
    of_biased, biased = _numbered_rows(tmp_path / "biased", 302, "model.logits_bias=true", "model.sampled_softmax=0")
    for changes, given, message in (
        ({"initial_weights": str(of_untied)}, untied, "--initial_tokenizers=.*: m4.Quickstart has no tied embeddings"),
        ({"initial_weights": str(of_own)}, own, "m4.Quickstart has a softmax of its own .*whose pieces cannot go to"),
        (
            {"initial_weights": str(of_biased)},
            biased,
            "m4.Quickstart has a bias for each piece .*which cannot go to oth",
        ),
        ({}, small, "--initial_tokenizers belongs to --initial_weights; pass that flag, too"),
        ({"initial_weights": str(tmp_path / "given")}, small, "--initial_tokenizers needs a file; make one: .*convert"),
        ({"initial_weights": str(file)}, other, r"the source tokenizer has \d+ pieces, the initial weights only 310"),
    ):
        with pytest.raises(UserError, match=message):
            initial_weights.weights(TrainConfig(**flags, **changes), NAME, given)


def test_settings_of_vocabularies_are_for_no_initial_tokenizers(directory, tmp_path):
    """`tools.train_tokenizer` names these settings, but the embeddings of the file keep their sizes."""
    file, small = _numbered_rows(tmp_path, 400)
    settings = ("model.target_vocabulary=60", "source_vocabulary=302")
    config = TrainConfig(
        model=NAME,
        logdir=str(tmp_path / "log"),
        initial_weights=str(file),
        initial_tokenizers=str(directory / "two"),
        assignments=settings,
    )
    given = overrides.apply(small, [*settings, f"tokenizers={directory / 'small'}"])
    remedy = "the initial model, so leave --set model.source_vocabulary and --set model.target_vocabulary out.$"
    with pytest.raises(UserError, match=remedy):
        initial_weights.weights(config, NAME, given)
    with pytest.raises(UserError, match="another file. If a shallower model"):
        initial_weights.weights(dataclasses.replace(config, assignments=()), NAME, given)


def test_weights_of_a_shallower_model_are_deepened(tmp_path):
    """The file is checked against the model of --initial_set; weights outside of layers are as in the file."""
    file, small = _numbered_rows(tmp_path, 302)
    flags = {"model": NAME, "logdir": str(tmp_path / "log"), "initial_weights": str(file)}
    config = TrainConfig(**flags, initial_set=("num_layers=4", "num_encoder_layers=0"))
    deeper = overrides.apply(small, ["num_layers=8", "num_encoder_layers=6"])
    shapes = {path: spec.shape for path, spec in tree.flatten(weight_specs(deeper.model.weights())).items()}
    values = initial_weights.weights(config, NAME, deeper)[1]
    assert {path: value.shape for path, value in values.items()} == shapes
    np.testing.assert_array_equal(values["encoder/layer_1/self_attention/output"][:, 0, 0, 0], [1.0, 0.25, 0.25])
    np.testing.assert_array_equal(values["embedding/table"][:, 0], np.arange(302) + 1)

    wider = overrides.apply(small, ["model.target_vocabulary=400"])
    for changes, given, message in (
        ({"initial_set": ()}, deeper, f"--initial_weights={file} does not hold the weights.*--initial_set"),
        ({"initial_set": ("num_layer=4",)}, deeper, "--initial_set: num_layer: no such field.*Did you mean num_layers"),
        ({"initial_set": ("input.seed=4",)}, deeper, "--initial_set: input.seed: no such field"),
        ({}, experiment.get("unet.Small"), "--initial_set: .* has no stacks of layers"),
        (
            {},
            overrides.apply(deeper, ["model.post_norm=true"]),
            "--initial_set: copies .* would change it much .*post_",
        ),
        (
            {"initial_set": ("num_layers=4", "layer_pattern=")},
            overrides.apply(small, ["num_layers=2", "layer_pattern=moe"]),
            "--initial_set: the decoder has 1 layers, without",
        ),
        ({}, wider, "--initial_weights=.* does not hold the weights.*or another file.$"),
        ({"initial_set": ("target_vocabulary=302",)}, wider, "--initial_set: only the number of layers may differ"),
        ({"initial_weights": None}, deeper, "--initial_set belongs to --initial_weights; pass that flag, too"),
        ({"initial_weights": str(tmp_path / "given")}, deeper, "--initial_set needs a file; make one: .*convert"),
    ):
        with pytest.raises(UserError, match=message):
            initial_weights.weights(dataclasses.replace(config, **changes), NAME, given)


def test_nothing_is_read_without_the_flag_or_where_training_resumes(directory, config, tmp_path):
    assert initial_weights.weights(config, NAME, _experiment(directory)) == (None, {})
    assert initial_weights.embeddings(dataclasses.replace(config, initial_embeddings=None), NAME, None) == {}
    (tmp_path / "log" / "checkpoints" / "4").mkdir(parents=True)
    gone = dataclasses.replace(config, initial_embeddings="gone.safetensors", initial_weights="gone.safetensors")
    assert initial_weights.embeddings(gone, NAME, _experiment(directory)) == {}
    assert initial_weights.weights(gone, NAME, _experiment(directory)) == (None, {})


@pytest.mark.parametrize(
    "name, changes, flags, message",
    [
        (NAME, ["model.tied_embeddings=false"], {}, "m4.Quickstart has no tied embeddings"),
        ("unet.Small", None, {}, "unet.Small has no tied embeddings"),
        (NAME, ["model.model_dim=128", "model.num_heads=2"], {}, "vectors of 256, the model's model_dim is 128"),
        (
            NAME,
            ["model.source_vocabulary=300", "model.target_vocabulary=300"],
            {},
            "has .* pieces, the model's source_voc",
        ),
        (NAME, [], {"initial_weights": "log"}, "leave --initial_embeddings out"),
    ],
)
def test_what_does_not_fit_is_refused(name, changes, flags, message, directory, config):
    given = experiment.get(name) if changes is None else _experiment(directory, *changes)
    with pytest.raises(UserError, match=message):
        initial_weights.embeddings(dataclasses.replace(config, **flags), name, given)
