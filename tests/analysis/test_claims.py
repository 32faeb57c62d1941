"""The lecture's claims: they hold of sound models of every architecture, and each fault is found by its own row."""

import json
import math
import re
from dataclasses import replace

import architectures
import compiled
import pytest
import torch
from torch import nn

from analysis import verify
from analysis.claims import CLAIMS, find
from analysis.claims.claim import Finding, above, within
from analysis.claims.subject import subject_of
from analysis.claims.verdict import compared
from analysis.geometry import private_copy
from circuits import GPTConfig, HookedGPT, load
from circuits.attention import Attention
from circuits.hooks import NO_TAP
from circuits.initialise import initialise
from circuits.layers import MLPLayer
from circuits.run import Visibility
from circuits.storage import bundled_names


def statuses(found):
    return {verdict.claim.identifier: verdict.finding.status for verdict in found.verdicts}


def fails(model, tokens=None):
    return {verdict.claim.identifier for verdict in verify(model, tokens).failures}


@pytest.fixture(scope="module")
def course():
    """A random model with the lecture's conventions, nothing at 0 or 1."""
    return architectures.make("course")


@pytest.fixture
def fresh():
    """An untrained model with the lecture's conventions."""
    return HookedGPT(GPTConfig(n_layers=3, d_model=36, n_heads=4, n_ctx=23, d_vocab=19), dtype=torch.float64)


# --- sound models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", architectures.NAMES)
def test_every_claim_that_applies_holds_on_a_random_model_of(name):
    found = verify(architectures.make(name))
    assert found.failures == (), [v.finding for v in found.failures]
    assert found.claims == tuple(CLAIMS)
    for verdict in found.verdicts:
        if verdict.finding.status == "does not apply":
            assert verdict.finding.because
        else:
            assert math.isfinite(verdict.finding.value)


@pytest.mark.parametrize("name", bundled_names())
@pytest.mark.parametrize("tokenizer", [True, False])
def test_every_claim_that_applies_holds_on_the_bundled_model(name, tokenizer):
    model = load(name)
    if not tokenizer:
        model.tokenizer = None
    found = verify(model)
    assert found.failures == (), [v.finding for v in found.failures]
    assert found.holds


def test_every_claim_that_applies_holds_on_an_untrained_model_and_on_circuits_made_by_hand(fresh):
    for model in (fresh, compiled.induction_head()):
        assert verify(model).failures == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_in_other_precisions_are_checked_too(dtype):
    assert verify(architectures.make("course", dtype=dtype)).failures == ()


def test_large_models_are_checked_in_their_own_precision_on_a_sample(monkeypatch):
    monkeypatch.setattr("analysis.claims.subject.LARGE", 100)
    monkeypatch.setattr("analysis.claims.subject._HEADS", 3)
    for name in ("course", "like_gemma2"):
        model = architectures.make(name, dtype=torch.float32)
        assert subject_of(model).model.dtype == torch.float32
        assert len(subject_of(model).heads) == 3
        assert verify(model).failures == ()


@pytest.mark.parametrize("tokens", [[[3]], [[3, 1]], [[3, 3, 3]], [[1, 2, 3, 4, 5], [5, 5, 1, 0, 2]]])
def test_any_prompt_will_do(course, tokens):
    assert verify(course, torch.tensor(tokens)).failures == ()


def test_a_model_of_one_token_and_one_position_is_checked_as_far_as_it_goes():
    config = GPTConfig(n_layers=1, d_model=3, n_heads=1, n_ctx=1, d_vocab=1)
    found = verify(architectures.make(config))
    assert found.failures == ()
    assert found["5.1"].finding.status == "does not apply"
    assert "single token" in found["5.1"].finding.because


def test_verify_leaves_the_model_alone(course):
    before = {name: p.clone() for name, p in course.state_dict().items()}
    verify(course)
    assert all(torch.equal(before[name], p) for name, p in course.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in course.parameters())


def test_the_lectures_numbers_on_the_course_configuration():
    found = verify(HookedGPT(GPTConfig.course()))
    assert found.failures == ()
    assert "816,640" in found["5.2a.table"].finding.because
    assert "808,320" in found["ex5"].finding.because
    assert "4.174" in found["5.2b.loss"].finding.because
    assert "1/√8 = 0.3536, on the model as given" in found["5.2b.scale"].finding.because


# --- what does not apply --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "claim", "reason"),
    [
        ("rotary", "1.attention", "rotary"),
        ("attn_scale", "1.2.scores", "multiplied by 0.9, not 1/√d_head = 0.4472"),
        ("qk_norm", "1.2.scores", "normalised"),
        ("gelu_new", "2.gelu", "gelu_new"),
        ("attn_only", "2.1", "no MLPs"),
        ("post_norm", "3.1", "post-norm"),
        ("parallel_shared_norm", "3.1", "in parallel"),
        ("rmsnorm", "4.2.sphere", "RMSNorm"),
        ("no_norm", "4.1", "no norms"),
        ("all_biases", "5.2a", "queries, keys and values have biases, the unembedding has a bias"),
        ("course", "5.3", "of its own"),
        ("tied", "ex4.decay", "tie_embeddings"),
        ("course", "5.2a.table", "not the course configuration"),
    ],
)
def test_a_claim_that_does_not_apply_says_why(name, claim, reason):
    finding = verify(architectures.make(name), claims=[claim])[claim].finding
    assert finding.status == "does not apply"
    assert reason in finding.because


def test_claims_of_the_initialisation_speak_of_a_fresh_draw_where_the_model_is_trained(course, fresh):
    scale = ["5.2b.scale"]
    assert "fresh draw" in verify(course, claims=scale)["5.2b.scale"].finding.because
    assert "as given" in verify(fresh, claims=scale)["5.2b.scale"].finding.because
    fresh.card = {"step": 1}
    assert "fresh draw" in verify(fresh, claims=scale)["5.2b.scale"].finding.because


# --- faults ---------------------------------------------------------------------------------------------------------


def behaving(module, **methods):
    """Give one module other methods; through its class, so that a copy has them too and sees its own weights."""
    module.__class__ = type(f"Faulty{type(module).__name__}", (type(module),), methods)


def leaking_mask(model):
    """Every query sees every key, in the fast path and in the explicit one."""

    def start(self, tokens, mask=None, tap=NO_TAP):
        run = HookedGPT.start(self, tokens, mask, tap)
        n = tokens.shape[1]
        run._seen[None] = Visibility(torch.ones(1, 1, n, n, dtype=torch.bool), None)
        return replace(run, queries=torch.arange(n)[None])  # no causal kernel: the mask is asked for

    behaving(model, start=start)
    return model


def without_the_root(model):
    """Scores are not divided by √d_head."""
    for block in model.blocks:
        block.attn.scale = 1.0
    return model


def with_query_biases(model):
    """A bias where the configuration allows none."""
    for block in model.blocks:
        size = block.attn.qkv.weight.shape[0]
        block.attn.qkv.bias = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    return model


def with_an_unembedding_bias(model):
    model.unembed.bias = nn.Parameter(torch.zeros(model.config.d_vocab, dtype=torch.float64))
    return model


def with_relu(model):
    for block in model.blocks:
        block.mlp.act = "relu"
    return model


def with_a_weaker_skip(model):
    """The stream is multiplied by 0.9 after the MLP of the second block."""
    behaving(model.blocks[1], after_mlp=lambda self, x, run: 0.9 * x)
    return model


def with_another_epsilon(model):
    model.blocks[0].ln2.eps = 0.1
    return model


def without_centring(model):
    for module in model.modules():
        if hasattr(module, "kind"):
            module.kind = "rmsnorm"
            module.b = None
    return model


def with_an_mlp_that_looks_back(model):
    """The MLP of the first layer adds the mean over positions of what it reads."""
    behaving(
        model.blocks[0].mlp,
        neurons=lambda self, x, *rest: MLPLayer.neurons(self, x + x.mean(1, keepdim=True), *rest),
    )
    return model


def with_batch_statistics(model):
    """The final norm takes its mean over the batch."""
    behaving(model.ln_final, tapped=lambda self, x, *rest: self(x - x.mean(0, keepdim=True)))
    return model


def with_weights_that_do_not_sum_to_one(model):
    """Attention is 1.1 times what it should be."""
    behaving(model.blocks[0].attn, attend=lambda self, *given: 1.1 * Attention.attend(self, *given))
    return model


def with_positions_off_by_one(model):
    behaving(
        model,
        embedding=lambda self, tokens, run: HookedGPT.embedding(
            self, tokens, replace(run, positions=run.positions.clamp(max=self.config.n_ctx - 2) + 1)
        ),
    )
    return model


def without_the_output_bias(model):
    behaving(model.blocks[1].attn, combine=lambda self, z, *rest: z.flatten(2) @ self.W_O.flatten(0, 1))
    return model


def with_queries_that_see_values(model):

    def mixed(self, reads):
        q, k, v = Attention.project(self, reads)
        return q + v, k, v

    behaving(model.blocks[1].attn, project=mixed)
    return model


def with_a_loss_in_bits(model):
    behaving(model, loss=lambda self, tokens: HookedGPT.loss(self, tokens) / math.log(2))
    return model


def with_a_second_look(model):
    """The MLP is computed twice."""
    behaving(model.blocks[0].mlp, neurons=lambda *given: (MLPLayer.neurons(*given) + MLPLayer.neurons(*given)) / 2)
    return model


def with_a_matrix_too_many(model):
    model.blocks[0].extra = nn.Linear(3, 5, bias=False, dtype=torch.float64)
    return model


FAULTS = {
    leaking_mask: {"5.1", "5.1.mask", "ex2", "1.attention", "2.2.hull", "5.model"},
    without_the_root: {"1.attention", "1.2.scores", "5.model"},
    with_query_biases: {"5.2a", "5.2a.parts", "5.2a.leading", "ex1"},
    with_an_unembedding_bias: {"5.2a", "5.2a.parts", "ex1"},
    with_relu: {"2.gelu", "2.1", "5.model"},
    with_a_weaker_skip: {"3.1", "3.1.jacobian", "3.2.step", "3.4.sum", "3.4.paths", "3.5b", "5.model"},
    with_another_epsilon: {"4.1", "5.model"},
    without_centring: {"4.1", "5.model"},
    with_an_mlp_that_looks_back: {"2.1", "2.1.rows", "2.2.communication", "5.1", "ex2", "5.model"},
    with_batch_statistics: {"4.4.batch", "5.model"},
    with_weights_that_do_not_sum_to_one: {"1.attention", "1.2.sum", "2.2.hull", "5.model"},
    with_positions_off_by_one: {"5.embedding", "5.model"},
    without_the_output_bias: {"1.1", "1.2.sum", "5.model"},
    with_queries_that_see_values: {"1.3.roles", "1.3.gauge", "1.attention", "1.2.scores", "5.model"},
    with_a_loss_in_bits: {"5.probabilities"},
    with_a_second_look: {"6.cost"},
    with_a_matrix_too_many: {"5.2a", "5.2a.leading", "ex1", "ex8.rule"},
}
# Faults that change no number of a pass; ex7 rebuilds the model from its configuration, where the tensors do not fit.
COUNTED = {with_query_biases, with_an_unembedding_bias, with_a_matrix_too_many}


@pytest.fixture(scope="module")
def caught(course):
    """Fault -> the claims that do not hold of a model with it."""
    return {fault: fails(fault(private_copy(course))) for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_right_rows_find(caught, fault):
    assert FAULTS[fault] <= caught[fault]
    untouched = {"0.width", "1.2.rank", "1.3.gauge", "5.3", "ex3.fibre"} - FAULTS[fault]
    assert not untouched & caught[fault]
    if fault in COUNTED:
        assert caught[fault] - FAULTS[fault] <= {"5.2a.parts", "ex7"}


def _unbiased_variance(self, x):
    centred = x - x.mean(-1, keepdim=True)
    return self.affine(centred / (x.var(-1, keepdim=True) + self.eps).sqrt())


def _root_before_epsilon(self, x):
    centred = x - x.mean(-1, keepdim=True)
    return self.affine(centred / (x.var(-1, keepdim=True, correction=0).sqrt() + self.eps))


def _uncentred(self, x):
    return self.affine(x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt())


def _with_a_floor(self, x):
    centred = x - x.mean(-1, keepdim=True)
    return self.affine(centred / (x.var(-1, keepdim=True, correction=0) + self.eps).sqrt().clamp(min=0.2))


@pytest.mark.parametrize(
    ("wrong", "architecture", "claims"),
    [
        (_unbiased_variance, "course", {"4.1", "4.2.sphere", "4.2.image", "4.2.dimension", "4.3.epsilon", "5.model"}),
        (_root_before_epsilon, "course", {"4.1", "4.3.epsilon"}),
        (_uncentred, "course", {"4.1", "4.2.projection", "4.2.sphere", "4.2.dimension"}),
        (_with_a_floor, "course", {"4.3.invariance", "4.3.epsilon"}),
        (_root_before_epsilon, "rmsnorm", {"4.4.rmsnorm"}),
    ],
)
def test_a_norm_that_is_not_the_lectures_is_found(monkeypatch, wrong, architecture, claims):
    model = architectures.make(architecture)
    monkeypatch.setattr("circuits.layers.Norm.forward", wrong)
    monkeypatch.setattr("circuits.layers.Norm.tapped", lambda self, x, *rest: wrong(self, x))
    asked = [name for name in CLAIMS if name.startswith("4") or name == "5.model"]
    found = {verdict.claim.identifier for verdict in verify(model, claims=asked).failures}
    assert claims <= found


def test_sequences_that_are_too_long_must_be_refused(course, monkeypatch):
    monkeypatch.setattr("circuits.model.check_tokens", lambda tokens, config: tokens)
    model = architectures.make("rotary")
    assert verify(model, claims=["0.length"])["0.length"].finding.status == "does not hold"
    assert verify(course, claims=["0.length"])["0.length"].finding.status == "does not hold"


def test_the_lectures_table_is_compared_with_what_is_there():
    model = with_an_unembedding_bias(HookedGPT(GPTConfig.course()))
    finding = verify(model, claims=["5.2a.table"])["5.2a.table"].finding
    assert (finding.status, finding.value) == ("does not hold", 65)


def test_a_leaking_mask_in_one_layer_of_the_explicit_path_alone_is_found(course, monkeypatch):
    explicit = "circuits.attention.Attention._attend_explicitly"

    def leaking(self, q, k, v, names, run):
        scores = (q * self.scale).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        pattern = run.tap(names.pattern, scores.softmax(-1))
        run.tap(names.scores, scores)
        return (pattern @ v.transpose(1, 2)).transpose(1, 2)

    monkeypatch.setattr(explicit, leaking)
    found = fails(course)
    assert {"5.1.mask", "2.2.hull", "1.attention"} <= found
    assert "ex2" not in found


def test_a_wrong_scale_of_the_initial_output_maps_is_found(fresh):
    with torch.no_grad():
        for block in fresh.blocks:
            block.attn.out.weight.mul_(math.sqrt(6))
            block.mlp.down.weight.mul_(math.sqrt(6))
    assert fails(fresh) == {"5.2b.scale"}


def test_a_wrong_scale_in_the_initialiser_is_found_through_a_fresh_draw(course, monkeypatch):
    def unscaled(model, config, seed):
        initialise(model, config, seed)
        with torch.no_grad():
            for block in model.blocks:
                for weight in (block.attn.out.weight, block.mlp.down.weight):
                    weight.mul_(math.sqrt(config.n_writes))

    monkeypatch.setattr("circuits.model.initialise", unscaled)
    assert fails(course) == {"5.2b.scale"}


def test_initial_weights_that_are_too_large_are_found(fresh):
    with torch.no_grad():
        fresh.unembed.weight.mul_(20)
    assert fails(fresh) == {"5.2b.loss"}


def test_tied_weights_that_came_apart_are_found():
    model = private_copy(architectures.make("tied"))
    model.unembed.weight = nn.Parameter(model.embed.weight.clone())
    assert "5.3" in fails(model)


def test_a_post_norm_model_that_is_not_one_is_found():
    model = architectures.make("post_norm")
    for block in model.blocks:
        block.pre, block.post = True, False
    assert "3.5b" in fails(model)


def test_weights_that_are_not_numbers_fail_rather_than_pass(course):
    model = private_copy(course)
    model.blocks[1].mlp.up.weight = nn.Parameter(torch.full_like(model.blocks[1].mlp.up.weight, torch.nan))
    found = fails(model)
    assert {"2.1", "3.1", "5.model", "5.probabilities"} <= found


def test_a_check_that_stops_is_a_claim_that_does_not_hold(course):
    model = private_copy(course)
    model.blocks[0].mlp.forward = None
    finding = verify(model, claims=["2.1"])["2.1"].finding
    assert finding.status == "does not hold"
    assert finding.because.startswith("the check stopped: TypeError")


# --- the result -----------------------------------------------------------------------------------------------------


def test_every_claim_has_an_identifier_a_source_and_its_mathematics():
    assert len(CLAIMS) > 60
    for identifier, claim in CLAIMS.items():
        assert re.fullmatch(r"(ex)?\d(\.\d[ab]?)?(\.[a-zA-Z-]+)?", identifier), identifier
        assert claim.says.endswith(".")
        assert not claim.quantity.endswith(".")
        assert len(claim.mathematics) > 60, identifier
    numbered = "1.1 1.2 1.3 1.4 2.1 2.2 3.1 3.2 3.3 3.4 3.5a 3.5b 4.1 4.2 4.3 4.4 5.1 5.2a 5.2b 5.3 6.1"
    for statement in [*numbered.split(), *(f"ex{n}" for n in range(1, 9))]:
        assert any(identifier == statement or identifier.startswith(f"{statement}.") for identifier in CLAIMS), (
            statement
        )


def test_claims_stand_in_the_lectures_order():
    order = list(CLAIMS)
    assert order.index("1.1") < order.index("1.2.rank") < order.index("2.1") < order.index("3.5a.updates")
    assert (
        order.index("3.5b") < order.index("4.1") < order.index("5.2a") < order.index("5.2b.loss") < order.index("6.1")
    )
    assert order.index("6.1") < order.index("ex1") < order.index("ex8.limits")


def test_nan_never_holds():
    assert within(math.nan, 1.0).status == above(math.nan, 1.0).status == "does not hold"
    assert within(1.0, 1.0).status == above(1.0, 1.0).status == "holds"


def test_only_the_claims_asked_for_are_checked(course):
    found = verify(course, claims=["ex2", "4.1"])
    assert found.claims == ("ex2", "4.1")
    with pytest.raises(KeyError, match=r"no claim is called '4\.2\.sfere'; the nearest are 4\.2\.sphere"):
        verify(course, claims=["4.2.sfere"])
    with pytest.raises(KeyError, match=r"'5\.1' was not checked"):
        found["5.1"]
    assert find("5.1").source == "Remark 5.1"


def test_the_result_is_a_table_and_json(course):
    found = verify(course, claims=["ex2", "5.3", "3.3.path"])
    frame = found.to_frame()
    assert frame["status"].tolist() == ["holds", "does not apply", "measured"]
    assert frame["value"].isna().tolist() == [False, True, False]
    assert frame["bound"].isna().tolist() == [False, True, True]
    data = json.loads(found.to_json())
    assert data["holds"] is True
    assert data["counts"] == {"holds": 1, "does not hold": 0, "does not apply": 1, "measured": 1}
    assert data["claims"][1]["value"] is None
    assert data["claims"][0]["relation"] == "≤"
    assert "1 holds, 1 does not apply, 1 measured" in repr(found)


def test_the_repr_names_what_fails(course):
    found = verify(with_relu(private_copy(course)), claims=["2.gelu", "ex1"])
    assert not found.holds
    assert "2.gelu  does not hold: The activation is GELU" in repr(found)
    assert "1 holds, 1 does not hold" in found.title()


def test_values_are_shown_beside_their_bounds():
    row = {"value": 1.25e-16, "bound": 1e-9, "relation": "≤"}
    assert compared(row) == "1.25e-16 ≤ 1e-09"
    assert compared({**row, "bound": None}) == "1.25e-16"
    assert compared({**row, "value": None}) == ""
    assert Finding("measured", 1.0).bound is None


def test_verify_refuses_a_model_within_hooks(course):
    with course.hooks(), pytest.raises(ValueError, match="inside"):
        verify(course)


def test_the_seed_changes_nothing_but_what_is_drawn(course):
    for seed in (1, 2):
        assert verify(course, seed=seed).failures == ()
    first, again = (verify(course, seed=3, claims=["3.1.jacobian", "ex2"]).value for _ in range(2))
    assert torch.equal(first, again)
