"""DualPipe trains a decoder with experts, the all-to-all under compute: the numbers of
one process, and which forward ran over which backward."""

import pytest
import torch

from tests.devices import skip_unless_mistakes_are_told
from tests.model.stage_training import no_loss
from tests.model.twins import DEEPSEEK, MIXTRAL, batch_of_ranks, close, config_of
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger, init_mesh
from xtrain.model import XtrainModel, overlapped_layers
from xtrain.model.layer import OverlappedDecoderLayer
from xtrain.model.mesh_axes import batch_group
from xtrain.model.stage_gradients import update_stages_balance_biases
from xtrain.model.stages import OverlappedDecoderStage
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES

KINDS = {
    "mixtral": MIXTRAL | {"num_hidden_layers": 4},
    "deepseek": DEEPSEEK | {"num_hidden_layers": 6, "first_k_dense_replace": 2},
}
MICRO_BATCHES, STEPS = 6, 2


class Stages:
    """Two pipeline ranks of two expert ranks each, and of tensor ranks if any."""

    def __init__(self, kind: str, name: str, recompute: str = "none", tensor: int = 0):
        sizes = {"pipeline": 2, "expert": 2} | ({"tensor": tensor} if tensor else {})
        self.mesh = init_mesh(tuple(sizes.values()), tuple(sizes))
        self.schedule = SCHEDULES[name](2, MICRO_BATCHES)
        config = config_of(**KINDS[kind])
        self.stages = XtrainModel.stages(
            config,
            self.mesh,
            self.schedule,
            dtype=torch.float64,
            recompute=recompute,
        )
        self.modules = {stage.index: stage.module for stage in self.stages}
        last = self.modules.get(self.schedule.stages - 1)
        self.runner = PipelineRunner(
            self.stages,
            self.schedule,
            last.loss_fn if last else no_loss,
            self.mesh["pipeline"].get_group(),
            data_group=batch_group(self.mesh),
        )
        self.whole = XtrainModel(config, dtype=torch.float64)
        self.events: list = []
        for module in self.modules.values():
            for layer in module.layers:
                if isinstance(layer, OverlappedDecoderLayer):
                    layer.events = self.events

    def check_step(self, step: int) -> None:
        """Loss and every gradient, with what was there before added up."""
        tokens, labels = batch_of_ranks(step, MICRO_BATCHES + 1)
        here = self.mesh["expert"].get_local_rank()
        loss = self.runner.step(tokens.chunk(2)[here], labels.chunk(2)[here])
        wanted = self.whole.loss(tokens, labels)
        wanted.backward()
        close(loss, wanted, "loss")
        for module in self.modules.values():
            module.sync_gradients()
            for name, parameter in module.named_parameters():
                right = module.placement(name).of(self.whole.get_parameter(name).grad)
                close(parameter.grad, right, name)
            module.zero_grad()
        self.whole.zero_grad()
        if self.whole.config.balance_bias:
            update_stages_balance_biases(self.stages, 0.05)
            self.whole.update_balance_biases(0.05)
            right = dict(self.whole.named_buffers())
            for module in self.modules.values():
                for name, bias in module.named_buffers():
                    close(bias, right[name], name)

    def overlapped(self) -> tuple[int, int]:
        """Layers of forwards that ran over a backward: counted, and in the schedule."""
        names = [event.name for event in self.events]
        counted = sum(
            names[at - 1] == "compute B mlp"
            for at, name in enumerate(names)
            if name == "wait F dispatch"
        )
        cut = {
            index: sum(isinstance(x, OverlappedDecoderLayer) for x in module.layers)
            for index, module in self.modules.items()
        }
        rank = self.mesh["pipeline"].get_local_rank()
        expected = sum(
            min(cut[action.stage], cut[action.under.stage])
            for action in self.schedule.actions[rank]
            if action.under is not None
        )
        return counted, expected


def train(
    kind: str, name: str, recompute: str = "none", tensor: int = 0
) -> tuple[int, int, bool]:
    stages = Stages(kind, name, recompute, tensor)
    for step in range(STEPS):
        stages.events.clear()
        stages.check_step(step)
    tokens, labels = batch_of_ranks(9, MICRO_BATCHES)
    here = stages.mesh["expert"].get_local_rank()
    stages.runner.evaluate(tokens.chunk(2)[here], labels.chunk(2)[here])
    kinds = {
        type(module) is OverlappedDecoderStage for module in stages.modules.values()
    }
    return *stages.overlapped(), kinds == {True}


def forwards_in_one_graph(name: str) -> tuple[int, int]:
    """Layers run over a backward that left one graph, and how many should."""
    stages, found = Stages("mixtral", name), []

    class Recorded(overlapped_layers.ForwardChunks):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            found.append(self.in_pieces)

    with replaced(overlapped_layers, "ForwardChunks", Recorded):
        stages.check_step(0)
    rank = stages.mesh["pipeline"].get_local_rank()
    actions = stages.schedule.actions[rank]
    split = {(a.stage, a.micro_batch) for a in actions if a.kind == "W"}
    expected = sum(
        min(len(stages.modules[at].layers) for at in (a.stage, a.under.stage))
        for a in actions
        if a.under is not None and (a.stage, a.micro_batch) in split
    )
    return found.count(False), expected


@pytest.mark.verifies("xtrain.model.stages:OverlappedDecoderStage")
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_a_forward_whose_backward_is_split_leaves_one_graph(world, name):
    """Pieces have one backward; one that comes as B and W needs the graph."""
    total = 0
    for counted, expected in world(4).run(forwards_in_one_graph, name):
        assert counted == expected
        total += counted
    assert total > 0


@pytest.mark.verifies("xtrain.model.stages:OverlappedDecoderStage")
@pytest.mark.verifies("xtrain.model.layer:OverlappedDecoderLayer")
@pytest.mark.verifies("xtrain.model.overlapped_layers:LayersForward")
@pytest.mark.verifies("xtrain.model.overlapped_layers:forward_over")
@pytest.mark.verifies("xtrain.model.overlapped_layers:_Joint")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_overlapped_stages_train_as_one_process(world, kind, name):
    total = 0
    for counted, expected, overlaps in world(4).run(train, kind, name):
        assert counted == expected
        assert overlaps
        total += counted
    assert total > 0


@pytest.mark.verifies("xtrain.model.moe:TensorMoE")
def test_with_tensor_ranks_they_train_so_too(world):
    """Sums over tensor ranks are parts of the chunks."""
    arguments = train, "deepseek", "dualpipe", "none", 2
    for counted, expected, overlaps in world(8).run(*arguments):
        assert counted == expected > 0
        assert overlaps


def under_autocast_on_one_rank() -> tuple[str, list[str]]:
    """What is said, and which calls were made before."""
    mesh = init_mesh((2,), ("expert",))
    model = XtrainModel(config_of(**MIXTRAL), mesh)
    x, low = torch.randn(2, 3, 7), mesh["expert"].get_local_rank() == 1
    with (
        CommLedger() as ledger,
        torch.autocast("cpu", torch.bfloat16, enabled=low),
        pytest.raises(ValueError, match="dtype") as caught,
    ):
        overlapped_layers.forward_over(model.layers, iter(()), True, x, torch.arange(3))
    return str(caught.value), [event.op for event in ledger.events]


@pytest.mark.verifies("xtrain.model.overlapped_layers:forward_over")
def test_chunks_of_another_dtype_on_one_rank_are_refused_on_both(world, xtrain_worlds):
    skip_unless_mistakes_are_told(xtrain_worlds)
    (said, calls), other = world(2).run(under_autocast_on_one_rank)
    assert "torch.float32" in said and "torch.bfloat16" in said
    assert other == (said, calls)
    assert not any("all_to_all" in call for call in calls)


def chunks_of_recompute() -> int:
    """How many events there were: a layer that is run as a whole has none."""
    stages = Stages("mixtral", "dualpipe_v", "layer")
    stages.check_step(0)
    return len(stages.events)


def test_stages_that_recompute_run_a_pair_as_two(world):
    for chunks in world(4).run(chunks_of_recompute):
        assert chunks == 0


@pytest.mark.verifies("xtrain.model.stages:OverlappedDecoderStage")
def test_attention_alone_is_recomputed_in_a_pair_too(world):
    for counted, expected, overlaps in world(4).run(
        train, "mixtral", "dualpipe", "selective"
    ):
        assert counted == expected and overlaps


def kinds_of_stages() -> list[str]:
    config = config_of(**KINDS["mixtral"])
    found = []
    for name, sizes, axes, *sequence in (
        ("one_f_one_b", (2, 2), ("pipeline", "expert")),
        ("dualpipe", (2, 2), ("pipeline", "expert"), True),
        ("dualpipe", (2, 2), ("pipeline", "tensor")),
        ("dualpipe", (2, 2), ("pipeline", "data")),
    ):
        mesh = init_mesh(sizes, axes)
        options = {"sequence_parallel": bool(sequence)}
        made = XtrainModel.stages(config, mesh, SCHEDULES[name](2, 4), **options)
        found += [type(stage.module).__name__ for stage in made]
    return found


@pytest.mark.verifies("xtrain.model.stages:hides_messages")
def test_stages_without_pairs_or_messages_of_experts_stay_whole(world):
    for kinds in world(4).run(kinds_of_stages):
        assert set(kinds) == {"DecoderStage"}
