"""Writes testdata/golden/hugging_face: what Hugging Face's own code computes for tiny random translators.

    python -m tools.hugging_face_golden [--only=nllb,m2m] [--venvs=DIRECTORY] [--tokenizers]

NAME.json of each model of `hugging_face_models` is written by `worker`, in a virtual environment with the versions of
requirements.txt, which is made on first use in minutes. `--tokenizers` first trains the tokenizers again and rewrites
their files, which are in testdata/golden/hugging_face/NAME; the models' vocabularies depend on them. The same versions
on the same kind of processor write the same files; on another one the last digits may differ.

NAME.json has:

    versions             of torch, transformers, tokenizers and sentencepiece
    config               config.json
    weights_digest       `hugging_face_models.digest`
    weights              the shapes of what `save_pretrained` writes, by name
    tied_names           further names of the shared table in the model's own state, which files may have, too
    facts                what the loaded model and tokenizers say of themselves, the ids of languages among it; for
                         Marian, whether logits, of which all scores are, have final_logits_bias in them, and the
                         tokens of a source that begins with the language of its translation
    positions            the first rows of the table of positions, which is in no file; MADLAD-400 has none, and the
                         buckets of distances among its facts
    tokens               all tokens of the slow tokenizer, by id
    examples             of each:
      source, target, source_language, target_language
      source_ids, labels             of the slow tokenizer
      source_ids_fast, labels_fast   of the fast one, where they differ
      decoder_input_ids              the labels shifted, after the token that starts the decoder
      log_probabilities              of each label, computed in one batch of all examples with padding
      logits                         of the first example: all of the first two positions
      encoder_output                 of the first example: the first four numbers of each position
      forced_bos_token_id            the target language, which every hypothesis begins with; null for Marian and
                                     MADLAD-400, whose source_ids begin with it
      hypotheses                     of beam search, the best first:
        ids      with the token that starts the decoder and the forced one
        score    the sum of the log-probabilities of what follows these; there is no penalty for the length
        ends     whether the last id is the end; others reached the limit, where no end is forced
        text
      renormalized_hypotheses        the same for a model with `renormalize_logits` in its generation_config.json. No
                                     hypothesis has a token of `bad_words_ids`. The log-probabilities of `hypotheses`
                                     leave these tokens their share; those of these scores do not
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.testing import hugging_face_models
from lingvo_moe.utils import output_files, progress
from tools.benchmarks import environments

_ENVIRONMENT = "hugging_face_golden"
_REQUIREMENTS = pathlib.Path(__file__).parent / "requirements.txt"
_LAST_LINES = 4

_VALUES = flags.FlagValues()
flags.DEFINE_list("only", [], "names of models; default: all", flag_values=_VALUES)
flags.DEFINE_boolean("tokenizers", False, "first write the tokenizers' files again", flag_values=_VALUES)
flags.DEFINE_string("venvs", "build/venvs", "directory of the virtual environment, which is kept", flag_values=_VALUES)
flags.DEFINE_string(
    "output",
    str(hugging_face_models.TOKENIZERS),
    "directory of the golden values, but not of the tokenizers",
    flag_values=_VALUES,
)


def main(arguments: list[str]):
    """Writes the golden values."""
    app.no_arguments(arguments[1:])
    names = _chosen(_VALUES.only)
    output = pathlib.Path(_VALUES.output)
    python = environments.python_of(_ENVIRONMENT, pathlib.Path(_VALUES.venvs).absolute(), _REQUIREMENTS)
    if _VALUES.tokenizers:
        _run(python, "tokenizer_files", hugging_face_models.TOKENIZERS)
    for name in progress.track(names, "computing golden values"):
        path = output / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with output_files.atomic_writer(str(path)) as file:
            file.write(_text(_golden(python, name)))
        print(path)


def _chosen(only: list[str]) -> list[str]:
    names = list(hugging_face_models.CONFIGS)
    if unknown := [name for name in only if name not in names]:
        raise UserError(f"--only={unknown[0]}: there is no such model; they are {', '.join(names)}.")
    return only or names


def _golden(python: pathlib.Path, name: str) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        hugging_face_models.write(pathlib.Path(directory), name)
        values = json.loads(_run(python, "worker", pathlib.Path(directory)))
    return {"config": hugging_face_models.CONFIGS[name], "weights_digest": hugging_face_models.digest(name), **values}


def _run(python: pathlib.Path, module: str, directory: pathlib.Path) -> str:
    """Returns what a module of this package prints in the environment."""
    command = [str(python), "-m", f"tools.{_ENVIRONMENT}.{module}", str(directory)]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        # One core, and nothing is downloaded.
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
    )
    if result.returncode:
        last = "\n".join(result.stderr.strip().splitlines()[-_LAST_LINES:])
        raise UserError(f"`{' '.join(command)}` failed:\n{last}")
    return result.stdout


def _text(values: dict) -> str:
    """Returns JSON with one line for each value of the top, and one for each example."""
    lines = [f"{_compact(key)}: {_compact(value)}" for key, value in values.items() if key != "examples"]
    examples = ",\n".join(_compact(example) for example in values["examples"])
    return "{\n" + ",\n".join(lines) + ',\n"examples": [\n' + examples + "\n]}\n"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    app.run(main, _VALUES)
