"""Counts the lines whose translation loses a placeholder, a tag, an address, a path, a code or a number.

  python -m tools.quality.lost_placeholders --max_pairs=60    # packages that no model was trained on
  python -m tools.quality.lost_placeholders --preset=none --input=my_files --max_pairs=500    # your own .po files

The model is that of `translate`: the released one unless --model and --logdir name another. Held-out splits of corpora
have no lines with placeholders, so the tool reads the data sources themselves. It takes the lines whose reference has
all that `kept_text.required` finds in the source, up to --max_pairs of each language and kind, by a hash of the
English text. A table in Markdown has the number of lines, and how many translations keep what they must.
"""

from __future__ import annotations

from collections.abc import Iterable

from absl import flags

from lingvo_moe.cli import app, command_flags, recorded, released, run_config, run_setup
from lingvo_moe.data.corpora import corpus_builder, pocket
from lingvo_moe.data.corpora.collected_pairs import collect_pairs
from lingvo_moe.data.languages import check_selected
from lingvo_moe.errors import UserError
from lingvo_moe.inference.lines.kept_text import count_required, required
from lingvo_moe.inference.translator import Translator
from lingvo_moe.utils.hashes import sha256
from tools import markdown

FLAGS = flags.FlagValues()
command_flags.define_flags(run_config.SearchConfig, FLAGS)
flags.DEFINE_string("preset", "unseen", "data sources, as of tools.build_corpus", flag_values=FLAGS)
flags.DEFINE_multi_string("input", [], "files of your own, as of tools.build_corpus; repeatable", flag_values=FLAGS)
flags.DEFINE_string("packages", None, "directory for downloads, as of tools.build_corpus", flag_values=FLAGS)
flags.DEFINE_list("languages", list(pocket.LANGUAGES), "languages of the lines", flag_values=FLAGS)
flags.DEFINE_integer("max_pairs", 100, "lines of each language and kind", lower_bound=1, flag_values=FLAGS)

# By the groups of `kept_text.required`.
KINDS = {
    "placeholder": "placeholders",
    "tag": "tags",
    "address": "addresses",
    "path": "paths",
    "code": "codes",
    "number": "numbers",
}


def main(arguments: list[str]):
    """Translates and prints the table."""
    app.no_arguments(arguments[1:])
    given = recorded.read(run_config.SearchConfig, FLAGS)
    selected = check_selected(FLAGS.languages, "--languages")
    found = corpus_builder.find_sources(FLAGS.preset, FLAGS.input, FLAGS.packages, selected)
    pairs = collect_pairs(found.sources, selected).pairs
    lines = {kind: sorted({line for own in pairs.values() for line in choose(own, kind)}) for kind in KINDS.values()}
    if not any(lines.values()):
        raise UserError(
            f"--preset={FLAGS.preset}: no line of {', '.join(FLAGS.languages)} has {', '.join(KINDS.values())}."
        )
    with released.by_default(given) as config:
        name, experiment, engine = run_setup.set_up(config, "decode", {"search.beam_size": config.beam_size})
        translator = Translator(name, experiment, engine, config.log_directory())
        rows = [_row(translator, kind, lines[kind]) for kind in KINDS.values()]
    print(markdown.table(("lines with", "number", "intact", "share"), rows))


def choose(pairs: Iterable[tuple[str, str]], kind: str) -> list[str]:
    """Returns sources with what is required of this kind, whose references have all that is required of them."""
    kept = {
        english: source
        for source, english in sorted(pairs)
        if kind in kinds(source) and count_required(source) == count_required(english)
    }
    drawn = sorted(kept, key=sha256)
    return [kept[english] for english in drawn[: FLAGS.max_pairs]]


def kinds(text: str) -> set[str]:
    """Returns which of KINDS a text has."""
    return {KINDS[each.lastgroup or ""] for each in required(text)}


def _row(translator: Translator, kind: str, lines: list[str]) -> tuple[str, ...]:
    intact = sum(best.is_intact for best, *_ in translator.translate(lines))
    share = f"{100 * intact / len(lines):.1f} %" if lines else "-"
    return (kind, str(len(lines)), str(intact), share)


if __name__ == "__main__":
    app.run(main, FLAGS)
