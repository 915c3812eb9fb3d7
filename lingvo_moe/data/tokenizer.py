"""SentencePiece tokenizers: one of all languages for the source and an English one for the target, or one for both.

Both use the same special ids: padding 0, end of sentence (eos) 1, beginning of sentence (bos) 2, unknown 3 (the source
tokenizer falls back to bytes, so no source text is unknown). `tools.train_tokenizer` makes a directory of

    source.model, target.model    SentencePiece models
    tokenizer.json                the manifest: training settings, vocabulary sizes, special ids and SHA-256 of the
                                  models; with a shared tokenizer, both sides name shared.model

A model may be compressed (`xz source.model`): a directory without NAME.model may have NAME.model.xz.

A tokenizer of an imported model (`importing`) may have pieces for languages, control pieces such as `fra_Latn`. Each
text begins with that of its language, on both sides, so that one model translates in all directions. In other models
the source begins with the language of the translation (`>>fra<<`, `<2fr>`; Johnson et al. 2017), and nothing tells its
own: the manifest says so.

Texts without such a piece may be of one language: then the manifest names it.

A trained vocabulary may be smaller than requested, because a small corpus has fewer pieces. A model's vocabulary must
be at least as large as the tokenizer's; its surplus embeddings are never looked up.

Only `Tokenizer.in_graph` imports TensorFlow, when it is called.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import lzma
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece

from lingvo_moe.data.corpus import MANIFEST as CORPUS_MANIFEST
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.lazy import tf, tf_text
from lingvo_moe.utils import safe_paths
from lingvo_moe.utils.counts import counted
from lingvo_moe.utils.hashes import sha256

SPECIAL_IDS = {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
MANIFEST = "tokenizer.json"
SIDES = ("source", "target")
OF_CORPUS = "corpus"  # in the place of a language: that of each pair, by its label in the corpus
UNKNOWN_LANGUAGE = "und"  # ISO 639-3; the `own_language` of a model that does not say which it is
# The pieces of NLLB-200, M2M-100, Opus-MT and MADLAD-400: `fra_Latn`, `__fr__`, `>>fra<<`, `<2fr>`.
_LANGUAGE_PIECE = re.compile("(?:__|>>|<2)?(.*?)(?:__|<<|>)?")
_LINE_OR_COLUMN_END = re.compile("[\t-\r\x1c-\x1e\x85\u2028\u2029]")
_MAX_MODEL = 2**28  # bytes, of a decompressed model
_MOST_SHOWN = 8  # languages in a message
_TARGET_LANGUAGE = "input.target_language"
_REMEDY = "train one with `python -m tools.train_tokenizer --corpus=CORPUS --output={}`"


def language_name(piece: str) -> str:
    """Returns the name of a language, `fr`, of its piece, `<2fr>` for instance, or of that name."""
    found = _LANGUAGE_PIECE.fullmatch(piece)
    return found[1] if found else piece


def is_english(language: str) -> bool:
    """Returns whether a language is English: `eng_Latn`, `en`, `__en__`, or none, as of models into English alone."""
    return language_name(language).partition("_")[0] in ("", "en", "eng")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """One SentencePiece model; use `Tokenizer.load`.

    Attributes:
      model: the bytes of the model file.
      language: of the texts, which begin with its piece if there is one; empty for none.
      own_language: the only one that it is for, without a piece, or UNKNOWN_LANGUAGE; empty for any.
      names_target: whether the pieces for languages are for those of translations. It reads sources, and has an
        `own_language`.
      target_piece: the piece for a language that texts begin with, where `names_target`; empty for none.
      before_language: the piece before that of a language; empty for none.
    """

    model: bytes = dataclasses.field(repr=False)
    language: str = ""
    own_language: str = ""
    names_target: bool = False
    target_piece: str = ""
    before_language: str = ""
    pad_id = SPECIAL_IDS["pad"]
    eos_id = SPECIAL_IDS["eos"]
    bos_id = SPECIAL_IDS["bos"]
    unk_id = SPECIAL_IDS["unk"]

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Tokenizer:
        """Reads a model file.

        Raises:
          UserError: no such file, not a complete SentencePiece model, or other special ids than SPECIAL_IDS.
        """
        tokenizer = cls(_read(pathlib.Path(path)))
        tokenizer.check(path)
        return tokenizer

    def check(self, path: str | pathlib.Path):
        """Raises UserError, naming `path`, unless this is a SentencePiece model with the special ids SPECIAL_IDS."""
        try:
            processor = self._processor
        except RuntimeError as error:
            raise UserError(
                f"{path} is not a complete SentencePiece model; copy it again, or "
                + _REMEDY.format(pathlib.Path(path).parent)
            ) from error
        ids = {name: getattr(processor, f"{name}_id")() for name in SPECIAL_IDS}
        if ids != SPECIAL_IDS:
            raise UserError(
                f"{path} has the special ids {ids}, expected {SPECIAL_IDS}; "
                + _REMEDY.format(pathlib.Path(path).parent)
            )
        if any(self._processor.is_control(i) or i == self.unk_id for i in self._before_language):
            raise UserError(
                f"{path}: before_language is {self.before_language!r}, which is no piece of a text; copy the directory "
                f"again."
            )
        if self.own_language and self.languages and not self.names_target:
            raise UserError(
                f"{path} has pieces for languages, but by its manifest texts are of {self.own_language!r} alone; copy "
                f"the directory again."
            )

    @functools.cached_property
    def _processor(self) -> sentencepiece.SentencePieceProcessor:
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(self.model)  # the constructor ignores an empty model
        return processor

    @functools.cached_property
    def languages(self) -> tuple[str, ...]:
        """The languages that have a piece."""
        processor, special = self._processor, SPECIAL_IDS.values()
        control = (i for i in range(processor.vocab_size()) if processor.is_control(i) and i not in special)
        return tuple(map(processor.id_to_piece, control))

    @property
    def language_id(self) -> int | None:
        """The id of the piece for a language that texts begin with; None without one."""
        piece = self.target_piece if self.names_target else self.language
        return self._processor.piece_to_id(piece) if piece in self.languages else None

    @functools.cached_property
    def language_names(self) -> tuple[str, ...]:
        """The names of the languages that have a piece: `fra_Latn`, or `fr` of a piece `__fr__`."""
        return tuple(map(language_name, self.languages))

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids that texts begin with; none without the piece of a language."""
        return () if self.language_id is None else (*self._before_language, self.language_id)

    def prefix_of(self, name: str) -> tuple[int, ...]:
        """Returns the `prefix` of a language, by its name or its piece."""
        return (*self._before_language, self._processor.piece_to_id(self._piece_of(name)))

    @property
    def _before_language(self) -> tuple[int, ...]:
        return (self._processor.piece_to_id(self.before_language),) if self.before_language else ()

    def _piece_of(self, name: str) -> str:
        return self.languages[self.language_names.index(language_name(name))]

    def in_language(self, language: str, field: str) -> Tokenizer:
        """Returns the tokenizer of texts in a language.

        Args:
          language: its name, see `language_names`, or its piece; empty for none.
          field: the hyperparameter that names it, for errors.

        Raises:
          UserError: there is no such language, or none is named where texts begin with one.
        """
        self.check_language(language, field)
        if self.own_language:
            is_named = self.own_language == UNKNOWN_LANGUAGE and language not in ("", OF_CORPUS)
            return dataclasses.replace(self, language=language_name(language) if is_named else self.own_language)
        return dataclasses.replace(self, language=self._chosen(language, field))

    def without_language(self) -> Tokenizer:
        """Returns the tokenizer of texts that begin with no language."""
        return dataclasses.replace(self, language="", target_piece="")

    def into_language(self, language: str, field: str) -> Tokenizer:
        """Returns the tokenizer of texts that are translated into a language, if it `names_target`.

        Arguments and errors are those of `in_language`.
        """
        if not self.names_target:
            return self
        self.check_translation(language, field)
        return dataclasses.replace(self, target_piece=self._chosen(language, field))

    def _chosen(self, language: str, field: str) -> str:
        """Returns the piece of a language, which has been checked; empty for none."""
        if language == OF_CORPUS:
            raise UserError(
                f"{field} is {OF_CORPUS}, the language of each pair of a corpus, but the texts are of no corpus. Pass "
                f"{_flag(field)}=NAME with one of {_shown(self.language_names)}."
            )
        return self._piece_of(language) if language else ""

    def check_language(self, language: str, field: str):
        """Raises UserError as `in_language`, but for OF_CORPUS only if there are no languages."""
        if self.own_language:
            if language not in ("", OF_CORPUS, self.own_language) and self.own_language != UNKNOWN_LANGUAGE:
                raise UserError(
                    f"{field} is {language!r}, but the tokenizer is of {self.own_language!r} alone; leave it out."
                )
            return
        self._check_piece(language, field)

    def check_translation(self, language: str, field: str):
        """Raises UserError as `into_language`, but not for OF_CORPUS."""
        if self.names_target:
            self._check_piece(language, field)

    def _check_piece(self, language: str, field: str):
        """Raises UserError for a language without a piece, or none where there are pieces."""
        known = self.language_names
        names = counted(len(known), "language")
        if not language and known:
            raise UserError(
                f"{field} is empty, but the tokenizers have {names}, of which each "
                f"{'source' if self.names_target else 'text'} begins with one. Pass "
                f"{_flag(field)}=NAME with one of {_shown(known)}."
            )
        if language and not known:
            raise UserError(f"{field} is {language!r}, but the tokenizers have no languages; leave it out.")
        if language not in ("", OF_CORPUS) and language_name(language) not in known:
            raise UserError(
                f"{field} is {language!r}, but the tokenizers have {names}: {_shown(known)}."
                f"{did_you_mean(language, known)}"
            )

    @functools.cached_property
    def all_pieces(self) -> tuple[str, ...]:
        """The texts of all pieces, in the order of their ids."""
        return tuple(map(self._processor.id_to_piece, range(self._processor.vocab_size())))

    @functools.cached_property
    def vocabulary_size(self) -> int:
        """The number of pieces, including special ones, without unused ones at the end."""
        size = self._processor.vocab_size()
        while size and self._processor.is_unused(size - 1):
            size -= 1
        return size

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, `[length] int32`, without bos and eos; the first are those of the `prefix`."""
        return [np.array([*self.prefix, *ids], np.int32) for ids in self._processor.encode(list(texts), out_type=int)]

    def has_pieces_for(self, text: str) -> bool:
        """Returns whether the ids of a text stand for pieces, none for a byte or something unknown."""
        ids = self.encode([text])[0].tolist()
        return not any(self._processor.is_byte(i) or self._processor.is_unknown(i) for i in ids)

    def pieces(self, ids: Iterable[int] | np.ndarray) -> list[str]:
        """Returns the text of each id; one outside of the vocabulary is unknown."""
        size = self.vocabulary_size
        return [self._processor.id_to_piece(int(i) if 0 <= i < size else self.unk_id) for i in ids]

    def decode(self, rows: Iterable[Sequence[int] | np.ndarray]) -> list[str]:
        """Returns the text of each row of ids, up to its first eos, without pad and bos.

        An id outside of the vocabulary (a model may have a larger one) decodes as unknown. A text is one line without
        tabs: a tokenizer with bytes has pieces for line ends and tabs, which decode as spaces.
        """
        size, skipped = self.vocabulary_size, (self.pad_id, self.bos_id)
        texts = []
        for row in rows:
            ids = [int(i) for i in row]
            ids = ids[: ids.index(self.eos_id)] if self.eos_id in ids else ids
            texts.append([i if 0 <= i < size else self.unk_id for i in ids if i not in skipped])
        return [_LINE_OR_COLUMN_END.sub(" ", text) for text in self._processor.decode(texts)]

    def in_graph(self, call: Callable | None = None) -> Any:
        """Returns an object whose `tokenize` gives a ragged tensor of the `int32` ids of `encode`, in no language."""
        del call  # it runs no Python function
        return tf_text.SentencepieceTokenizer(model=self.model, out_type=tf.int32)


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of both sides.

    Attributes:
      source: multilingual.
      target: English; of imported ones, the same as the source's.
      manifest: the contents of tokenizer.json.
    """

    source: Tokenizer
    target: Tokenizer
    manifest: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def is_shared(self) -> bool:
        """Whether both sides have one tokenizer, or two in which the same ids stand for the same pieces."""
        return self.source.model == self.target.model or self.source.all_pieces == self.target.all_pieces

    @classmethod
    def load(cls, directory: str | pathlib.Path) -> Tokenizers:
        """Reads a directory that `tools.train_tokenizer` made.

        Raises:
          UserError: missing directory or file, a corrupt file, an unsafe file name in the manifest, or a model that is
            not the one of the manifest.
        """
        directory = pathlib.Path(directory)
        manifest = read_manifest(directory)
        source, target = (_load_verified(directory / manifest[side]["file"], manifest[side]) for side in SIDES)
        return cls(source, target, manifest)

    @property
    def by_side(self) -> dict[str, Tokenizer]:
        """The tokenizers by side."""
        return {side: getattr(self, side) for side in SIDES}

    @property
    def hashes(self) -> tuple[str, ...]:
        """SHA-256 of the source and the target model, in hexadecimal."""
        return hashes(self.by_side)

    def in_languages(self, languages: Mapping[str, str]) -> Tokenizers:
        """Returns the tokenizers of texts in these languages, by side.

        Raises:
          UserError: as `Tokenizer.in_language` and `Tokenizer.into_language`.
        """
        of_sides = {
            side: self.by_side[side].in_language(language, f"input.{side}_language")
            for side, language in languages.items()
        }
        found = dataclasses.replace(self, **of_sides)
        if "target" not in languages:
            return found
        return dataclasses.replace(found, source=found.source.into_language(languages["target"], _TARGET_LANGUAGE))

    def check_languages(self, languages: Mapping[str, str]):
        """Raises UserError as `Tokenizer.check_language` and `Tokenizer.check_translation`."""
        for side, language in languages.items():
            self.by_side[side].check_language(language, f"input.{side}_language")
        if "target" in languages:
            self.source.check_translation(languages["target"], _TARGET_LANGUAGE)

    @classmethod
    def load_for(cls, vocabularies: Mapping[str, int], directory: str | pathlib.Path) -> Tokenizers:
        """As `load`, for a model.

        Args:
          vocabularies: the sizes of the model's vocabularies, by side.
          directory: that `tools.train_tokenizer` made.

        Raises:
          UserError: as `load`, or a tokenizer has more pieces than the model's vocabulary.
        """
        tokenizers = cls.load(directory)
        for side, size in vocabularies.items():
            if (pieces := tokenizers.by_side[side].vocabulary_size) > size:
                raise UserError(
                    f"the {side} tokenizer in {directory} has {pieces} pieces, the model's {side}_vocabulary "
                    f"is {size}. Pass --set model.{side}_vocabulary={fitting_vocabulary(pieces)}, which 8 devices "
                    f"divide, or train a smaller tokenizer."
                )
        return tokenizers


def hashes(by_side: Mapping[str, Tokenizer]) -> tuple[str, ...]:
    """Returns `Tokenizers.hashes` of tokenizers by side."""
    return tuple(sha256(by_side[side].model) for side in SIDES)


def fitting_vocabulary(pieces: int) -> int:
    """Returns the size of the vocabulary of models for a number of pieces: a multiple of 8.

    A layout may shard the vocabulary among 2, 4 or 8 devices, which divide it.
    """
    return -(-pieces // 8) * 8


def _flag(field: str) -> str:
    """Returns the flag that sets a hyperparameter of `input` that names a language."""
    return f"--{field.rpartition('.')[2]}"


def _shown(languages: Iterable[str]) -> str:
    """Returns the first languages, or all if they are few."""
    names = sorted(languages)
    return ", ".join(names if len(names) <= _MOST_SHOWN else [*names[:_MOST_SHOWN], "..."])


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of tokenizer.json.

    Raises:
      UserError: it is missing or corrupt, or the name of a model in it is not a plain file name.
    """
    path = directory / MANIFEST
    if (directory / CORPUS_MANIFEST).is_file() and not path.exists():
        raise UserError(
            f"{directory} is a corpus, and has no tokenizers; name the directory of tokenizers that "
            f"`python -m tools.train_tokenizer --corpus={directory} --output=TOKENIZERS` makes."
        )
    try:
        manifest = json.loads(_read(path))
        for side in SIDES:
            entry = manifest[side]
            safe_paths.check_file_name(entry["file"], f"{path}, field {side}.file")
            texts = (entry["sha256"], entry.get("language", ""), entry.get("before_language", ""))
            if not all(isinstance(text, str) and text.isprintable() for text in texts):
                raise TypeError(f"a field of {side} is not a text")
            names_target = entry.get("names_target", False)
            if type(names_target) is not bool or names_target > (side == "source" and bool(entry.get("language"))):
                raise TypeError(f"names_target of {side} is {names_target}; it is for a source with a language")
            if entry.get("before_language") and not names_target:
                raise TypeError(f"before_language of {side} is for a source with names_target")
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is corrupt or not the manifest of a tokenizer; " + _REMEDY.format(directory)
        ) from error
    return manifest


def _load_verified(path: pathlib.Path, entry: dict[str, Any]) -> Tokenizer:
    path = _stored(path)
    tokenizer = Tokenizer(
        _read_model(path),
        own_language=entry.get("language", ""),
        names_target=entry.get("names_target", False),
        before_language=entry.get("before_language", ""),
    )
    if (actual := sha256(tokenizer.model)) != entry["sha256"]:
        raise UserError(
            f"{path} has SHA-256 {actual[:12]}..., but {MANIFEST} expects {entry['sha256'][:12]}...: "
            "the files do not belong together or one is corrupt; copy the directory again, or "
            + _REMEDY.format(path.parent)
        )
    tokenizer.check(path)
    return tokenizer


def _stored(path: pathlib.Path) -> pathlib.Path:
    """Returns the file of a model: `path`, or the compressed one beside it if that is all there is."""
    compressed = path.with_name(f"{path.name}.xz")
    return compressed if compressed.exists() and not path.exists() else path


def _read_model(path: pathlib.Path) -> bytes:
    """Returns the bytes of a model, decompressed if the file's name ends with .xz."""
    if path.suffix != ".xz":
        return _read(path)
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_MODEL)
    try:
        model = decompressor.decompress(_read(path), max_length=_MAX_MODEL)
    except lzma.LZMAError:
        model = b""
    if not decompressor.eof:
        raise UserError(
            f"{path} is not a complete xz file of at most {_MAX_MODEL // 2**20} MiB; copy it again, or "
            + _REMEDY.format(path.parent)
        )
    return model


def _read(path: pathlib.Path) -> bytes:
    if not path.parent.is_dir():
        raise UserError(
            f"there is no directory of tokenizers {path.parent}; name one with --tokenizers, or "
            + _REMEDY.format(path.parent)
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}); copy it again, or " + _REMEDY.format(path.parent)
        ) from error
