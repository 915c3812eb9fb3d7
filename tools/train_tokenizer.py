"""Trains the SentencePiece tokenizers of a corpus: source.model (all languages) and target.model (English).

  python -m tools.train_tokenizer --corpus=corpus --output=tokenizer --source_vocabulary=8000 --target_vocabulary=4000
  python -m tools.train_tokenizer --corpus=corpus --output=tokenizer --shared_vocabulary=8000

The second form trains one tokenizer of both sides, shared.model, for models with tied embeddings. With --align_pieces
the first form splits names alike on both sides, so that a model can copy them piece by piece. The same corpus and
flags give the same bytes; an existing tokenizer of the same settings is left unchanged. It takes half a minute for the
quickstart corpus.
"""

from __future__ import annotations

import logging
import pathlib

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import SIDES, fitting_vocabulary
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.errors import UserError

_logger = logging.getLogger("tools.train_tokenizer")
FLAGS = flags.FlagValues()
_MOST_PIECES = 10**7  # SentencePiece trains none with numbers near its largest id
flags.DEFINE_string("corpus", None, "The directory of a corpus that tools.build_corpus built.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "The directory to make.", flag_values=FLAGS)
flags.DEFINE_integer(
    "source_vocabulary",
    8000,
    "The number of pieces of source.model, including 256 bytes.",
    lower_bound=300,
    upper_bound=_MOST_PIECES,
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "target_vocabulary",
    4000,
    "The number of pieces of target.model.",
    lower_bound=50,
    upper_bound=_MOST_PIECES,
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "shared_vocabulary",
    None,
    "The number of pieces of one tokenizer for both sides, shared.model, instead of two.",
    lower_bound=300,
    upper_bound=_MOST_PIECES,
    flag_values=FLAGS,
)
flags.DEFINE_bool(
    "align_pieces",
    False,
    "Give source.model the pieces of target.model and prefer them, so that both split names alike.",
    flag_values=FLAGS,
)
flags.DEFINE_float(
    "temperature",
    5.0,
    "The sampling temperature of languages: 1 in proportion to the corpus, inf all equal.",
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "max_sentences",
    200_000,
    "The number of sentence pairs to sample, including repetitions.",
    lower_bound=1,
    upper_bound=2**40,
    flag_values=FLAGS,
)
flags.DEFINE_bool("force", False, "Replace a tokenizer of another corpus or of other flags.", flag_values=FLAGS)


def main(argv: list[str]):
    """Trains the tokenizers that the flags describe and prints a summary."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; the corpus is named with --corpus={argv[1]}.")
    for name in ("corpus", "output"):
        if not FLAGS[name].value:
            raise UserError(f"--{name}=DIR is missing.")
    shared = FLAGS.shared_vocabulary
    if shared and FLAGS.align_pieces:
        raise UserError("--align_pieces aligns two tokenizers; --shared_vocabulary trains one. Pass one of them.")
    requested: dict[str, int] = {side: shared or getattr(FLAGS, f"{side}_vocabulary") for side in SIDES}
    with app.terminated_as_interrupted():  # so that the process that trains ends, too
        tokenizers, is_new = tokenizer_trainer.train(
            Corpus.open_to_train(FLAGS.corpus),
            pathlib.Path(FLAGS.output),
            {tokenizer_trainer.SHARED: shared} if shared else requested,
            FLAGS.temperature,
            FLAGS.max_sentences,
            FLAGS.align_pieces,
            FLAGS.force,
        )
    sizes = {side: tokenizers.by_side[side].vocabulary_size for side in SIDES}
    for side in SIDES:
        if sizes[side] < requested[side]:
            _logger.info(
                "the %s tokenizer has %d pieces, not %d: the corpus has no more. Its models need as many or more, for "
                "instance --set model.%s_vocabulary=%d, which is rounded up to a multiple of 8, so that 2, 4 or 8 "
                "devices divide it; with --initial_tokenizers, leave this out.",
                side,
                sizes[side],
                requested[side],
                side,
                fitting_vocabulary(sizes[side]),
            )
    pieces = f"{sizes['source']} shared" if shared else f"{sizes['source']} source and {sizes['target']} target"
    print(f"{FLAGS.output} {'trained' if is_new else 'is up to date'}: {pieces} pieces.")


if __name__ == "__main__":
    app.run(main, FLAGS)
