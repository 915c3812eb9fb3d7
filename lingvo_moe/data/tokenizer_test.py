"""Protects tokenizers: no loss on the source side, the same ids in a graph, and errors that name corrupt files."""

from __future__ import annotations

import io
import json
import lzma
import shutil
import subprocess
import sys
import unicodedata
from pathlib import PurePosixPath

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings, strategies

from lingvo_moe.data.tokenizer import MANIFEST, SPECIAL_IDS, Tokenizer, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.utils.hashes import sha256

_CHARACTERS = strategies.characters(exclude_categories=["Cs"], exclude_characters="\0")
_TEXTS = ["Das ist ein Haus.", "Где библиотека?", "图书馆在哪里？", "この本は面白い。", "Where is the library?"]


def train(ids: dict[str, int] | None = None, **options) -> bytes:
    model = io.BytesIO()
    special = {f"{name}_id": number for name, number in (ids or SPECIAL_IDS).items()}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXTS * 5),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **special,
        **options,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    manifest = {}
    for side in ("source", "target"):
        model = train(byte_fallback=side == "source")
        (path / f"{side}.model").write_bytes(model)
        manifest[side] = {"file": f"{side}.model", "sha256": sha256(model)}
    (path / MANIFEST).write_text(json.dumps(manifest))
    return path


@pytest.fixture(scope="module")
def tokenizers(directory) -> Tokenizers:
    return Tokenizers.load(directory)


@pytest.fixture
def copy(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "copy")


@settings(max_examples=100)
@given(text=strategies.text(strategies.characters(categories=["L", "N"]), max_size=30))
def test_source_side_encodes_every_letter(tokenizers, text):
    """Byte fallback: decoding returns the text, up to compatibility forms (NFKC)."""
    (ids,) = tokenizers.source.encode([text])
    assert SPECIAL_IDS["unk"] not in ids
    (decoded,) = tokenizers.source.decode([ids])
    assert unicodedata.normalize("NFKC", decoded) == unicodedata.normalize("NFKC", text)


@pytest.mark.parametrize("text", ["🎉", "👩‍👩‍👧 ist da", "ሰላም", "𓀀𓂀", "ꙮ", "∀x ∈ ℝ: ⌈x⌉ → ∞", "a\0b", "e\u0301\u0323"])
def test_source_side_encodes_emoji_symbols_and_unseen_scripts_as_bytes(tokenizers, text):
    """Characters that the training corpus does not have."""
    (ids,) = tokenizers.source.encode([text])
    (decoded,) = tokenizers.source.decode([ids])
    assert unicodedata.normalize("NFKC", decoded) == unicodedata.normalize("NFKC", text)


@pytest.mark.parametrize("text", ["one\ntwo", "\r\n\n", "\0", "a\tb\0c\0", " ", "x" * 100_000, "Haus " * 20_000])
def test_any_text_decodes_as_one_line(tokenizers, text):
    """Line ends are white space, and no text is too long."""
    for tokenizer in (tokenizers.source, tokenizers.target):
        (decoded,) = tokenizer.decode(tokenizer.encode([text]))
        assert "\n" not in decoded
    assert tokenizers.source.decode(tokenizers.source.encode([text])) == [" ".join(text.split())]


def test_encode_returns_int32_without_bos_and_eos(tokenizers):
    """Batching adds them."""
    rows = tokenizers.source.encode([*_TEXTS, ""])
    assert all(row.dtype == np.int32 and row.ndim == 1 for row in rows)
    assert not set(np.concatenate(rows).tolist()) & set(SPECIAL_IDS.values())
    assert len(rows[-1]) == 0
    assert tokenizers.source.encode([]) == []


def test_decode_stops_at_eos_and_skips_pad_and_bos(tokenizers):
    """Rows come from beam search with padding."""
    ids = tokenizers.target.encode(["Where is the library?"])[0]
    rows = [[2, *ids, 1, 17, 18, 0, 0], np.append(ids, 0), [1], []]
    assert tokenizers.target.decode(rows) == ["Where is the library?"] * 2 + ["", ""]


def test_a_decoded_text_is_one_line(tokenizers):
    """A model may find the pieces of bytes that end a line or a column of a file."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizers.source.model)
    line = [processor.piece_to_id(piece) for piece in ("<0x61>", "<0x0A>", "<0x62>", "<0x09>", "<0x0D>", "<0x63>")]
    assert SPECIAL_IDS["unk"] not in line and tokenizers.source.decode([line]) == ["a b  c"]


def test_id_outside_of_the_vocabulary_decodes_as_unknown(tokenizers):
    """A model may have more embeddings than the tokenizer has pieces."""
    unknown = tokenizers.target.decode([[SPECIAL_IDS["unk"]]])
    assert tokenizers.target.decode([[tokenizers.target.vocabulary_size], [10**6]]) == unknown * 2


@settings(max_examples=50)
@given(texts=strategies.lists(strategies.text(_CHARACTERS), min_size=1, max_size=5))
def test_in_graph_gives_the_same_ids(tokenizers, texts):
    """The tf.data pipeline and plain Python agree."""
    for tokenizer in (tokenizers.source, tokenizers.target):
        ragged = tokenizer.in_graph().tokenize(tf.constant(texts))
        assert ragged.dtype == tf.int32
        assert ragged.to_list() == [ids.tolist() for ids in tokenizer.encode(texts)]


def test_plain_use_does_not_import_tensorflow(directory):
    """The import takes seconds, and translation does not need it."""
    code = (
        "import sys; from lingvo_moe.data.tokenizer import Tokenizers; import lingvo_moe.data.pipeline; "
        "tokenizers = Tokenizers.load(sys.argv[1]); tokenizers.source.decode(tokenizers.source.encode(['Haus'])); "
        "sys.exit('tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, directory], check=True)


def test_a_corpus_is_not_taken_for_tokenizers(tmp_path):
    """The remedy was to train tokenizers into it."""
    (tmp_path / "corpus.json").write_text("{}")
    with pytest.raises(
        UserError, match=f"^{tmp_path} is a corpus, and has no tokenizers; .*--output=TOKENIZERS` makes"
    ):
        Tokenizers.load(tmp_path)


def test_missing_files_are_errors_with_the_remedy(copy, tmp_path):
    """The error has the command that trains a tokenizer."""
    with pytest.raises(
        UserError,
        match="no directory .*nowhere; name one with --tokenizers, or train .*tools.train_tokenizer .*output=.*nowhere",
    ):
        Tokenizers.load(tmp_path / "nowhere")
    (copy / "target.model").unlink()
    with pytest.raises(UserError, match="cannot read .*target.model .No such file.*tools.train_tokenizer"):
        Tokenizers.load(copy)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"not a model at all" * 9,
    ],
)
def test_corrupt_model_is_refused(copy, corrupt):
    """Truncated, empty or other files."""
    path = copy / "source.model"
    path.write_bytes(corrupt(path.read_bytes()))
    with pytest.raises(UserError, match="source.model is not a complete SentencePiece model"):
        Tokenizer.load(path)
    with pytest.raises(UserError, match="source.model has SHA-256 .* expects .* do not belong together"):
        Tokenizers.load(copy)


def test_compressed_model_is_read(copy):
    """As the plain one is, whose hash it has."""
    plain, path = Tokenizers.load(copy), copy / "source.model"
    (copy / "source.model.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    assert Tokenizers.load(copy) == plain
    (copy / "source.model.xz").write_bytes(lzma.compress((copy / "target.model").read_bytes()))
    with pytest.raises(UserError, match="source.model.xz has SHA-256 .* do not belong together"):
        Tokenizers.load(copy)


@pytest.mark.parametrize("corrupt", [lambda data: data[:-20], lambda data: b"", lambda data: b"xz" + data])
def test_corrupt_compressed_model_is_refused(copy, corrupt):
    """Truncated, empty or other files."""
    path = copy / "source.model"
    (copy / "source.model.xz").write_bytes(corrupt(lzma.compress(path.read_bytes())))
    path.unlink()
    with pytest.raises(UserError, match="source.model.xz is not a complete xz file of at most 256 MiB; copy it again"):
        Tokenizers.load(copy)


def test_compressed_model_that_is_too_large_is_refused(copy, monkeypatch):
    """A small file cannot fill the memory."""
    path = copy / "source.model"
    (copy / "source.model.xz").write_bytes(lzma.compress(bytes(2**21)))
    path.unlink()
    monkeypatch.setattr("lingvo_moe.data.tokenizer._MAX_MODEL", 2**20)
    with pytest.raises(UserError, match="source.model.xz is not a complete xz file of at most 1 MiB"):
        Tokenizers.load(copy)


def test_swapped_models_are_refused(copy):
    """The manifest has the hash of each side."""
    shutil.copy(copy / "source.model", copy / "target.model")
    with pytest.raises(UserError, match="target.model has SHA-256"):
        Tokenizers.load(copy)


def test_other_special_ids_are_refused(tmp_path):
    """A SentencePiece model from elsewhere has other ids for pad, bos and eos."""
    path = tmp_path / "other.model"
    path.write_bytes(train({"pad": 3, "eos": 2, "bos": 1, "unk": 0}))
    with pytest.raises(UserError, match="other.model has the special ids {'pad': 3, .*expected {'pad': 0, 'eos': 1"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"source": 1, "target": 2}',
        "\xff",
        '{"source": {"file": "s", "sha256": 1}, "target": {"file": "t", "sha256": ""}}',
        '{"source": {"file": "s", "sha256": "", "names_target": true}, "target": {"file": "t", "sha256": ""}}',
        '{"source": {"file": "s", "sha256": ""}, "target": {"file": "t", "sha256": "", "language": "de", '
        '"names_target": true}}',
        '{"source": {"file": "s", "sha256": "", "language": "de", "names_target": 1}, '
        '"target": {"file": "t", "sha256": ""}}',
    ],
)
def test_corrupt_manifest_is_refused(copy, text):
    """Truncated JSON or wrong types."""
    (copy / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="tokenizer.json is corrupt or not the manifest of a tokenizer"):
        Tokenizers.load(copy)


@given(
    strategies.sampled_from(["../s", "/etc/passwd", "a/b", "", ".", "..", "c:s", "a\\b", "a\0"])
    | strategies.text(max_size=8)
)
def test_model_file_of_a_manifest_is_checked_before_it_becomes_a_path(directory, tmp_path_factory, name):
    """Property: an altered manifest cannot make the program read a file outside of the directory."""
    altered = tmp_path_factory.mktemp("altered")
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["target"]["file"] = name
    (altered / MANIFEST).write_text(json.dumps(manifest))
    shutil.copy(directory / "source.model", altered)
    with pytest.raises(UserError) as raised:
        Tokenizers.load(altered)
    refused = f"tokenizer.json, field target.file: the path {name!r} is refused" in str(raised.value)
    refused = refused or f"tokenizer.json, field target.file: {name!r} is not a plain file name" in str(raised.value)
    assert refused or (name == PurePosixPath(name).name and f"cannot read {altered}/{name} " in str(raised.value))


@pytest.fixture(scope="module")
def multilingual() -> Tokenizer:
    """A tokenizer with pieces for languages, as imported ones have."""
    return Tokenizer(train(control_symbols=["fra_Latn", "deu_Latn", "__en__"]))


def test_a_text_begins_with_the_piece_of_its_language(multilingual):
    """No text holds such a piece, and none is decoded. In a graph, texts are in no language."""
    assert multilingual.languages == ("fra_Latn", "deu_Latn", "__en__") and multilingual.language_id is None
    german = multilingual.in_language("deu_Latn", "input.source_language")
    texts = [*_TEXTS, "", "deu_Latn fra_Latn"]
    plain, tagged = multilingual.encode(texts), german.encode(texts)
    assert [ids.tolist() for ids in tagged] == [[5, *ids.tolist()] for ids in plain] and german.language_id == 5
    assert german.pieces([5]) == ["deu_Latn"] and not {4, 5, 6} & set(np.concatenate(plain).tolist())
    assert german.decode(tagged) == multilingual.decode(plain)
    ragged = german.in_graph().tokenize(tf.constant(texts))
    assert ragged.dtype == tf.int32 and ragged.to_list() == [ids.tolist() for ids in plain]


def test_languages_have_one_or_another_form(multilingual):
    """M2M-100 has `__en__`; the same tokenizer of another language is another reader of texts."""
    english = multilingual.in_language("en", "f")
    assert multilingual.language_names == ("fra_Latn", "deu_Latn", "en")
    assert multilingual.prefix_of("en") == multilingual.prefix_of("__en__") == (6,)
    assert english.language_id == 6 and english == multilingual.in_language("__en__", "f") != multilingual


@pytest.mark.parametrize(
    "language, message",
    [
        ("", "f is empty, but the tokenizers have 3 languages, .* with one of deu_Latn, en, fra_Latn"),
        ("fra_Latin", "f is 'fra_Latin', but the tokenizers have 3 languages: deu_Latn, en, .* Did you mean fra_Latn"),
        ("<s>", "f is '<s>', but the tokenizers have 3 languages"),
        ("corpus", "f is corpus, the language of each pair of a corpus, but the texts are of no corpus. Pass --f=NA"),
    ],
)
def test_an_unknown_language_is_an_error(multilingual, language, message):
    """And none at all, where texts begin with one: translations would be bad, without a message."""
    with pytest.raises(UserError, match=message):
        multilingual.in_language(language, "f")


def test_a_language_of_tokenizers_without_languages_is_an_error(tokenizers):
    assert tokenizers.in_languages({"source": "", "target": ""}) == tokenizers
    with pytest.raises(UserError, match="input.source_language is 'fr', but the tokenizers have no languages; leave"):
        tokenizers.in_languages({"source": "fr"})
    with pytest.raises(UserError, match="input.target_language is 'corpus', but the tokenizers have no languages"):
        tokenizers.check_languages({"target": "corpus"})


def test_the_language_of_each_pair_is_checked_where_a_corpus_is_read(multilingual):
    multilingual.check_language("corpus", "f")
