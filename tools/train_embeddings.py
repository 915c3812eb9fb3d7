"""Computes initial embeddings from a corpus, so that pieces that translate each other start with like vectors.

  python -m tools.train_embeddings --corpus=corpus --tokenizers=tokenizers --output=embeddings.safetensors
  python -m lingvo_moe train --model=NAME --initial_embeddings=embeddings.safetensors ...

For models with tied embeddings. It counts pairs of pieces in sentence pairs and trains nothing by gradients; see
lingvo_moe/data/vocabularies/piece_vectors.py. It takes 42 CPU seconds for the quickstart corpus, and 8 bytes of memory
for each pair of pieces: 1.2 GB for 12,000 pieces. An existing file of the same corpus, tokenizer and flags is left
unchanged.
"""

from __future__ import annotations

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.vocabularies import piece_vectors
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files

FLAGS = flags.FlagValues()
flags.DEFINE_string("corpus", None, "The directory of a corpus that tools.build_corpus built.", flag_values=FLAGS)
flags.DEFINE_string("tokenizers", None, "The directory of tools.train_tokenizer's output.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "The file to write, whose name ends with .safetensors.", flag_values=FLAGS)
flags.DEFINE_integer(
    "model_dim", 256, "The model's model_dim: the length of a vector.", lower_bound=4, flag_values=FLAGS
)
flags.DEFINE_float(
    "temperature",
    piece_vectors.TEMPERATURE,
    "The sampling temperature of languages: 1 in proportion to the corpus, inf all equal.",
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "max_sentences",
    piece_vectors.MAX_SENTENCES,
    "The number of sentence pairs to sample, including repetitions.",
    lower_bound=1,
    upper_bound=2**40,
    flag_values=FLAGS,
)


def main(argv: list[str]):
    """Writes the vectors and prints a summary."""
    app.no_arguments(argv[1:])
    for name in ("corpus", "tokenizers", "output"):
        if not FLAGS[name].value:
            raise UserError(f"--{name} is missing.")
    if not FLAGS.output.endswith(piece_vectors.SUFFIX):
        raise UserError(f"--output={FLAGS.output}: expected a name that ends with {piece_vectors.SUFFIX}.")
    output_files.check_path("--output", FLAGS.output)
    tokenizers = Tokenizers.load(FLAGS.tokenizers)
    corpus = Corpus.open_to_train(FLAGS.corpus)
    sample = FLAGS.temperature, FLAGS.max_sentences
    is_new = piece_vectors.make(FLAGS.output, corpus, tokenizers, FLAGS.model_dim, *sample)
    sizes = tokenizers.source.vocabulary_size, tokenizers.target.vocabulary_size
    pieces = f"{sizes[0]} pieces" if tokenizers.is_shared else f"{sizes[0]} source and {sizes[1]} target pieces"
    size = f"{pieces}, vectors of {FLAGS.model_dim}"
    print(f"{FLAGS.output} {'made' if is_new else 'is up to date'}: {size}.")


if __name__ == "__main__":
    app.run(main, FLAGS)
