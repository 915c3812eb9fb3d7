"""A trained language model continues prompts: in their order, by search or sampling, and says what it has not read."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.decoding.sampling import Sampling
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.inference import generator as generator_module
from lingvo_moe.inference.generator import Generator
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.training.checkpoint import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_PROMPTS = ["the old", "", "a", "small bird", "water finds the green", "the old"]


@pytest.fixture(scope="module")
def logdir(data, tmp_path_factory):
    """Makes a log directory with the initial state of the tiny model; these tests need no better one."""
    directory = tmp_path_factory.mktemp("log")
    state = Engine(2, "cpu").compile(tiny.tiny_language_model(data).steps.init())({"seed": np.array([0, 1], np.int32)})
    checkpoints = Checkpoints(directory, keep=1)
    checkpoints.save("tiny", state["state"], None)
    checkpoints.close()
    return directory


@pytest.fixture(scope="module")
def generator(data, logdir) -> Generator:
    return Generator("tiny", tiny.tiny_language_model(data), Engine(2, "cpu"), logdir)


@pytest.fixture(scope="module")
def sampler(data, logdir) -> Generator:
    sampling = Sampling(samples=3, temperature=1.2)
    return Generator("tiny", tiny.tiny_language_model(data), Engine(2, "cpu"), logdir, sampling)


def test_each_prompt_is_continued_in_its_place(generator):
    """Whatever it is batched with; a text begins with its prompt, and the best is first."""
    found = generator.generate(_PROMPTS)
    assert [len(continuations) for continuations in found] == [2] * len(_PROMPTS) and found[0] == found[5]
    for prompt, continuations in zip(_PROMPTS, found):
        assert all(continuation.text.startswith(prompt) for continuation in continuations)
        assert continuations[0].score >= continuations[1].score
        (alone,) = generator.generate([prompt])
        assert [each.text for each in alone] == [each.text for each in continuations]


def test_samples_depend_on_seed_and_place_alone(sampler):
    """The samples of a prompt differ from each other, and from those of the same prompt elsewhere."""
    found = sampler.generate(_PROMPTS, seed=3)
    assert found == sampler.generate(_PROMPTS, seed=3) != sampler.generate(_PROMPTS, seed=4)
    assert sampler.generate(["a", *_PROMPTS[1:]], seed=3)[1:] == found[1:]
    texts = [each.text for each in (*found[0], *found[5])]
    assert len(set(texts)) == 6 and all(text.startswith("the old") for text in texts)


def test_texts_that_end_are_not_truncated(data, logdir, sampler):
    """And the others have the greatest length."""
    eos = sampler.generate(["the"] * 40)
    assert {each.truncated for continuations in eos for each in continuations} == {True, False}


def test_sampling_has_the_length_and_special_tokens_of_the_experiment(data, logdir):
    """Not those that a search has by default, for which the model may have no room.

    Its temperature and top_p are no part of the program, which another temperature uses, too.
    """
    drawn = []

    class Recording(Engine):
        def decoding(self, steps, source_specs, search):
            drawn.append(search)
            return super().decoding(steps, source_specs, search)

    config = tiny.tiny_language_model(data)
    Generator("tiny", config, Recording(2, "cpu"), logdir, Sampling(samples=3, temperature=1.2))
    search = dataclasses.replace(config.search, beam_size=1)
    assert drawn == [Sampling(samples=3, search=search)] and search.max_length == 12


def test_only_the_end_of_a_long_prompt_is_read(generator):
    """The prompt is written whole; its continuation is that of its last tokens."""
    words = [tiny.WORDS[number % 7] for number in range(60)]
    long = " ".join(words)
    (found,) = generator.generate([long])
    assert all(each.is_cut and each.text.startswith(long) for each in found)
    (other,) = generator.generate([" ".join(["stone", "bird", *words])])
    assert [each.score for each in other] == [each.score for each in found]
    assert not any(each.is_cut for each in generator.generate(["the old"])[0])


def test_white_space_at_the_end_of_a_prompt_is_left_out(generator):
    assert generator.generate(["the old \t"]) == generator.generate(["the old"])


@pytest.mark.parametrize("seed", [2**31, -1, 1.5, None])
def test_what_is_no_seed_is_an_error(sampler, seed):
    """Fractions were cut off, and other numbers failed in NumPy."""
    with pytest.raises(UserError, match=f"seed is {seed}; expected a whole number, at least 0 and at most 2,147,483,6"):
        sampler.generate(["the"], seed)


def test_mistakes_are_errors(data, logdir, generator, tmp_path):
    """Models of another kind, and prompts without room, before anything is compiled; a text for a list of texts."""
    with pytest.raises(UserError, match="prompts: 'the old' is one text; expected a list of texts"):
        generator.generate("the old")
    with pytest.raises(UserError, match=r"prompts: '\\ud83d' in prompt 1 is half of a surrogate pair; leave it out"):
        generator.generate(["the", "old \ud83d"])
    with pytest.raises(UserError, match="tiny does not generate text; `inference.translator`"):
        Generator("tiny", tiny.tiny(data), tiny.Uncompiled(2, "cpu"), logdir)
    with pytest.raises(UserError, match="hyperparameters.json: no such file. Name the log directory"):
        generator_module.load(tmp_path)
    settings: Any = {"top_k": 5}
    with pytest.raises(UserError, match="sampling is a dict; expected a Sampling"):
        Generator("tiny", tiny.tiny_language_model(data), tiny.Uncompiled(2, "cpu"), logdir, settings)
    config = dataclasses.replace(tiny.tiny_language_model(data), search=BeamSearch(max_length=32))
    with pytest.raises(UserError, match="search.max_length is 32, but the model reads a prompt and its continuation"):
        Generator("tiny", config, tiny.Uncompiled(2, "cpu"), logdir)
