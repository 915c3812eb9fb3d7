"""Trains the two SentencePiece tokenizers of a corpus: source.model (all languages) and target.model (English).

  python -m tools.train_tokenizer --corpus=corpus --output=tokenizer --source_vocabulary=8000 --target_vocabulary=4000

The same corpus and flags give the same bytes; a tokenizer that is there already is left as it is. Takes half a minute
for the quickstart corpus.
"""

from __future__ import annotations

import pathlib

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data import tokenizer_trainer
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import SIDES
from lingvo_moe.errors import UserError

FLAGS = flags.FlagValues()
flags.DEFINE_string("corpus", None, "The directory of the corpus, as tools.build_corpus made it.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "The directory to make.", flag_values=FLAGS)
flags.DEFINE_integer(
    "source_vocabulary", 8000, "Pieces of source.model, 256 bytes among them.", lower_bound=300, flag_values=FLAGS
)
flags.DEFINE_integer("target_vocabulary", 4000, "Pieces of target.model.", lower_bound=50, flag_values=FLAGS)
flags.DEFINE_float(
    "temperature", 5.0, "Of the mixture of languages: 1 as in the corpus, inf all equal.", flag_values=FLAGS
)
flags.DEFINE_integer(
    "max_sentences", 200_000, "How many sentence pairs to draw, repetitions included.", lower_bound=1, flag_values=FLAGS
)
flags.DEFINE_bool("force", False, "Replace a tokenizer of another corpus or of other flags.", flag_values=FLAGS)


def main(argv: list[str]):
    """Trains what the flags describe and says what came of it."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; the corpus is named with --corpus={argv[1]}.")
    for name in ("corpus", "output"):
        if not FLAGS[name].value:
            raise UserError(f"--{name}=DIR is missing.")
    wanted = {side: FLAGS[f"{side}_vocabulary"].value for side in SIDES}
    tokenizers, is_new = tokenizer_trainer.train(
        Corpus.open(FLAGS.corpus),
        pathlib.Path(FLAGS.output),
        wanted,
        FLAGS.temperature,
        FLAGS.max_sentences,
        FLAGS.force,
    )
    sizes = {side: getattr(tokenizers, side).vocabulary_size for side in SIDES}
    for side in SIDES:
        if sizes[side] < wanted[side]:
            print(
                f"note: {side}.model has {sizes[side]} pieces, not {wanted[side]}: the corpus has no more to give. "
                f"A model's vocabulary must be at least {sizes[side]}."
            )
    print(
        f"{FLAGS.output} {'trained' if is_new else 'is up to date'}: {sizes['source']} source and {sizes['target']} "
        "target pieces."
    )


if __name__ == "__main__":
    app.run(main, FLAGS)
