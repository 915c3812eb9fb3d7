"""The command translate, from lines to lines, or from a catalog to a catalog."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from lingvo_moe import experiment as experiments
from lingvo_moe.cli import released, run_setup, translation_input
from lingvo_moe.cli.run_config import ModelConfig, TranslateConfig
from lingvo_moe.cli.translation_input import Lines
from lingvo_moe.errors import UserError
from lingvo_moe.inference.explanation import Explainer
from lingvo_moe.inference.journal import Journal, journal
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.inference.po_catalog import PoCatalog
from lingvo_moe.inference.translator import Translator
from lingvo_moe.utils import counts, output_files
from lingvo_moe.utils.hashes import sha256

_logger = logging.getLogger(__name__)


def translate(config: TranslateConfig):
    """`translate`: writes one line for each line read, in the same order; an empty line stays empty.

    Of a .po file, a catalog is written, see `PoCatalog`.
    Translations on standard output are written as they are made. A file of `--output` is written at the end; until then
    they are kept in a journal beside it, from which the same command continues.
    """
    # Before the released weights are unpacked.
    translation_input.check(config)
    _check_output(config)
    with released.by_default(config) as chosen:
        _translate(chosen)


def _translate(config: TranslateConfig):
    require_translation(config)
    changes = {"search.beam_size": config.beam_size}
    name, experiment, engine = run_setup.set_up(config, "decode", changes, reads_batches=False)
    if not 1 <= config.n_best <= experiment.search.beam_size:
        raise UserError(
            f"--n_best={config.n_best}: expected 1 to {experiment.search.beam_size}, the hypotheses of the beam; for "
            f"more of them raise --beam_size."
        )
    source = translation_input.read(config.input, config.output, experiment.texts.target_language)
    sentences = source.sentences
    if not sentences:
        _write_nothing(config, source)
        return
    explainer = Explainer(name, experiment, engine, config.log_directory()) if config.explain else None
    translator = Translator(name, experiment, engine, config.log_directory(), config.copy_english)
    step = translator.step
    with contextlib.ExitStack() as stack:
        kept = None
        if config.output != "-":
            run = _identity(config, experiments.text(name, experiment), translator, sentences)
            kept = stack.enter_context(journal(config.output, run))
        best = _write(config, source, _translated(translator, sentences, kept, config.n_best), kept)
        _warn(source, best, experiment.texts.source_length - 1, experiment.search.max_length)
        _report_doubtful(config, source, best)
        del translator  # and with it the weights on the devices
        if explainer and config.explain:
            with output_files.atomic_writer(config.explain) as file:
                for explanation in explainer.explain(best, step):
                    print(json.dumps(explanation, ensure_ascii=False), file=file)


def require_translation(config: ModelConfig):
    """Raises UserError for a model of another kind, before anything is loaded."""
    experiment = experiments.get(config.full_name())
    if experiment.recognises:
        raise UserError(
            f"{config.full_name()} recognises speech; it has nothing to translate. `eval` computes its error rates."
        )
    if experiment.segments:
        raise UserError(
            f"{config.full_name()} segments volumes; it has nothing to translate. `eval` computes Dice coefficients."
        )
    if not experiment.translates:
        raise UserError(
            f"{config.full_name()} is a language model; it has nothing to translate. `generate` continues texts, and "
            f"`eval` computes the perplexity."
        )


def _check_output(config: TranslateConfig):
    """Raises UserError for a path that cannot be written to or that two flags name."""
    written = {"--explain": config.explain, "--doubtful": config.doubtful}
    if config.output != "-":
        written = {"--output": config.output, **written}
    output_files.check_own_paths(written, {"--input": config.input})


def _write_nothing(config: TranslateConfig, source: Lines | PoCatalog):
    """Writes all files for an input without anything to translate, and says so."""
    if isinstance(source, PoCatalog):
        _logger.warning(
            "--input=%s has no text without a translation; it is written with those that it has.", config.input
        )
    else:
        _logger.warning("--input=%s is empty, and so is what is written.", config.input)
    _write(config, source, (), None)
    _report_doubtful(config, source, ())
    if config.explain:
        with output_files.atomic_writer(config.explain):
            pass


def _identity(config: TranslateConfig, settings: str, translator: Translator, sentences: Sequence[str]) -> str:
    """Returns eight digits that differ between runs whose translations differ."""
    # The log directory of the released model is temporary.
    logdir = str(config.log_directory().absolute()) if "logdir" in config.given else ""
    described = json.dumps(
        [settings, logdir, translator.step, translator.digest, config.copy_english, config.n_best, sentences]
    )
    return sha256(described)[:8]


def _translated(
    translator: Translator, sentences: Sequence[str], kept: Journal | None, n_best: int
) -> Iterator[list[list[Translation]]]:
    """Yields the `n_best` translations of each line, some lines at a time: those kept before, then new ones."""
    start = kept.lines if kept else 0
    if kept and start:
        _logger.info("the first %d of %d lines were translated before.", start, len(sentences))
        yield from ([translations] for translations in kept.read())
    for chunk in translator.stream(sentences, start):
        best = [translations[:n_best] for translations in chunk]
        if kept:
            kept.append(best)
        yield best


def _write(
    config: TranslateConfig,
    source: Lines | PoCatalog,
    chunks: Iterable[list[list[Translation]]],
    kept: Journal | None,
) -> list[Translation]:
    """Writes translations, lines on standard output as they come; returns the best of each sentence."""
    if kept:  # the file is written at the end, so that a process that is killed leaves nothing but the journal
        for _ in chunks:
            pass
        chunks = ([translations] for translations in kept.read())
    best: list[Translation] = []
    with output_files.atomic_writer(config.output) as opened:
        # A progress bar replaces sys.stdout while it is drawn on the terminal that shows both.
        file = None if config.output == "-" else opened
        name = "standard output" if file is None else config.output
        for chunk in chunks:
            with output_files.named_errors(name):
                if isinstance(source, Lines):
                    for number, translations in enumerate(chunk, start=len(best) + 1):
                        _print(config, number, translations, file)
                (file or sys.stdout).flush()
            # The tokens of a large file need not stay in memory.
            best += [
                translations[0] if config.explain else dataclasses.replace(translations[0], parts=())
                for translations in chunk
            ]
        if isinstance(source, PoCatalog):
            texts = [translation.text for translation in best]
            with output_files.named_errors(name):
                print(source.filled(texts, _doubtful(config, best)), end="", file=file, flush=True)
    return best


def _print(config: TranslateConfig, number: int, translations: Sequence[Translation], file: TextIO | None):
    """Prints the translations of a line, each in a line of its own."""
    for translation in translations:
        columns = [str(number)] if config.n_best > 1 else []
        columns += [f"{translation.score:.4f}"] if config.n_best > 1 or config.scores else []
        print(*columns, translation.text, sep="\t", file=file)


def _warn(source: Lines | PoCatalog, best: Sequence[Translation], source_limit: int, target_limit: int):
    """Warns of the lines, also those translated before an interruption, whose translation lacks something."""
    if cut := _named(source, [translation.is_cut for translation in best]):
        _logger.warning(
            "%s: a sentence has more than %d tokens; its end is not translated. Split it, or pass "
            "--set input.source_length=N.",
            cut,
            source_limit,
        )
    if truncated := _named(source, [translation.truncated for translation in best]):
        _logger.warning(
            "%s: the translation is truncated at %d tokens. Pass --set search.max_length=N for a longer one.",
            truncated,
            target_limit,
        )
    if lost := _named(source, [not translation.is_intact for translation in best]):
        _logger.warning(
            "%s: the translation lacks a placeholder, tag, address, number, code or quote of the line, or words, or "
            "has another one, or has numbers in formats that change places (%%2$s); correct it.",
            lost,
        )


def _named(source: Lines | PoCatalog, are_meant: Sequence[bool]) -> str:
    """Returns the numbers of the lines that are meant, see `counts.lines`.

    Both texts of an entry with a plural form are of the same line.
    """
    meant = dict.fromkeys(number for number, is_meant in zip(source.line_numbers, are_meant, strict=True) if is_meant)
    return counts.lines(list(meant))


def _doubtful(config: TranslateConfig, best: Sequence[Translation]) -> list[int]:
    """Returns the indices of the translations that someone should read."""
    return [
        index
        for index, translation in enumerate(best)
        if translation.confidence < config.doubt_below
        or not translation.is_intact
        or translation.is_cut
        or translation.truncated
    ]


def _report_doubtful(config: TranslateConfig, source: Lines | PoCatalog, best: Sequence[Translation]):
    """Says how many lines are doubtful, and writes the file of `--doubtful`."""
    doubtful = _doubtful(config, best)
    if doubtful:
        is_catalog = isinstance(source, PoCatalog)
        _logger.info(
            "doubtful %s, with a confidence below %g or something lost: %d of %d%s%s.",
            "texts" if is_catalog else "lines",
            config.doubt_below,
            len(doubtful),
            len(best),
            ", marked as fuzzy" if is_catalog else "",
            "" if config.doubtful else "; --doubtful=FILE lists them",
        )
    if config.doubtful:
        with output_files.atomic_writer(config.doubtful) as file:
            for index in doubtful:
                # A tab would be another column.
                pair = (" ".join(text.split()) for text in (source.sentences[index], best[index].text))
                print(source.line_numbers[index], f"{best[index].confidence:.3f}", *pair, sep="\t", file=file)
