"""Checks of the fields of a model, before anything is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lingvo_moe.errors import UserError
from lingvo_moe.layers.checkpoint_policy import REMAT
from lingvo_moe.layers.embedding import WAVELENGTHS
from lingvo_moe.layers.normalization import NORMS
from lingvo_moe.layers.pipeline_schedule import Schedule
from lingvo_moe.models.choices import ACTIVATION_DTYPES, check_choices

if TYPE_CHECKING:
    from lingvo_moe.models.transformer import Transformer
    from lingvo_moe.models.translation import Translation


def check(model: Transformer):
    """Raises UserError for fields of a model that do not fit each other, or the name of a choice that is none."""
    _check_choices(model)
    _check_experts(model)
    _check_softmax(model)
    _check_patterns(model)
    _check_pipeline(model)


def _check_choices(model: Transformer):
    choices = {"activation_dtype": ACTIVATION_DTYPES, "remat": REMAT, "norm": NORMS, "wavelengths": WAVELENGTHS}
    check_choices(model, choices)
    if model.unroll and model.remat != "none":
        raise UserError(
            f"model.unroll is true and model.remat {model.remat}: rematerialisation needs the loop of layers. Set "
            f"model.remat=none or model.unroll=false."
        )


def _check_experts(model: Transformer):
    if model.num_experts and not model.settings_of_layers("num_experts"):
        patterns = " and ".join(dict.fromkeys(map(",".join, model.layer_patterns.values())))
        raise UserError(
            f"model.num_experts is {model.num_experts}, but no layer of the pattern {patterns} has experts; use "
            f"--set model.layer_pattern=dense,moe, or --set model.num_experts=0."
        )


def _check_softmax(model: Transformer):
    for field in ("logits_bias", "excluded_ids"):
        if model.num_candidates and getattr(model, field):
            raise UserError(f"model.{field} needs the whole vocabulary; set model.sampled_softmax=0.")
    if model.excluded_ids and model.label_smoothing:
        raise UserError(
            f"model.label_smoothing is {model.label_smoothing} and model.excluded_ids {model.excluded_ids}: smoothing "
            f"would give these a probability. Set one of them to 0, or to no ids."
        )
    if wrong := [each for each in model.excluded_ids if not 0 <= each < model.vocabularies["target"]]:
        raise UserError(
            f"model.excluded_ids has {wrong[0]}; expected ids from 0 to {model.vocabularies['target'] - 1}, those of "
            f"the target's vocabulary."
        )
    if model.num_candidates == 1:
        raise UserError("model.sampled_softmax is 1; expected at least 2 candidates, or 0 for the whole vocabulary.")
    if model.num_candidates and model.label_smoothing:
        raise UserError(
            f"model.sampled_softmax is {model.sampled_softmax} and model.label_smoothing is {model.label_smoothing}: "
            f"label smoothing needs the whole vocabulary. Set one of them to 0."
        )


def _check_patterns(model: Transformer):
    for stack, pattern in model.layer_patterns.items():
        for choice, layer in zip(pattern, model.feed_forwards(stack)):
            if stack == "decoder" and not layer.is_causal:
                raise UserError(
                    f"layer {choice!r} of the decoder is not causal (model.router is {model.router!r}): its tokens "
                    f"would depend on later ones. Translation models may use such layers and routers in the "
                    f"encoder alone, for instance --set model.encoder_layer_pattern=dense,moe:router=expert_choice."
                )
    for _, name, size in model.settings_of_layers("model_dim"):
        if size != model.model_dim:
            raise UserError(
                f"{name} is {size}, and model.model_dim {model.model_dim}; all layers of a model have the same. "
                f"Leave it out of the layer pattern."
            )


def _check_pipeline(model: Transformer):
    if model.pipeline == "none" and model.stages != 1:
        raise UserError(
            f"model.stages is {model.stages}, but model.pipeline is none, so there are no stages; set model.pipeline "
            "to gpipe or circular, or leave model.stages out."
        )
    for repeats in model.repeats.values():
        Schedule.of(model.pipeline, model.stages, model.microbatches, repeats)  # raises if the stages do not fit
    if model.pipeline == "none" and model.microbatches == 1:
        return
    setting = f"model.pipeline={model.pipeline}, model.microbatches={model.microbatches}"
    if model.unroll or model.remat == "none":
        raise UserError(
            f"{setting}: a microbatch's layers are recomputed in the backward pass, in a loop, but model.unroll is "
            f"{str(model.unroll).lower()} and model.remat {model.remat}. Use --set model.unroll=false and --set "
            f"model.remat=full, keep_outputs or keep_hidden."
        )
    for _, name, dispatch in model.settings_of_layers("dispatch"):
        if model.pipeline != "none" and dispatch == "gather":
            raise UserError(
                f"{setting}: {name} is gather, manual partitioning, which stages of a pipeline cannot do; use "
                f"einsum or auto, for instance --set model.dispatch=auto."
            )
    for field in ("num_groups", "inference_num_groups"):
        for _, name, groups in model.settings_of_layers(field):
            if groups % model.microbatches:
                raise UserError(
                    f"{name} is {groups}, which model.microbatches={model.microbatches} does not divide; each has an "
                    f"equal share of the groups. Use a divisor of {groups}, or a multiple of {model.microbatches} "
                    f"groups."
                )


def check_relative_positions(model: Translation):
    """Raises UserError for fields of relative positions that do not fit each other, or the other fields."""
    buckets, distance = model.relative_buckets, model.relative_distance
    if not buckets:
        return
    if buckets < 4 or buckets % 2:
        raise UserError(
            f"model.relative_buckets is {buckets}; expected an even number from 4 on, as the encoder has half of them "
            f"for each side of a token, or 0 for sinusoids. T5 has 32."
        )
    if distance <= buckets // 2:
        raise UserError(
            f"model.relative_distance is {distance}; expected more than {buckets // 2}: half of the {buckets} buckets "
            f"hold one distance each, and the others the distances from there to model.relative_distance. T5 has 128."
        )
    for field in ("position_offset", "wavelengths"):
        if (value := getattr(model, field)) != getattr(type(model), field):
            raise UserError(
                f"model.{field} is {value}, but with model.relative_buckets={buckets} there are no sinusoids; leave "
                f"one of the two out."
            )
    if model.pipeline != "none" or model.microbatches > 1:
        raise UserError(
            f"model.pipeline={model.pipeline}, model.microbatches={model.microbatches}: model.relative_buckets is "
            f"{buckets}, and the bias of relative positions is no part of a microbatch. Use --set model.pipeline=none, "
            "model.stages=1 and model.microbatches=1, or --set model.relative_buckets=0."
        )
