"""A recipe: everything that a run is made of, as frozen dataclasses.

    Recipe   steps, seed, dtype, global_batch, max_norm, device, threads, ...
      model       XtrainConfig        optimizer   AdamW or Muon, and its constants
      layout      plan.Layout         rate        the learning rate from step to step
      data        Data                log, checkpoint, evaluate, sample

A recipe of one's own is a Python function that returns one. Every field is an option of
the command line, `--layout.data=2`; the line under a field is its help. What does not
fit raises ValueError when the recipe is made, before any process starts.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from xtrain.model.config import XtrainConfig, padded_for
from xtrain.model.hf_config import check_architecture
from xtrain.plan import Layout
from xtrain.plan.activations import RECOMPUTE
from xtrain.plan.checks import require_positive, require_whole
from xtrain.plan.context_parallel import WAYS
from xtrain.plan.layout import SCHEDULE_NAMES
from xtrain.plan.layout_rules import check_layout
from xtrain.train.layouts import PLANNED_ONLY
from xtrain.train.rates import Rate
from xtrain.train.recipe_parts import (
    MOST_THREADS,
    Checkpoint,
    Data,
    Evaluate,
    Log,
    OptimizerSpec,
    SampleSpec,
    require_at_most,
)
from xtrain.train.values import check_types

HELP = {
    f"layout.{name}": f"Of `xtrain plan` alone: here {instead}."
    for name, instead in PLANNED_ONLY.items()
} | {
    "layout.tensor": "Ranks that cut every matrix of a layer, and the vocabulary.",
    "layout.pipeline": "Ranks that each have a part of the layers.",
    "layout.context": "Ranks that each have a part of every sequence.",
    "layout.expert": "Ranks that each have a part of the experts; it divides `data`.",
    "layout.zero": "Stage: 1 shards the optimizer's state, 2 gradients too, 3 weights "
    "too. 0 is plain data parallelism.",
    "layout.micro_batch": "Sequences that go through the model together, where "
    "`global_batch` is not given.",
    "layout.micro_batches": "Parts of a rank's share of a step, one after the other.",
    "layout.schedule": f"Of the pipeline: {', '.join(SCHEDULE_NAMES)}.",
    "layout.recompute": f"What backward computes again: {', '.join(RECOMPUTE)}.",
    "layout.context_way": f"How context ranks attend: {', '.join(WAYS)}.",
    "model.num_local_experts": "Experts of a layer, on all ranks together; 0 is a "
    "dense model.",
    "model.num_experts_per_tok": "Experts that a token is routed to.",
    "model.vocab_size": "Tokens of the vocabulary.",
    "model.padded_vocab_size": "Rows of embedding and head; as many as `layout.tensor` "
    "ranks can share unless given. Rows beyond the vocabulary stay zero.",
    "model.hidden_size": "Width of the stream between layers.",
    "model.intermediate_size": "Inner size of a layer's MLP.",
    "model.num_hidden_layers": "Layers of the decoder.",
    "model.num_attention_heads": "Query heads.",
    "model.num_key_value_heads": "Key heads; as many as query heads unless given.",
    "model.head_dim": "Size of a head; hidden_size / num_attention_heads unless given.",
    "model.tie_word_embeddings": "The head is the embedding once more.",
    "model.rope_scaling": "Llama 3.1's stretched rotary positions.",
    "model.seed": "Of weights, added to the run's `seed`.",
}
"""For fields that have no help of their own, or mean something else here."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run.

    Raises:
        ValueError: a value is not of its type, or values do not fit each other: the
            layout breaks a rule, a batch has too few sequences, evaluation has no data.
    """

    HELP: ClassVar[dict[str, str]] = HELP

    steps: int = 100
    """Updates of the weights in the whole run."""
    seed: int = 0
    """Of everything random: weights, order of data, dropout, samples."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Of weights and compute; bfloat16 computes in it and keeps float32 masters."""
    global_batch: int | None = None
    """Sequences of a step on all ranks, in shares that differ by at most one; unless
    given layout.data x micro_batch x micro_batches."""
    max_norm: float | None = 1.0
    """Gradients are scaled to at most this norm; none leaves them as they are."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the accelerator where there is one."""
    threads: int | None = None
    """Of a rank, for computing on the CPU; as torch chooses unless given."""
    timeout: float | None = None
    """Seconds that a rank waits for the others in a call; as torch does unless given
    (gloo 30 minutes, NCCL 10)."""
    compile: bool = False
    """Layers go through torch.compile."""
    elastic: bool = False
    """On another number of ranks than the layout's, data ranks and micro-batches
    follow from it; the global batch stays."""
    model: XtrainConfig
    layout: Layout = field(default_factory=Layout)
    data: Data = field(default_factory=Data)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    rate: Rate = field(default_factory=Rate)
    log: Log = field(default_factory=Log)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluate: Evaluate = field(default_factory=Evaluate)
    sample: SampleSpec = field(default_factory=SampleSpec)

    def __post_init__(self) -> None:
        check_types(self)
        require_whole("steps", self.steps)
        require_whole("seed", self.seed, least=0)
        if self.max_norm is not None:
            require_positive("max_norm", self.max_norm)
        if self.timeout is not None:
            require_positive("timeout", self.timeout)
        if self.threads is not None:
            require_whole("threads", self.threads)
            require_at_most("threads", self.threads, MOST_THREADS)
        self._check_batch()
        padded = padded_for(self.model, self.layout.tensor)
        object.__setattr__(self, "model", padded)
        shape = dataclasses.replace(self.model, vocab_size=self.model.vocab_rows)
        if self.layout.pipeline > 1 and self.layout.zero > 1:  # so its runner does
            at_end = dataclasses.replace(self.layout, reduce_at_end=True)
            object.__setattr__(self, "layout", at_end)
        check_layout(shape, self.layout, self.data.sequence)
        if self.checkpoint.save_hf is not None:
            check_architecture(self.model)
        data, every = self.data, self.evaluate.every
        if every is not None and data.path is not None and data.validation is None:
            raise ValueError(
                f"evaluate.every={every} with data.path={data.path!r}: give "
                "data.validation, a file to evaluate on"
            )

    def _check_batch(self) -> None:
        layout = self.layout
        parts = layout.data * layout.micro_batches
        tokens = -(-self.batch // parts) * self.data.sequence
        require_at_most("tokens of a micro-batch", tokens, 2**31 - 1)
        if self.global_batch is None:
            return
        require_whole("global_batch", self.global_batch)
        if layout.micro_batch != 1:
            raise ValueError(
                f"global_batch={self.global_batch} and layout.micro_batch="
                f"{layout.micro_batch}: give one of them, the other follows from it"
            )
        if self.global_batch < parts:
            raise ValueError(
                f"global_batch={self.global_batch} is below layout.data="
                f"{layout.data} x layout.micro_batches={layout.micro_batches}: each "
                "micro-batch has at least one sequence"
            )

    @property
    def batch(self) -> int:
        """Sequences of a step, all ranks together."""
        return self.global_batch or self.layout.batch

    @property
    def tokens(self) -> int:
        """Of a step, all ranks together."""
        return self.batch * self.data.sequence

    @property
    def config(self) -> XtrainConfig:
        """The model as it is built: the run's seed is added to its own."""
        seed = self.model.seed + self.seed
        return dataclasses.replace(self.model, seed=seed)
