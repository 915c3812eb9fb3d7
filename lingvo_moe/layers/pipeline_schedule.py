"""Pipeline schedules: which stage computes which microbatch when (GSPMD section 3.3)."""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.lazy import tf

# `none` runs the microbatches one after another; `gpipe` gives each stage consecutive layers (Huang et al. 2019);
# `circular` assigns the layers round-robin, so that a microbatch passes all stages several times.
PIPELINES = ("none", "gpipe", "circular")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A loop of iterations; in each, every stage computes one microbatch, and then passes it on to the next stage.

    Microbatch m is at stage s in round r in iteration `r * iterations_per_round + m + s`. There, stage s computes the
    repeats `(r * stages + s) * repeats_per_iteration` and following. In iterations without a microbatch (bubbles) a
    stage computes what nobody reads.

    Attributes:
      stages: P, of equal size.
      rounds: how often a microbatch passes all stages; 1 for GPipe.
      repeats_per_iteration: the layers (repeats of a pattern of layers) that a stage computes in an iteration.
      repeats: R, of the stack. Stages may hold more; the padding passes its inputs on.
      microbatches: into which a batch is divided.
    """

    stages: int
    rounds: int
    repeats_per_iteration: int
    repeats: int
    microbatches: int

    @staticmethod
    def of(pipeline: str, stages: int, microbatches: int, repeats: int) -> Schedule:
        """Returns the schedule of a name in PIPELINES for a stack of R repeats; `none` has one stage.

        Raises:
          UserError: an unknown name, a number below 1, or more stages than repeats.
        """
        if pipeline not in PIPELINES:
            raise UserError(
                f"model.pipeline is {pipeline!r}; use one of {', '.join(PIPELINES)}.{did_you_mean(pipeline, PIPELINES)}"
            )
        for name, value in (("stages", stages), ("microbatches", microbatches)):
            if value < 1:
                raise UserError(f"model.{name} is {value}; it must be at least 1.")
        if pipeline == "none":
            return Schedule(1, 1, repeats, repeats, microbatches)
        if stages > repeats:
            raise UserError(
                f"model.stages is {stages}, but a stack repeats its pattern of layers {repeats} times, and a stage "
                f"needs at least one repeat. Use --set model.stages=N with N up to {repeats}, or more layers."
            )
        share = -(-repeats // stages)
        rounds, repeats_per_iteration = (share, 1) if pipeline == "circular" else (1, share)
        return Schedule(stages, rounds, repeats_per_iteration, repeats, microbatches)

    @property
    def repeats_per_stage(self) -> int:
        """The repeats that a stage holds, padding included."""
        return self.rounds * self.repeats_per_iteration

    @property
    def iterations_per_round(self) -> int:
        """The iterations of a round at one stage: a microbatch must have passed all stages before it starts again."""
        return max(self.microbatches, self.stages)

    @property
    def iterations(self) -> int:
        """The number of iterations of the loop."""
        return (self.rounds - 1) * self.iterations_per_round + self.microbatches + self.stages - 1

    @property
    def bubble_share(self) -> float:
        """The share of a stage's iterations that have no microbatch: (P - 1) / (microbatches + P - 1) for GPipe."""
        return 1 - self.rounds * self.microbatches / self.iterations

    @property
    def scope(self) -> str:
        """The name scope of an iteration: `pipeline_BUSY_of_ALL_iterations`; BUSY are no bubbles at a stage."""
        return f"pipeline_{self.rounds * self.microbatches}_of_{self.iterations}_iterations"

    def at(self, iteration: tf.Tensor) -> Iteration:
        """Returns what all stages do in an iteration, a scalar."""
        return Iteration(self, self.assignment(iteration - tf.range(self.stages)), iteration)

    def assignment(self, since: tf.Tensor) -> Assignment:
        """What a stage computes that many iterations after it starts its first microbatch."""
        rounds, microbatch = since // self.iterations_per_round, since % self.iterations_per_round
        busy = (since >= 0) & (rounds < self.rounds) & (microbatch < self.microbatches)
        return Assignment(tf.where(busy, microbatch, 0), tf.where(busy, rounds, 0), busy)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a stage computes in an iteration; scalars, or `[P]` for all stages.

    Attributes:
      microbatch: 0 in a bubble.
      round: 0 in a bubble.
      busy: false in a bubble.
    """

    microbatch: tf.Tensor
    round: tf.Tensor
    busy: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One iteration of a schedule.

    Attributes:
      schedule: of the iteration.
      stages: what all stages compute, `[P]`.
      number: of the iteration, a scalar.
    """

    schedule: Schedule
    stages: Assignment
    number: tf.Tensor

    # Of single stages by themselves: an element of `stages`, which is sharded, would be a collective.

    @property
    def first(self) -> Assignment:
        """What the first stage computes."""
        return self.schedule.assignment(self.number)

    @property
    def last(self) -> Assignment:
        """What the last stage computes, which it passes to the first one."""
        return self.schedule.assignment(self.number - (self.schedule.stages - 1))

    def repeat(self, j: tf.Tensor | int) -> tf.Tensor:
        """The repeat that each stage computes as the iteration's number j, `[P] int32`; R and above: none."""
        schedule = self.schedule
        return (self.stages.round * schedule.stages + tf.range(schedule.stages)) * schedule.repeats_per_iteration + j

    def index_in_stage(self, j: tf.Tensor | int) -> tf.Tensor:
        """The number of the iteration's repeat j among those that each stage holds, `[P] int32`."""
        return self.stages.round * self.schedule.repeats_per_iteration + j

    def active(self, j: tf.Tensor | int) -> tf.Tensor:
        """Whether each stage has a microbatch and repeat j exists, `[P] bool`."""
        return self.stages.busy & (self.repeat(j) < self.schedule.repeats)

    @property
    def starts(self) -> tf.Tensor:
        """`[P] bool`: true at the first stage, where it takes in a microbatch."""
        return self.first.busy & tf.equal(tf.range(self.schedule.stages), 0)

    @property
    def ends(self) -> tf.Tensor:
        """`[P] bool`: true at the first stage, to which the last one passes on a microbatch when the iteration ends."""
        return self.last.busy & tf.equal(tf.range(self.schedule.stages), 0)
