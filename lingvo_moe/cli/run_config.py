"""The flags of every command, as typed configurations; `command_flags` has what they are made of."""

from __future__ import annotations

import dataclasses
import pathlib

from absl import flags

from lingvo_moe import overrides, program_cache, registry
from lingvo_moe.cli.command_flags import CommandConfig, flag
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(CommandConfig):
    """The flags of a command that is about one model."""

    model: str | None = flag(flags.DEFINE_string, None, "a registered name, or an unambiguous part of one")
    assignments: tuple[str, ...] = flag(
        flags.DEFINE_multi_string,
        (),
        "override FIELD=VALUE, a hyperparameter that `show` prints; an unambiguous end of FIELD is enough",
        "set",
    )

    def full_name(self) -> str:
        """Returns the registered name that `--model` selects; raises UserError if it is missing or selects none."""
        if self.model is None:
            raise UserError("--model is missing; `python -m lingvo_moe list` shows the registered models.")
        return registry.full_name(self.model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(ModelConfig):
    """The flags of a command that lowers programs for a mesh."""

    devices: int | None = flag(
        flags.DEFINE_integer, None, "the number of devices, in one mesh axis; virtual ones on the CPU"
    )
    mesh: str | None = flag(flags.DEFINE_string, None, "the device mesh, e.g. 8, 4x2 or 2x2x2, instead of --devices")

    def device_mesh(self) -> DeviceMesh | None:
        """Returns the mesh of `--mesh`, `--set mesh` or `--devices`, None without these.

        Raises:
          UserError: more than one of them is given, or a wrong value.
        """
        return _mesh(self.assignments, self.mesh, self.devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(MeshConfig):
    """The flags of a command that runs programs."""

    logdir: str | None = flag(flags.DEFINE_string, None, "directory of checkpoints and curves")
    engine: str = flag(
        flags.DEFINE_string,
        "pjrt",
        "pjrt: the devices that JAX finds; tpu_strategy: a Cloud TPU slice through TensorFlow's runtime, to train on; "
        "or the name of an engine that --import registers",
    )
    platform: str | None = flag(
        flags.DEFINE_enum, None, "where to run; default: the platform that JAX finds", enum_values=["cpu", "gpu", "tpu"]
    )
    tpu: str | None = flag(
        flags.DEFINE_string,
        None,
        "tpu_strategy: the name of the slice, grpc://HOST:PORT of its first machine, or local on the machine of a "
        "slice with a single one",
    )
    tokenizers: str | None = flag(
        flags.DEFINE_string, None, "directory of tools.train_tokenizer's output", sets="tokenizers"
    )
    cache: str = flag(
        flags.DEFINE_string, program_cache.default, "directory where compiled programs are cached; off for no cache"
    )
    corpus: str | None = None
    source_language: str | None = None
    target_language: str | None = None

    def full_name(self) -> str:
        """See `ModelConfig.full_name`; `recorded.by_default` takes the model from the log directory."""
        if self.model is None:
            raise UserError(
                "--model is missing, and so is --logdir, which has the model of a training run; `python -m lingvo_moe "
                "list` shows the registered models."
            )
        return super().full_name()

    def log_directory(self) -> pathlib.Path:
        """Returns `--logdir`; raises UserError if it is missing."""
        if not self.logdir:
            raise UserError("--logdir is missing: the directory of checkpoints and curves.")
        return pathlib.Path(self.logdir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguagesConfig(RunConfig):
    """The flags of a command that reads texts which, for an imported model, begin with a language."""

    source_language: str | None = flag(
        flags.DEFINE_string,
        None,
        "language of the input texts, for an imported model: fra_Latn (NLLB-200), fr (M2M-100). With a corpus, "
        "`corpus` takes the language of each pair",
        sets="input.source_language",
    )
    target_language: str | None = flag(
        flags.DEFINE_string,
        None,
        "language to translate into, for an imported model: eng_Latn (NLLB-200), en (M2M-100, MADLAD-400), eng or en "
        "(Opus-MT). With a corpus, `corpus` translates each pair from English into its own language",
        sets="input.target_language",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig(LanguagesConfig):
    """The flags of a command that reads a corpus."""

    corpus: str | None = flag(flags.DEFINE_string, None, "directory of tools.build_corpus's output", sets="corpus")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(CorpusConfig):
    """The flags of `train`."""

    steps: int | None = flag(
        flags.DEFINE_integer,
        None,
        "stop at this step, instead of at training.steps",
        lower_bound=1,
        sets="training.steps",
    )
    initial_weights: str | None = flag(
        flags.DEFINE_string,
        None,
        "start new training with these weights instead of random ones: a log directory, which has the model, too, if "
        "--model is not passed; or a file of `checkpoint convert --output`",
    )
    initial_set: tuple[str, ...] = flag(
        flags.DEFINE_multi_string,
        (),
        "FIELD=VALUE, a setting of the shallower model whose file --initial_weights names, such as model.num_layers=4; "
        "the added layers begin as copies",
    )
    initial_tokenizers: str | None = flag(
        flags.DEFINE_string,
        None,
        "the tokenizers that the file of --initial_weights was trained with, if they are not --tokenizers; embeddings "
        "are then transferred piece by piece",
    )
    initial_embeddings: str | None = flag(
        flags.DEFINE_string, None, "start new training with the embeddings of this file of tools.train_embeddings"
    )
    coordinator: str | None = flag(
        flags.DEFINE_string, None, "HOST:PORT of process 0 for multi-process runs (docs/processes.md)"
    )
    processes: int | None = flag(
        flags.DEFINE_integer, None, "the number of processes that train this model, with equally many devices each"
    )
    process: int | None = flag(flags.DEFINE_integer, None, "the index of this process, from 0")

    def check_initial_weights(self):
        """Raises UserError if there is nothing at the path that `--initial_weights` names."""
        if self.initial_weights and not pathlib.Path(self.initial_weights).exists():
            raise UserError(
                f"--initial_weights={self.initial_weights}: there is no such file or directory; expected a log "
                f"directory, or a file whose name ends with .safetensors."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig(RunConfig):
    """The flags of a command that decodes."""

    beam_size: int | None = flag(
        flags.DEFINE_integer,
        None,
        "hypotheses per sentence, instead of the model's own number",
        lower_bound=1,
        sets="search.beam_size",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslateConfig(LanguagesConfig, SearchConfig):
    """The flags of `translate`."""

    input: str = flag(
        flags.DEFINE_string,
        "-",
        "a file of sentences, one a line, or a gettext catalog (.po, .pot); - for standard input",
    )
    output: str = flag(
        flags.DEFINE_string,
        "-",
        "where to write translations: a file, complete at the end, or - for standard output, as they are made once the "
        "whole input has been read",
    )
    copy_english: bool = flag(
        flags.DEFINE_boolean,
        True,
        "copy lines that are in English already, instead of translating them; not with an imported model",
    )
    n_best: int = flag(
        flags.DEFINE_integer,
        1,
        "different translations per line, at most; with more than one, each line is number, score, text",
    )
    scores: bool = flag(
        flags.DEFINE_boolean, False, "write each line as score, text: the length-normalised log-probability"
    )
    doubtful: str | None = flag(
        flags.DEFINE_string,
        None,
        "also write the doubtful lines to this file: number, confidence, source, translation (tab-separated)",
    )
    doubt_below: float = flag(
        flags.DEFINE_float,
        0.6,
        "the confidence below which a line is doubtful: the geometric mean of the probabilities of its tokens; a line "
        "that loses its end, a placeholder, a number or the like is always doubtful",
        lower_bound=0.0,
        upper_bound=1.0,
    )
    explain: str | None = flag(
        flags.DEFINE_string,
        None,
        "also write this JSON lines file: which experts took each token that encoder and decoder read, by layer",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(SearchConfig):
    """The flags of `generate`."""

    input: str = flag(
        flags.DEFINE_string,
        "-",
        "a file of prompts, one a line, whose white space at the end is left out; - for standard input",
    )
    output: str = flag(
        flags.DEFINE_string,
        "-",
        "where to write the continued prompts: a file, complete at the end, or - for standard output, as they are made",
    )
    continuations: int = flag(
        flags.DEFINE_integer,
        1,
        "continuations of each prompt; with more than one, each line is number, score, text",
        lower_bound=1,
    )
    scores: bool = flag(
        flags.DEFINE_boolean,
        False,
        "write each line as score, text: the length-normalised log-probability; of samples, the mean of their tokens'",
    )
    max_length: int | None = flag(
        flags.DEFINE_integer,
        None,
        "tokens of a continuation, at most, instead of the model's own number; a prompt may have what is left of "
        "input.target_length",
        lower_bound=1,
        sets="search.max_length",
    )
    temperature: float | None = flag(
        flags.DEFINE_float,
        None,
        "draw tokens at random, from the probabilities at this temperature; below 1, probable ones are drawn more "
        "often. Without it, beam search finds the most probable continuations",
    )
    top_k: int = flag(flags.DEFINE_integer, 0, "with --temperature, draw from this many tokens at most; 0 for all")
    top_p: float = flag(
        flags.DEFINE_float,
        1.0,
        "with --temperature, draw from the fewest most probable tokens that have this share of the probability",
    )
    seed: int = flag(
        flags.DEFINE_integer,
        0,
        "with --temperature: the same seed and line number draw the same tokens",
        lower_bound=0,
        upper_bound=2**31 - 1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranscribeConfig(RunConfig):
    """The flags of `transcribe`."""

    output: str = flag(flags.DEFINE_string, "-", "the file to write transcripts to; - for standard output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutConfig(CorpusConfig, SearchConfig):
    """The flags of a command that decodes held-out data."""

    languages: tuple[str, ...] = flag(flags.DEFINE_list, (), "comma-separated labels; default: all of the corpus")
    max_pairs: int = flag(
        flags.DEFINE_integer, 100, "sentences per language, recordings per voice, or volumes, at most", lower_bound=1
    )
    split: str = flag(flags.DEFINE_enum, "test", "which held-out data", enum_values=["test", "valid"])
    json: str | None = flag(
        flags.DEFINE_string,
        None,
        "also write the scores to this file; - for standard output, and tables on standard error",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(HeldOutConfig):
    """The flags of `eval`."""

    summary: bool = flag(
        flags.DEFINE_boolean, False, "only groups and the average, no row per language, voice or class"
    )
    translations: str | None = flag(
        flags.DEFINE_string,
        None,
        "also write the sentences to this file: language, confidence, source, translation, reference (tab-separated)",
    )
    transcripts: str | None = flag(
        flags.DEFINE_string,
        None,
        "also write the transcripts to this file: voice, recording, transcript, reference (tab-separated)",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseConfig(CorpusConfig):
    """The flags of `diagnose`."""

    batch: str | None = flag(
        flags.DEFINE_string,
        None,
        "LOGDIR/replay/STEP.npz of a step at which training stopped; default: the batch that training would read next",
    )
    json: str | None = flag(
        flags.DEFINE_string,
        None,
        "also write every number to this file; - for standard output, and tables on standard error",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(MeshConfig):
    """The flags of `export`."""

    logdir: str | None = flag(
        flags.DEFINE_string, None, "the model and the hyperparameters are those of the training in this directory"
    )
    program: str = flag(
        flags.DEFINE_enum,
        "train",
        "the program to export; decode is of translation and language models, transcribe of speech models, segment of "
        "U-Nets",
        enum_values=["init", "train", "evaluate", "decode", "transcribe", "segment"],
    )
    output: str | None = flag(flags.DEFINE_string, None, "the bundle to write")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowConfig(ModelConfig):
    """The flags of `show`."""

    explain: bool = flag(flags.DEFINE_bool, False, "describe each hyperparameter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(ModelConfig):
    """The flags of `plan`."""

    topology: str | None = flag(
        flags.DEFINE_string,
        None,
        "a TPU slice: generation and chips, e.g. v3:32x32x1; or a GPU cluster: GPU, nodes and GPUs of a node, e.g. "
        "h100:4x8; default: TPU v3 with as many cores as the model's mesh",
    )
    mesh: str | None = flag(
        flags.DEFINE_string,
        None,
        "the device mesh, e.g. 128 or 16x8; default: the model's own if it has as many devices, else all in one axis",
    )
    compiler_options: tuple[str, ...] = flag(
        flags.DEFINE_multi_string,
        (),
        "NAME=VALUE, an option of XLA's compiler, which the plan records",
        "compiler_option",
    )
    program: str = flag(flags.DEFINE_enum, "train", "the program to plan", enum_values=["train", "decode"])
    tokens: float = flag(
        flags.DEFINE_float,
        1e12,
        "tokens to train on (of the source, if the model translates), for the cost",
        lower_bound=1,
    )
    price_per_hour: float | None = flag(
        flags.DEFINE_float,
        None,
        "price of a TPU chip (of two cores in v2, v3, v4, tpu7x) or of a GPU for an hour, in any currency",
        lower_bound=0,
    )
    json: str | None = flag(
        flags.DEFINE_string,
        None,
        "also write the plan to this file; - for standard output, and tables on standard error",
    )
    search: tuple[str, ...] = flag(
        flags.DEFINE_list,
        (),
        "vary these and find the fastest that fits: any of remat,mesh,groups,batch, about a minute for each trial; or "
        "layout, which predicts all layouts, meshes, pipelines and policies and compiles the best "
        "(`layout,batch` also varies the batch size)",
    )
    budget: float = flag(
        flags.DEFINE_float,
        30.0,
        "time limit, in minutes, for compiling the best layouts of --search=layout",
        lower_bound=0.0,
    )
    top: int = flag(
        flags.DEFINE_integer,
        4,
        "number of layouts of --search=layout to compile; 0: only predict, compile nothing",
        lower_bound=0,
    )

    def device_mesh(self) -> DeviceMesh | None:
        """Returns the mesh of `--mesh` or `--set mesh`, None without these; raises UserError as `MeshConfig`."""
        return _mesh(self.assignments, self.mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ModelConfig):
    """The flags of `checkpoint`."""

    logdir: str | None = flag(
        flags.DEFINE_string, None, "directory of checkpoints; with `convert --input`, the directory to create"
    )
    step: int | None = flag(
        flags.DEFINE_integer,
        None,
        "inspect, verify, convert: this checkpoint; default: the newest (verify: all)",
        lower_bound=0,
    )
    grep: str | None = flag(
        flags.DEFINE_string, None, "inspect: only arrays whose path matches this regular expression"
    )
    stats: bool = flag(
        flags.DEFINE_boolean, False, "inspect: also read the arrays: mean, rms, min, max, values that are not finite"
    )
    last: int | None = flag(flags.DEFINE_integer, None, "average: this many of the newest checkpoints", lower_bound=2)
    steps: tuple[str, ...] = flag(flags.DEFINE_list, (), "average: these checkpoints, separated by commas")
    logdirs: tuple[str, ...] = flag(
        flags.DEFINE_list, (), "average: the newest checkpoints of these log directories, separated by commas"
    )
    input: str | None = flag(
        flags.DEFINE_string,
        None,
        "convert: the safetensors file, or the directory in Hugging Face's format, to make a log directory of",
    )
    output: str | None = flag(
        flags.DEFINE_string,
        None,
        "average: the log directory to make; convert: the safetensors file to write; with --like, the directory",
    )
    like: str | None = flag(
        flags.DEFINE_string,
        None,
        "convert --output: export to a directory in Hugging Face's format, with configuration and tokenizer of this "
        "one, which the model was imported from",
    )
    dtype: str = flag(
        flags.DEFINE_enum,
        "float32",
        "convert --output: dtype of the weights in the file; bfloat16 halves its size, int8 with scales (not with "
        "--like) quarters it",
        enum_values=["float32", "bfloat16", "int8"],
    )


def _mesh(assignments: tuple[str, ...], mesh: str | None, devices: int | None = None) -> DeviceMesh | None:
    """Returns the mesh of the one of these that is given; None without them."""
    assigned = overrides.assigned(assignments, "mesh")
    values = {"--mesh": mesh, "--set mesh": assigned, "--devices": devices}
    given = [f"{flag}={value}" for flag, value in values.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are mutually exclusive; pass one of them.")
    if devices is not None and devices < 1:
        raise UserError(f"--devices={devices}: at least one device is needed.")
    if devices is not None:
        return DeviceMesh((devices,))
    named = mesh or assigned
    if not named:
        return None
    try:
        return DeviceMesh.parse(named)
    except UserError as error:
        raise UserError(f"{given[0]}: {error}") from None
