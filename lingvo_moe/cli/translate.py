"""The command translate, from lines to lines."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence

from lingvo_moe import experiment as experiments
from lingvo_moe.cli import released, run_setup
from lingvo_moe.cli.run_config import ModelConfig, TranslateConfig
from lingvo_moe.errors import UserError
from lingvo_moe.inference.explanation import Explainer
from lingvo_moe.inference.journal import Journal, journal
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.inference.translator import Translator
from lingvo_moe.utils import output_files
from lingvo_moe.utils.hashes import sha256

_logger = logging.getLogger(__name__)
_MAX_NAMED = 10  # lines in a warning; a long file may have hundreds


def translate(config: TranslateConfig):
    """`translate`: writes one line for each line read, in the same order; an empty line stays empty.

    Translations on standard output are written as they are made. A file of `--output` is written at the end; until then
    they are kept in a journal beside it, from which the same command continues.
    """
    _check_files(config)  # before the released weights are unpacked
    with released.by_default(config) as chosen:
        _translate(chosen)


def _translate(config: TranslateConfig):
    require_translation(config)
    name, experiment, engine = run_setup.set_up(config, "decode", {"search.beam_size": config.beam_size})
    if not 1 <= config.n_best <= experiment.search.beam_size:
        raise UserError(
            f"--n_best={config.n_best}: expected 1 to {experiment.search.beam_size}, the hypotheses of the beam; for "
            f"more of them raise --beam_size."
        )
    sentences = _read_sentences(config.input)
    if not sentences:
        _logger.warning("--input=%s is empty, and so is what is written.", config.input)
        for path in filter(None, (config.output, config.doubtful, config.explain)):
            with output_files.atomic_writer(path):
                pass
        return
    explainer = Explainer(name, experiment, engine, config.log_directory()) if config.explain else None
    translator = Translator(name, experiment, engine, config.log_directory(), config.copy_english)
    step = translator.step
    with contextlib.ExitStack() as stack:
        kept = None
        if config.output != "-":
            run = _identity(config, experiments.text(name, experiment), translator, sentences)
            kept = stack.enter_context(journal(config.output, run))
        best = _write(config, _translated(translator, sentences, kept, config.n_best), kept)
        _warn(best, experiment.texts.source_length - 1, experiment.search.max_length)
        _report_doubtful(config, sentences, best)
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
            f"{config.full_name()} is a language model; it has nothing to translate. `eval` computes its perplexity."
        )


def _check_files(config: TranslateConfig):
    """Raises UserError for an input that is not there, and a path that cannot be written to or that two flags name."""
    if config.input != "-" and not os.path.exists(config.input):
        raise UserError(f"--input={config.input}: there is no such file; expected one sentence a line.")
    if config.input != "-" and os.path.isdir(config.input):
        raise UserError(f"--input={config.input} is a directory; expected a file of one sentence a line.")
    written = {"--explain": config.explain, "--doubtful": config.doubtful}
    if config.output != "-":
        written = {"--output": config.output, **written}
    output_files.check_own_paths(written, {"--input": config.input})


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
    config: TranslateConfig, chunks: Iterable[list[list[Translation]]], kept: Journal | None
) -> list[Translation]:
    """Writes translations, those of standard output as they come; returns the best of each line."""
    if kept:  # the file is written at the end, so that a process that is killed leaves nothing but the journal
        for _ in chunks:
            pass
        chunks = ([translations] for translations in kept.read())
    best = []
    with output_files.atomic_writer(config.output) as opened:
        # A progress bar replaces sys.stdout while it is drawn on the terminal that shows both.
        file = None if config.output == "-" else opened
        for chunk in chunks:
            for translations in chunk:
                number = len(best) + 1
                for translation in translations:
                    columns = [str(number)] if config.n_best > 1 else []
                    columns += [f"{translation.score:.4f}"] if config.n_best > 1 or config.scores else []
                    print(*columns, translation.text, sep="\t", file=file)
                # The tokens of a large file need not stay in memory.
                best.append(translations[0] if config.explain else dataclasses.replace(translations[0], parts=()))
            (file or sys.stdout).flush()
    return best


def _warn(best: Sequence[Translation], source_limit: int, target_limit: int):
    """Warns of the lines, also those translated before an interruption, whose translation lacks something."""
    if cut := _line_numbers(translation.is_cut for translation in best):
        _logger.warning(
            "%s: a sentence has more than %d tokens; its end is not translated. Split it, or pass "
            "--set input.source_length=N.",
            cut,
            source_limit,
        )
    if truncated := _line_numbers(translation.truncated for translation in best):
        _logger.warning(
            "%s: the translation is truncated at %d tokens. Pass --set search.max_length=N for a longer one.",
            truncated,
            target_limit,
        )
    if lost := _line_numbers(not translation.is_intact for translation in best):
        _logger.warning(
            "%s: the translation lacks a placeholder, tag, address, number, code or quote of the line, or words, or "
            "has another one; correct it.",
            lost,
        )


def _line_numbers(are_meant: Iterable[bool]) -> str:
    """Returns `line 3`, `lines 3, 7` or, of many, the first ones and how many more there are; `` of none."""
    numbers = [number for number, is_meant in enumerate(are_meant, start=1) if is_meant]
    named = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"line{'s' * (len(numbers) > 1)} {named}{more}" if numbers else ""


def _report_doubtful(config: TranslateConfig, sentences: Sequence[str], best: Sequence[Translation]):
    """Says how many lines are doubtful, and writes the file of `--doubtful`."""
    doubtful = [
        number
        for number, translation in enumerate(best)
        if translation.confidence < config.doubt_below
        or not translation.is_intact
        or translation.is_cut
        or translation.truncated
    ]
    if doubtful:
        _logger.info(
            "doubtful lines, with a confidence below %g or something lost: %d of %d%s.",
            config.doubt_below,
            len(doubtful),
            len(best),
            "" if config.doubtful else "; --doubtful=FILE lists them",
        )
    if config.doubtful:
        with output_files.atomic_writer(config.doubtful) as file:
            for index in doubtful:
                # A tab would be another column.
                pair = (" ".join(text.split()) for text in (sentences[index], best[index].text))
                print(index + 1, f"{best[index].confidence:.3f}", *pair, sep="\t", file=file)


def _read_sentences(path: str) -> list[str]:
    """Returns the lines of a UTF-8 file or of standard input; raises UserError naming a line that is not text."""
    if path == "-" and sys.stdin.isatty():
        _logger.info("reading sentences from the terminal, one a line; Ctrl-D ends them.")
    try:
        data = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
    except OSError as error:  # of a read, which does not name the file
        raise UserError(f"--input={path}: cannot be read ({error.strerror}); expected one sentence a line.") from None
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    lines = lines[:-1] if lines[-1] == b"" else lines
    sentences = []
    for number, line in enumerate(lines, start=1):
        try:
            sentences.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"--input={path}, line {number}: not UTF-8 (byte {error.start + 1} of the line); convert it, for "
                f"instance with iconv."
            ) from None
        if "\0" in sentences[-1]:
            raise UserError(
                f"--input={path}, line {number}: holds a NUL byte; expected a text file, one sentence a line. "
                f"`tr -d '\\000'` removes such bytes."
            )
    return sentences
