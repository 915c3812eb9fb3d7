"""The command eval for models that recognise speech."""

from __future__ import annotations

import logging

from lingvo_moe.cli import run_setup
from lingvo_moe.cli.run_config import EvalConfig
from lingvo_moe.cli.scores import write_scores
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.inference import recognizer
from lingvo_moe.inference.recognizer import VoiceScore
from lingvo_moe.utils import counts, output_files

_logger = logging.getLogger(__name__)


def evaluate(config: EvalConfig):
    """Prints the error rates of each voice, then of trained and of held-out voices, beside those of the baseline."""
    if "beam_size" in config.given:
        raise UserError(
            f"--beam_size={config.beam_size} is for translation; {config.full_name()} takes the most probable label at "
            f"each position. Leave it out."
        )
    name, experiment, engine = run_setup.set_up(config, "decode", {})
    corpus = Corpus.open(experiment.corpus)
    corpus.choose(config.split, config.languages)  # reports a mistake before anything is compiled
    model = recognizer.Recognizer(name, experiment, engine, config.log_directory())
    transcribed = recognizer.transcribe_held_out(model, corpus, config.languages, config.max_pairs, config.split)
    if config.transcripts:
        recognizer.write(config.transcripts, transcribed)
    scores, left_out = recognizer.score(corpus, transcribed)
    print(table(scores, summary=config.summary), file=output_files.table_stream(config.json))
    if left_out:
        _logger.info(counts.left_out(left_out, "recording", f"of more than {experiment.texts.source_length} frames"))
    write_scores(config, name, model.step, scores)


def table(scores: list[VoiceScore], summary: bool = False) -> str:
    """Returns character and word error rates by voice, unless a `summary`, and by group of voices."""
    row = "{:24} {:>9} {:>6} {:>8} {:>8} {:>13} {:>13}".format
    lines = [row("voice", "train", "test", "CER %", "WER %", "majority CER", "majority WER")]
    for score in scores:
        if summary and not score.is_group:
            continue
        rates = (rate for found in (score.rates, score.majority) for rate in (found.characters, found.words))
        lines.append(
            row(score.voice, score.train_recordings, score.test_recordings, *(f"{rate:.1f}" for rate in rates))
        )
    return "\n".join(lines)
