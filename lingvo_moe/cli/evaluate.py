"""The command eval, for translation and language models; `speech` and `images` have the others."""

from __future__ import annotations

import dataclasses
import logging
import statistics

from lingvo_moe.cli import images, run_setup, speech
from lingvo_moe.cli.run_config import EvalConfig
from lingvo_moe.cli.scores import write_scores
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import get as get_experiment
from lingvo_moe.experiment import unchecked
from lingvo_moe.inference import held_out_loss, translation_file
from lingvo_moe.inference.evaluation import LanguageScore, choose_languages, groups, score, translate_held_out
from lingvo_moe.inference.translator import Translator
from lingvo_moe.utils import counts, output_files

_logger = logging.getLogger(__name__)


def evaluate(config: EvalConfig):
    """`eval`: prints one row per language, voice or class, then groups; for a language model, its perplexity."""
    output_files.check_path("--json", config.json)
    experiment = get_experiment(config.full_name())
    if config.translations is not None and not experiment.translates:
        raise UserError(f"--translations works only with translation models, and {config.full_name()} is not one.")
    if config.transcripts is not None and not experiment.recognises:
        raise UserError(f"--transcripts works only with speech models, and {config.full_name()} is not one.")
    texts = {"--translations": config.translations, "--transcripts": config.transcripts}
    # A model of volumes, which makes them, has no corpus.
    if corpus := config.corpus or unchecked(config.full_name(), config.assignments).corpus:
        output_files.check_outside({**texts, "--json": config.json}, "--corpus", corpus)
    output_files.check_own_paths(texts, {"--json": config.json})
    if experiment.translates:
        _evaluate_translations(config)
    elif experiment.recognises:
        speech.evaluate(config)
    elif experiment.segments:
        images.evaluate(config)
    else:
        _evaluate_language_model(config)


def _evaluate_translations(config: EvalConfig):
    name, experiment, engine = run_setup.set_up(config, "decode", {"search.beam_size": config.beam_size})
    corpus = Corpus.open(experiment.corpus)
    labels = choose_languages(corpus, config.languages, config.split)  # reports a mistake before anything is compiled
    logdir = config.log_directory()
    pair_languages = experiment.pair_languages(labels, f"{corpus.directory}, {config.split}")
    pair_languages.warn()
    first = next(iter(pair_languages.by_label.values()))
    translator = Translator(name, experiment.in_languages(first), engine, logdir)
    # Before the translations, which take minutes: training beside this may remove the checkpoint.
    loss = held_out_loss.compute(
        name, experiment, engine, logdir, config.split, config.languages, config.max_pairs, translator.step
    )
    translated, left_out = translate_held_out(
        translator, corpus, labels, config.max_pairs, config.split, pair_languages
    )
    if config.translations:
        translation_file.write(config.translations, translated)
    scores = score(corpus, translated, pair_languages.from_english)
    print(table(scores, summary=config.summary), file=output_files.table_stream(config.json))
    print(_loss_line(loss, config.split), file=output_files.table_stream(config.json))
    if left_out:
        _logger.info(counts.left_out(left_out, "sentence", f"of {experiment.texts.source_length} tokens or more"))
    write_scores(config, name, translator.step, scores, loss=dataclasses.asdict(loss))


def _loss_line(loss: held_out_loss.HeldOutLoss, split: str) -> str:
    """Returns the cross-entropy, and the source gain."""
    text = f"cross-entropy {loss.cross_entropy:.3f} nats per target token of the {split} split (step {loss.step})"
    if loss.source_gain is None:
        return text
    shuffled = f"{loss.shuffled_cross_entropy:.3f} with the sources of other sentences"
    return f"{text}; {shuffled}: source gain {loss.source_gain:.3f}"


def _evaluate_language_model(config: EvalConfig):
    for flag in ("languages", "max_pairs", "summary", "beam_size"):
        if flag in config.given:
            raise UserError(
                f"--{flag} does not apply to {config.full_name()}, a language model: `eval` computes its "
                f"perplexity over all texts of the split. Leave --{flag} out."
            )
    name, experiment, engine = run_setup.set_up(config, "evaluate", {})
    result = held_out_loss.compute(name, experiment, engine, config.log_directory(), config.split)
    print(
        f"{result.cross_entropy:.4f} nats per token, perplexity {result.perplexity:.2f}, over {result.tokens:,} tokens "
        f"of the {config.split} split, after {counts.counted(result.step, 'step')}",
        file=output_files.table_stream(config.json),
    )
    if result.left_out:
        _logger.info(counts.left_out(result.left_out, "text", f"of {experiment.texts.target_length} tokens or more"))
    write_scores(config, name, perplexity=result.perplexity, **dataclasses.asdict(result))


def table(scores: list[LanguageScore], summary: bool = False) -> str:
    """Returns BLEU and chrF per language (unless a `summary`), by group and on average, beside those of the sources."""
    row = "{:24} {:>9} {:>6} {:>7} {:>7} {:>10} {:>10}".format
    lines = [row("language", "train", "test", "BLEU", "chrF", "copy BLEU", "copy chrF")]

    def line(label: str, members: list[LanguageScore]) -> str:
        columns = [
            statistics.fmean(getattr(member, name) for member in members)
            for name in ("bleu", "chrf", "copy_bleu", "copy_chrf")
        ]
        return row(
            label,
            sum(m.train_pairs for m in members),
            sum(m.test_pairs for m in members),
            *(f"{value:.1f}" for value in columns),
        )

    if not summary:
        lines += [line(score.language, [score]) for score in scores]
    lines.append("-" * len(lines[0]))
    if len(scores) >= 6:
        lines += [line(f"{name} ({len(members)})", members) for name, members in groups(scores)]
    return "\n".join([*lines, line(f"average of {len(scores)}", scores)])
