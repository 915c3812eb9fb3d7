"""The figures of a study, after GShard's figure 6 and table 2, from its results alone."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tools.report.style import BLUE, DARK, GREEN, MUTED, ORANGE, PURPLE, SETTINGS, SKY, VERMILLION, VIOLET, WIDTH
from tools.study.plan import file_name
from tools.study.results import Results, trend

_COLOURS = (DARK, SKY, BLUE, VIOLET, VERMILLION, GREEN, ORANGE, PURPLE)  # of the models, in turn
_THIN = {"linewidth": 0.8, "alpha": 0.6}  # of the runs of further seeds


def figures(results: Results) -> dict[str, Figure]:
    """Returns the figures by name; those for which no run is finished are left out."""
    found: dict[str, Figure] = {}
    if results.models:
        found["gain"] = gain(results)
        found["efficiency"] = efficiency(results)
    routed = [model for model, runs in results.models.items() if runs[0].routing]
    if routed:
        found["experts"] = experts(results)
    return found | {f"languages_{file_name(model)}": languages(results, model) for model in routed}


def gain(results: Results) -> Figure:
    """GShard figure 6: BLEU above a baseline, by language from high to low resource, and its moving average."""
    first = next(iter(results.models))
    of_first = {language: statistics.fmean(values) for language, values in results.bleu(first).items()}
    panels = [("bilingual models", "", results.baselines), (f"model “{first}”", first, of_first)]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        for axes, (title, left_out, zero) in zip(figure.subplots(1, 2), panels):
            for model, colour in _coloured(results):
                if model != left_out:
                    _draw_gain(axes, results, model, zero, colour)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_ylabel(f"BLEU above the {title}")
            axes.set_xlabel("languages, from high to low resource")
            axes.grid(axis="y")
        _legend(figure, results)
    return figure


def _draw_gain(axes: Axes, results: Results, model: str, zero: Mapping[str, float], colour: str):
    """Draws a point for each language, from the least to the greatest of the seeds, and the trend line."""
    scored = results.bleu(model)
    chosen = [language for language in results.languages if language in zero and language in scored]
    gains = [[bleu - zero[language] for bleu in scored[language]] for language in chosen]
    means = list(map(statistics.fmean, gains))
    positions = range(len(chosen))
    axes.plot(positions, trend(means), color=colour, label=model)
    axes.plot(positions, means, "o", color=colour, markersize=3)
    axes.vlines(positions, list(map(min, gains)), list(map(max, gains)), color=colour, linewidth=0.8)
    axes.set_xticks(positions, chosen)


def efficiency(results: Results) -> Figure:
    """Validation loss against target tokens (GShard table 2) and CPU time (its ICLR version, figure 10)."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for model, colour in _coloured(results):
            for run, style in zip(results.models[model], itertools.chain([{"label": model}], itertools.repeat(_THIN))):
                _, tokens, seconds, losses, _ = zip(*run.curve) if run.curve else ((),) * 5
                left.plot([count / 1e6 for count in tokens], losses, color=colour, **style)
                right.plot([time / 60 for time in seconds], losses, color=colour, **style)
        left.set_ylabel("validation loss, nats per target token")
        left.set_xlabel("million target tokens")
        right.set_xlabel("CPU minutes")
        for axes in (left, right):
            axes.grid(axis="y")
        _legend(figure, results)
    return figure


def experts(results: Results) -> Figure:
    """Dropped tokens in the course of training, and the load of the experts of each layer, largest first."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for model, colour in _coloured(results):
            first = results.models[model][0]
            if not first.routing:
                continue
            steps, shares = zip(*first.overflow)
            left.plot(steps, [100 * share for share in shares], color=colour, label=model, linewidth=1)
            for found in first.routing.values():
                load = sorted(found.load, reverse=True)
                right.plot(np.linspace(0, 100, len(load)), load, color=colour, linewidth=1)
        left.set_xlabel("training steps")
        left.set_ylabel("dropped tokens, %")
        left.set_ylim(bottom=0)
        right.axhline(1, color="black", linewidth=0.8)
        right.set_xlabel("experts of a layer, from most to least used, %")
        right.set_ylabel("choices, 1: equal for all")
        right.set_ylim(bottom=0)
        _legend(figure, results, lambda run: bool(run.routing))
    return figure


def languages(results: Results, model: str) -> Figure:
    """What the experts of a model specialise in: the share of each language's choices, layer by layer."""
    run = results.models[model][0]
    layers = run.routing
    with matplotlib.rc_context(SETTINGS):
        height = 0.5 + 0.13 * len(results.languages)
        rows = math.ceil(len(layers) / 2)
        figure = Figure(figsize=(WIDTH, (height + 0.6) * rows), layout="constrained")
        figure.suptitle(f"{model}: choices of each language, relative to equal use of all experts", fontsize=8)
        all_axes = figure.subplots(rows, 2, squeeze=False).flatten()
        most = max(max(map(max, found.shares.values())) * run.experts for found in layers.values())
        for axes, (layer, found) in zip(all_axes, layers.items()):
            ordered = [language for language in results.languages if language in found.shares]
            values = np.array([found.shares[language] for language in ordered]) * run.experts
            # Experts stand beside those that take the same languages.
            order = np.argsort(values.argmax(axis=0), kind="stable")
            image = axes.imshow(values[:, order], cmap="Blues", vmin=0, vmax=most, aspect="auto", interpolation="none")
            axes.set_yticks(range(len(ordered)), ordered)
            axes.set_xticks([])
            axes.set_xlabel(f"experts of {layer}; mutual information {found.information:.2f} bits", color=MUTED)
            figure.colorbar(image, ax=axes)
        for axes in all_axes[len(layers) :]:
            axes.set_visible(False)
    return figure


def _coloured(results: Results) -> Iterator[tuple[str, str]]:
    """Yields (model, its colour); a model has the same in all figures."""
    return zip(results.models, itertools.cycle(_COLOURS))


def _legend(figure: Figure, results: Results, shown=lambda run: True):
    labels = [model for model, runs in results.models.items() if shown(runs[0])]
    colours = dict(_coloured(results))
    handles = [Line2D([], [], color=colours[model], label=model) for model in labels]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=7.5)
