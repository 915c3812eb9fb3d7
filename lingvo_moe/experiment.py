"""An experiment: the configuration that a registered name stands for, as one tree of plain values.

A registered class is a `Recipe`: a few class attributes, and `experiment()`, which returns the full configuration.
`show` prints it, `--set` changes it, and the programs are lowered from it.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence

from lingvo_moe import definitions, overrides, ranges, registry, tree
from lingvo_moe.data.batching import BatchConfig, InputConfig
from lingvo_moe.data.pair_languages import PairLanguages, languages_of_readers
from lingvo_moe.data.speech import SpeechInput
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.volumes import VolumeInput
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.layers.base import check_weights
from lingvo_moe.models.segmentation import UNet
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.ops import precision
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.program import COMPILER_DEFAULT
from lingvo_moe.protocols import (
    DecodingModel,
    ExperimentModel,
    Model,
    Optimizer,
    RecognisingModel,
    SegmentingModel,
    TiedModel,
)
from lingvo_moe.ranges import COUNT, SHARE
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.steps import Steps
from lingvo_moe.training_schedule import TrainingSchedule

PLATFORMS = ("", "cpu", "gpu", "tpu")
DEVICE_FLAGS = "--devices"  # of most commands


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A model and everything that its training and decoding depend on.

    Attributes:
      model, optimizer, input, training, search: the parts. The model may be of any class that has what
        `protocols.ExperimentModel` lists; `plan` knows `Transformer` and `UNet`.
      mesh: the device mesh; `--devices`, `--mesh` and `--set mesh` replace it.
      layout: the sharding of tensors over it: a registered layout, or `auto` for the one of the papers.
      platform: the platform that the programs are optimised for, `cpu`, `gpu` or `tpu`; empty for the one they run on.
      matmul_precision: of float32 operands, `default`, `highest` or `bfloat16`; see `ops.precision`.
      windowed_einsum_mib: the smallest tensor, in MiB, for which XLA makes a windowed einsum instead of gathering
        it, on TPUs; -1 for the compiler's own choice. See `program.Program`.
      decoding_batch: the number of sentences translated, or prompts continued, at a time.
      reread_below: texts with a confidence below are read once more, written otherwise, and the most confident
        translation is taken (`inference.lines.variants`); 0 for none.
      corpus, tokenizers: output directories of `tools.build_corpus` and `tools.train_tokenizer`; `--corpus` and
        `--tokenizers` replace them. Empty for volumes, which a program makes.
    """

    model: Transformer | UNet
    optimizer: Optimizer = Adafactor()
    input: BatchConfig = InputConfig()
    training: TrainingSchedule = TrainingSchedule()
    search: BeamSearch = BeamSearch()
    mesh: DeviceMesh = DeviceMesh()
    layout: str = "auto"
    platform: str = ""
    matmul_precision: str = "default"
    windowed_einsum_mib: int = COMPILER_DEFAULT
    decoding_batch: int = 64
    reread_below: float = 0.0
    corpus: str = "build/corpus"
    tokenizers: str = "build/tokenizers"

    def __post_init__(self):
        for kind, part, protocols in (
            ("model", self.model, (Model, ExperimentModel)),
            ("optimizer", self.optimizer, (Optimizer,)),
        ):
            what = f"{kind} {definitions.form(part)}"
            with definitions.named(lambda what=what: what, part):
                definitions.check(what, part, *protocols)
        of_optimizer = f"optimizer {definitions.form(self.optimizer)}"
        definitions.check_call(f"{of_optimizer}: learning_rate", self.optimizer.learning_rate, "step")

    @property
    def steps(self) -> Steps:
        """The step functions on this experiment's mesh."""
        layout = Layout.of(self.mesh, self.layout)
        return Steps(
            self.model,
            self.optimizer,
            layout,
            self.platform,
            self.matmul_precision,
            self.windowed_einsum_mib,
            self.training.ema_decay,
        )

    @property
    def decodes(self) -> bool:
        """Whether the model translates or generates, one token after the other."""
        return isinstance(self.model, DecodingModel)

    @property
    def translates(self) -> bool:
        """Whether the model translates sentences."""
        return self.decodes and "source" in self.model.sides

    @property
    def generates(self) -> bool:
        """Whether the model continues prompts: a language model."""
        return self.decodes and not self.translates

    @property
    def recognises(self) -> bool:
        """Whether the model recognises speech: its sources are recordings."""
        return isinstance(self.model, RecognisingModel)

    @property
    def segments(self) -> bool:
        """Whether the model segments volumes."""
        return isinstance(self.model, SegmentingModel)

    @property
    def tied_model(self) -> TiedModel | None:
        """The model if its embeddings are tied, otherwise None."""
        return self.model if isinstance(self.model, TiedModel) and self.model.tied_tables else None

    @property
    def texts(self) -> InputConfig:
        """The input of a model that reads texts or recordings; raises UserError for one of another kind."""
        if isinstance(self.input, InputConfig):
            return self.input
        raise UserError(
            f"{type(self.model).__name__} reads an input of {type(self.input).__name__}, which has no texts."
        )

    def check(self, device_flags: str = DEVICE_FLAGS, reads_batches: bool = True):
        """Raises UserError where the parts do not fit each other or the mesh; called after all flags are applied.

        Args:
          device_flags: of the command, which select the devices; for the remedies.
          reads_batches: whether the command reads batches of `input.batch_size`, which devices must then divide.
        """
        self._check_weights()
        layout = Layout.of(self.mesh, self.layout)
        if self.platform not in PLATFORMS:
            raise UserError(
                f"platform is {self.platform!r}; use one of {', '.join(filter(None, PLATFORMS))}, or leave it empty."
                f"{did_you_mean(self.platform, PLATFORMS)}"
            )
        precision.check(self.matmul_precision)
        ranges.check("", self, {"decoding_batch": COUNT, "reread_below": SHARE})
        if self.windowed_einsum_mib < COMPILER_DEFAULT:
            raise UserError(
                f"windowed_einsum_mib is {self.windowed_einsum_mib}; expected a size in MiB, 0 for all matmuls, or "
                f"{COMPILER_DEFAULT} for the compiler's own choice."
            )
        self._check_sides()
        self._check_search()
        self._check_volumes(layout, device_flags)
        self._check_pipeline(layout)
        self._check_divisible(layout, device_flags, reads_batches)
        self._check_vocabularies(layout, device_flags)
        for stack, name, groups in self.model.settings_of_layers("num_groups"):
            length = int(self.model.positions_of(f"{stack}/", self.input.lengths))
            if (tokens := self.input.batch_size * length) % groups:
                raise UserError(
                    f"a batch has {self.input.batch_size} x {length} = {tokens} tokens in the {stack}, which {name}, "
                    f"{groups}, does not divide; change one of them."
                )

    def _check_weights(self):
        """Raises UserError where the model, or the optimizer for its state, declares no tree of `Weight`s."""
        what, optimizer = (f"{kind} {type(getattr(self, kind)).__name__}" for kind in ("model", "optimizer"))
        with definitions.named(lambda: what, self.model):
            weights = self.model.weights()
            check_weights(what, weights)
        with definitions.named(lambda: optimizer, self.optimizer):
            check_weights(f"{optimizer}: state", self.optimizer.state(weights))

    def _check_divisible(self, layout: Layout, device_flags: str, reads_batches: bool):
        """Raises UserError where devices do not divide what the layout shards among them."""
        # A batch and its groups are divided into microbatches first, each of which the devices divide.
        microbatches = self.model.microbatches
        sizes = [("input.batch_size", "B", self.input.batch_size, microbatches)] if reads_batches else []
        if self.translates:
            sizes.append(("decoding_batch", "B", self.decoding_batch, 1))
        for field, axis, parts in (
            ("num_experts", "E", 1),
            ("num_groups", "G", microbatches),
            ("inference_num_groups", "G", microbatches),
        ):
            sizes += [(name, axis, size, parts) for _, name, size in self.model.settings_of_layers(field)]
        inside = layout if self.model.pipeline == "none" else layout.within_stages()
        for name, axis, size, parts in sizes:
            devices = inside.num_shards(axis, axis) if parts > 1 else layout.num_shards(axis, axis)
            multiple = math.lcm(parts * devices, layout.num_shards(axis, axis))
            if size % multiple:
                of = f"{parts} microbatches on {devices}" if parts > 1 else devices
                setting = "the layer pattern" if " of layer " in name else f"--set {name}=N"
                raise UserError(
                    f"{name} is {size}, which {of} devices (mesh {self.mesh}) do not divide. Use {device_flags} "
                    f"with a divisor of {size}, or {setting} with a multiple of {multiple}."
                )

    def _check_vocabularies(self, layout: Layout, device_flags: str):
        """Raises UserError where devices do not divide the vocabulary of a weight that the layout shards by it.

        `Program.check_divisible` finds every such dimension, but only once the program is traced, and knows no setting.
        """
        for weight in tree.flatten(self.model.weights()).values():
            devices = layout.num_shards(weight.logical_axes, "V") if "V" in weight.logical_axes else 1
            size = weight.shape[weight.logical_axes.index("V")] if devices > 1 else 0
            # Both, where they are equal: sides with tied embeddings may share their table.
            names = [f"model.{side}_vocabulary" for side, pieces in self.model.vocabularies.items() if pieces == size]
            if size % devices and names:
                multiple = math.ceil(size / devices) * devices
                raise UserError(
                    f"{names[0]} is {size}, which {devices} devices (layout {self.layout}, mesh {self.mesh}) do not "
                    f"divide. Use {' '.join(f'--set={name}={multiple}' for name in names)} in a new training, or "
                    f"{device_flags} with a divisor of {size}, for instance {math.gcd(size, devices)}."
                )

    def _check_pipeline(self, layout: Layout):
        """Raises UserError where the microbatches do not divide the batch, or the devices the stages."""
        model = self.model
        batch = self.input.batch_size
        if batch % model.microbatches:
            fitting = max(count for count in range(1, min(model.microbatches, batch) + 1) if batch % count == 0)
            raise UserError(
                f"model.microbatches is {model.microbatches}, which does not divide input.batch_size, {batch}. Use "
                f"--set model.microbatches=N with a divisor of it, for instance {fitting}."
            )
        devices = layout.num_shards("P", "P")
        if model.pipeline != "none" and model.stages % devices:
            raise UserError(
                f"model.stages is {model.stages}, which {devices} devices (layout {self.layout}, mesh {self.mesh}) do "
                f"not divide. Use --set model.stages=N with a multiple of {devices}, or a --mesh with a divisor of "
                f"{model.stages} for stages."
            )

    def _check_sides(self):
        """Raises UserError where the sides of the input are not those of the model, or not of its kind."""
        self._check_kind()
        self._check_corpus()
        self._check_model_fields()
        if self.model.sides == tuple(self.input.lengths):
            if isinstance(self.input, InputConfig) and self.input.name_substitution and not self.input.source_length:
                raise UserError(
                    f"input.name_substitution is {self.input.name_substitution}, but {type(self.model).__name__} reads "
                    f"no source (input.source_length is 0). Leave input.name_substitution out."
                )
            return
        if "source" in self.model.sides:
            raise UserError(
                "input.source_length is 0, but a translation model reads sources; set it to the tokens of a row."
            )
        raise UserError(
            f"input.source_length is {self.texts.source_length}, but a language model reads targets alone; set it to 0."
        )

    def _check_search(self):
        """Raises UserError where the search names, or keeps more, tokens than the vocabulary has."""
        vocabulary = self.model.vocabularies.get("target")
        if not self.decodes or vocabulary is None:
            return
        # A larger beam cannot be filled by the first token, and its program takes long to compile.
        if self.search.beam_size > vocabulary:
            raise UserError(
                f"search.beam_size is {self.search.beam_size}; expected at most {vocabulary}, the tokens of the "
                "vocabulary. Beams of 4 to 16 are usual."
            )
        named = {"bos_id": (self.search.bos_id,), "eos_id": (self.search.eos_id,)}
        for field, ids in {**named, "forbidden_ids": self.search.forbidden_ids}.items():
            for wrong in (number for number in ids if not 0 <= number < vocabulary):
                raise UserError(
                    f"search.{field} has {wrong}, which is no token of a vocabulary of {vocabulary}; expected 0 to "
                    f"{vocabulary - 1}."
                )
        if self.search.force_first and not self.translates:
            raise UserError(
                "search.force_first is for translations, which may begin with their language; leave it out."
            )
        if self.search.bos_id != self.texts.bos_id:
            raise UserError(
                f"search.bos_id is {self.search.bos_id}, and input.bos_id {self.texts.bos_id}; the decoder begins with "
                f"the same token in training and in decoding. Set both."
            )

    def _check_kind(self):
        """Raises UserError where recordings or volumes are read by a model of texts, and the like."""
        expected = SpeechInput if self.recognises else VolumeInput if self.segments else InputConfig
        kinds = (VolumeInput, SpeechInput, InputConfig)  # the first that the input is an instance of
        if next((kind for kind in kinds if isinstance(self.input, kind)), None) is not expected:
            raise UserError(
                f"{type(self.model).__name__} reads an input of {expected.__name__}, not of "
                f"{type(self.input).__name__}; change the recipe."
            )

    def _check_volumes(self, layout: Layout, device_flags: str):
        """Raises UserError where devices have no share of the volumes, or one that is too small."""
        if not isinstance(self.model, SegmentingModel) or not isinstance(self.input, VolumeInput):
            return
        axes = self.input.specs()["source"]["voxels"].logical_axes
        shards = {axis: layout.num_shards(axes, axis) for axis in axes}
        if math.prod(shards.values()) < self.mesh.size:
            raise UserError(
                f"layout {self.layout} shares volumes among {math.prod(shards.values())} of the {self.mesh.size} "
                f"devices (mesh {self.mesh}), and the others would repeat their work. Use --set layout=spatial with "
                f"{device_flags} for the dimension X, or --set layout=spatial_data with --mesh, for the batch and X."
            )
        self.model.check_size(self.input.size, tuple(shards[axis] for axis in "XYZ"))

    def _check_model_fields(self):
        """Raises UserError where the model expects arrays of other widths than the input has."""
        for name, expected in self.input.model_fields.items():
            found = getattr(self.model, name, expected)
            if found != expected:
                raise UserError(
                    f"model.{name} is {found}, but the input has {expected}; use --set model.{name}={expected}."
                )

    def _check_corpus(self):
        """Raises UserError where a corpus is given for volumes, which a program makes."""
        for flag in ("corpus", "tokenizers"):
            if isinstance(self.input, VolumeInput) and (given := getattr(self, flag)):
                raise UserError(f"--{flag}={given}: a program makes the volumes of this model; leave --{flag} out.")

    def check_tokenizers(self):
        """Raises UserError as `open_tokenizers`, or for languages that they lack, if the model has a vocabulary."""
        if self.model.vocabularies:
            self.open_tokenizers().check_languages(self.texts.languages)

    def open_tokenizers(self) -> Tokenizers:
        """Reads the tokenizers, in no language.

        Raises:
          UserError: the vocabulary of one is larger than the model's, or tied embeddings have one table for the
            different pieces of two.
        """
        tokenizers = Tokenizers.load_for(self.model.vocabularies, self.tokenizers)
        tables = tied.tied_tables if (tied := self.tied_model) else {}
        if len(set(tables.values())) < len(tables) and not tokenizers.is_shared:
            raise UserError(
                f"model.tied_embeddings: source_vocabulary and target_vocabulary are equal, so both sides share one "
                f"table, but {self.tokenizers} has two tokenizers, whose pieces differ. Train one tokenizer "
                f"(tools.train_tokenizer --shared_vocabulary), or set different sizes."
            )
        return tokenizers

    def tokenizers_of_languages(self) -> Tokenizers:
        """Reads the tokenizers, in the languages that `input` names.

        Raises:
          UserError: as `open_tokenizers`; one has pieces for languages and `input` names none of them, or the reverse;
            or translations begin with a language, and `search.force_first` is false, or the reverse.
        """
        tokenizers = self.open_tokenizers().in_languages(self.texts.languages)
        has_languages = tokenizers.target.language_id is not None
        if self.translates and has_languages != self.search.force_first:
            said = "begin with their language" if has_languages else "have no language to begin with"
            raise UserError(
                f"search.force_first is {str(self.search.force_first).lower()}, but by the tokenizers in "
                f"{self.tokenizers}, translations {said}. Pass --set=search.force_first={str(has_languages).lower()}."
            )
        return tokenizers

    def pair_languages(self, labels: Iterable[str], what: str) -> PairLanguages:
        """Returns the languages of pairs of texts with these labels; see `PairLanguages` for arguments and errors."""
        return languages_of_readers(self.texts, self.open_tokenizers().by_side, labels, what)

    def in_languages(self, languages: Mapping[str, str]) -> Experiment:
        """Returns the experiment with texts in these languages, by side, whose names are not checked."""
        named = {f"{side}_language": language for side, language in languages.items()}
        return dataclasses.replace(self, input=dataclasses.replace(self.texts, **named))

    def batch_specs(self) -> dict:
        """Returns the tree of `Spec`s of a training batch."""
        return self.input.specs()

    def decoding_specs(self) -> dict:
        """Returns the tree of `Spec`s of the sentences that are translated, or the prompts continued, at a time.

        With `search.force_first`, `first_ids` `[B] int32` are the first tokens of their translations.

        A language model reads a prompt, bos included, and its continuation in a row of `input.target_length` tokens, of
        which `search.max_length` are for the continuation.

        Raises:
          UserError: no tokens are left for the prompts of a language model, or devices do not divide their number.
        """
        changes = {"batch_size": self.decoding_batch}
        if self.generates:
            changes["source_length"] = self._prompt_length()
        specs = dataclasses.replace(self.texts, **changes).specs()["source"]
        first_ids = {"first_ids": Spec((self.decoding_batch,), "int32", "B")} if self.search.force_first else {}
        return {**specs, **first_ids}

    def _prompt_length(self) -> int:
        length, most = self.texts.target_length, self.search.max_length
        if most > length - 2:  # bos, and a token of the prompt
            raise UserError(
                f"search.max_length is {most}, but the model reads a prompt and its continuation in "
                f"input.target_length={length} tokens, bos included. Use --set search.max_length=N with at most "
                f"{length - 2}."
            )
        devices = Layout.of(self.mesh, self.layout).num_shards("BS", "B")
        if self.decoding_batch % devices:
            raise UserError(
                f"decoding_batch is {self.decoding_batch}, which {devices} devices (mesh {self.mesh}) do not divide. "
                f"Use --set decoding_batch=N with a multiple of {devices}."
            )
        return length - most


class Recipe:
    """Base class of registered models."""

    @abc.abstractmethod
    def experiment(self) -> Experiment:
        """Returns the full configuration of this model."""
        raise NotImplementedError


def get(
    name: str,
    assignments: Sequence[str] = (),
    mesh: DeviceMesh | None = None,
    device_flags: str = DEVICE_FLAGS,
    reads_batches: bool = True,
) -> Experiment:
    """Returns the experiment of a registered name.

    Args:
      name: a registered name or an unambiguous part of one.
      assignments: `field=value` texts of `--set`.
      mesh: replaces the experiment's own; None keeps that.
      device_flags: of the command, which select the devices; for the remedies.
      reads_batches: see `Experiment.check`.

    Raises:
      UserError: an unknown name or field, or values that do not fit each other.
    """
    experiment = unchecked(name, assignments)
    if mesh is not None:
        definitions.check_type("the mesh", mesh, DeviceMesh)
        experiment = dataclasses.replace(experiment, mesh=mesh)
    experiment.check(device_flags, reads_batches)
    return experiment


def unchecked(name: str, assignments: Sequence[str] = ()) -> Experiment:
    """Returns the experiment of a registered name on its own mesh, which its values may not fit; as `get` otherwise."""
    return overrides.apply(_made(name), assignments)


def _made(name: str) -> Experiment:
    """Returns the experiment that a recipe makes; raises UserError, which names it, for whatever goes wrong there."""
    cls = registry.get(name)
    what = registry.MODELS.label(cls)
    try:
        with definitions.named(lambda: what, cls):
            made = cls().experiment()
            definitions.check_type("the result of experiment()", made, Experiment)
            return made
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{definitions.described(what, error, cls)}.") from error


def text(name: str, experiment: Experiment, descriptions: Mapping[str, str] = types.MappingProxyType({})) -> str:
    """Returns the name, the number of weights, and every hyperparameter as a line `path = value`.

    Args:
      name: the registered name.
      experiment: with the hyperparameters.
      descriptions: of hyperparameters, by path; each is printed below its line.
    """
    lines = [f"{name}: {experiment.model.num_weights():,} weights"]
    for path, value in overrides.fields(experiment):
        lines.append(f"{path} = {value if isinstance(value, DeviceMesh) else repr(value)}")
        lines += textwrap.wrap(descriptions.get(path, ""), 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"
