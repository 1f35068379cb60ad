"""Losses against their formulas, layer maps, shrunken students, and acceptance counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.tiny_teacher import save_teacher
from tools.distill import losses, models
from tools.distill.acceptance import compare_acceptance, simulate_acceptance
from tools.distill.errors import DistillError
from tools.distill.settings import Phase, StudentShape, read_schedule
from tools.distill.student import init_from_teacher, make_student, student_config

CPU = torch.device("cpu")


def test_kl_is_hintons():
    student, teacher = torch.randn(4, 9), torch.randn(4, 9)
    p, q = (torch.softmax(logits.double() / 3, -1) for logits in (teacher, student))
    expected = 9 * (p * (p / q).log()).sum(-1).mean()
    assert losses.logit_kl(student, teacher, 3.0).item() == pytest.approx(expected.item(), rel=1e-4)
    assert losses.logit_kl(teacher, teacher, 2.0).item() == pytest.approx(0, abs=1e-6)


def test_at_high_temperature_kl_matches_centred_logits():
    """Hinton et al. 2015, equation 4: half the squared distance over the number of classes."""
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 1, 5).double()
    apart = (student - student.mean()) - (teacher - teacher.mean())
    found = losses.logit_kl(student, teacher, 100.0).item()
    assert found == pytest.approx((apart**2).sum().item() / 10, rel=5e-2)


def test_hidden_states_are_matched_layer_by_layer():
    transfer = losses.HiddenTransfer(4, 4, [2])
    for projection in transfer.projections:
        torch.nn.init.eye_(projection.weight)
    states = [torch.randn(1, 3, 4) for _ in range(3)]
    unit = [s * s.pow(2).mean(-1, keepdim=True).rsqrt() for s in states]
    assert transfer((unit[0], unit[2]), tuple(states)).item() == pytest.approx(0, abs=1e-5)
    assert transfer((unit[0], unit[1]), tuple(states)).item() > 0.1


def test_attention_is_matched_over_unequal_heads():
    teacher = tuple(torch.softmax(torch.randn(1, 4, 3, 3), -1) for _ in range(2))
    mean = teacher[1].mean(1, keepdim=True)
    assert losses.attention_transfer((mean,), teacher, [2]).item() == pytest.approx(0, abs=1e-6)
    assert losses.attention_transfer((mean,), teacher, [1]).item() > 1e-3


@given(st.integers(1, 12), st.integers(1, 48))
def test_layers_are_spread_evenly(num_student, num_teacher):
    mapped = losses.layer_map(num_student, num_teacher)
    assert mapped[-1] == num_teacher
    assert mapped == sorted(mapped)
    assert mapped[0] >= 1
    if num_student <= num_teacher:
        assert len(set(mapped)) == num_student


def test_a_student_of_the_same_width_begins_as_its_teachers_layers(tmp_path):
    folder = save_teacher(tmp_path)
    teacher = models.load_model(folder, torch.float32, CPU, eager_attention=False)
    config = student_config(teacher.config, None, StudentShape(layers=1))
    student = make_student(config, 0, eager_attention=False)
    taken = init_from_teacher(student, teacher)
    assert set(taken) == set(student.state_dict())
    ours, theirs = student.model.layers[0], teacher.model.layers[1]
    assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)


def test_a_narrower_embedding_keeps_what_is_alike_alike(tmp_path):
    folder = save_teacher(tmp_path)
    teacher = models.load_model(folder, torch.float32, CPU, eager_attention=False)
    # Words along few directions: a narrow embedding can represent them without loss.
    with torch.no_grad():
        table = teacher.get_input_embeddings().weight
        table.copy_(torch.randn(3072, 12) @ torch.randn(12, 48))
    shape = StudentShape(hidden=16, heads=2, kv_heads=1)
    student = make_student(student_config(teacher.config, None, shape), 0, eager_attention=False)
    assert "model.embed_tokens.weight" in init_from_teacher(student, teacher)
    narrow = student.get_input_embeddings().weight.detach()
    wide = table.detach()
    torch.testing.assert_close(
        narrow[:50] @ narrow[:50].T, wide[:50] @ wide[:50].T, rtol=1e-3, atol=1e-2
    )


def test_shapes_that_do_not_fit_are_refused(tmp_path):
    config = models.load_config(save_teacher(tmp_path))
    for shape, problem in (
        (StudentShape(heads=3), "cannot share 2 KV heads"),
        (StudentShape(layers=0), "--student-layers must be at least 1"),
    ):
        with pytest.raises(DistillError, match=problem):
            student_config(config, None, shape)


def test_vocabularies_that_differ_are_refused(tmp_path):
    config = models.load_config(save_teacher(tmp_path / "a"))
    other = models.load_config(save_teacher(tmp_path / "b", vocab_size=3080))
    with pytest.raises(DistillError, match="the student has 3080 tokens, the teacher 3072"):
        models.check_vocabularies(config, other, ("a", None))
    text = (tmp_path / "b" / "tokenizer.json").read_text("utf-8")
    (tmp_path / "b" / "tokenizer.json").write_text(text.replace('"<think>"', '"<muse>"'), "utf-8")
    with pytest.raises(DistillError, match="is not that of the teacher"):
        models.check_vocabularies(config, config, (str(tmp_path / "a"), tmp_path / "b"))


def test_what_cannot_fit_is_refused_before_it_is_loaded(tmp_path):
    config = models.load_config(save_teacher(tmp_path))
    models.check_memory(config, config, 4, 2048, CPU)
    with pytest.raises(DistillError, match="not enough memory"):
        models.check_memory(config, config, 4, 2**40, CPU)


def test_schedules_are_read_and_their_mistakes_named(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text('[{"steps": 5, "hidden": 1}, {"temperature": 2}]', "utf-8")
    first, second = read_schedule(path, Phase(steps=9))
    assert (first.steps, first.hidden, second.steps, second.temperature) == (5, 1, 9, 2)
    for text, problem in (
        ('[{"speed": 1}]', "phase 1 has no setting 'speed'"),
        ('[{}, {"steps": 1.5}]', "phase 2: schedule: steps must be a number"),
        ('[{"kl": 0}]', "learns nothing"),
        ("{}", "a list of one or more"),
        ("[", "not JSON"),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(DistillError, match=problem):
            read_schedule(path, Phase())


def test_the_rate_rises_and_falls():
    phase = Phase(steps=100, learning_rate=1.0, end_rate=0.1)
    rates = [phase.rate(step, warm_up=10) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


def test_acceptance_by_hand():
    # yes yes no | yes yes yes yes (and one) | yes no | end
    agreed = [[True, True, False, True, True, True, True, False, True, False]]
    found = simulate_acceptance(agreed, 4)
    assert (found.rounds, found.accepted) == (3, 7)
    assert (found.full_rounds, found.full_accepted) == (2, 6)
    assert found.by_position == (3, 2, 1, 1)
    assert found.as_json()["tokens_a_step"] == pytest.approx(10 / 3, abs=1e-3)


@given(st.lists(st.lists(st.booleans(), max_size=40), max_size=5), st.integers(1, 6))
def test_every_token_of_an_answer_is_either_accepted_or_the_targets(agreed, drafts):
    found = simulate_acceptance(agreed, drafts)
    tokens = sum(map(len, agreed))
    # The target's own token after the last draft tokens may lie beyond the answer's end.
    assert tokens <= found.accepted + found.rounds <= tokens + len(agreed)
    assert math.isclose(found.accepted, sum(found.by_position))


def test_a_lead_is_told_with_its_error():
    """The error is the variation of the lead if answers are drawn again."""
    rng = np.random.default_rng(4)
    good = [(rng.random(rng.integers(1, 40)) < 0.95).tolist() for _ in range(200)]
    # The other draft fails wherever this one does, and occasionally elsewhere.
    worse = [[kept and rng.random() < 0.97 for kept in agreed] for agreed in good]
    difference, error = compare_acceptance(good, worse, 4)
    assert (
        difference
        == simulate_acceptance(good, 4).mean_accepted - simulate_acceptance(worse, 4).mean_accepted
    )
    drawn = []
    for _ in range(300):
        picked = rng.integers(0, len(good), len(good))
        drawn.append(
            compare_acceptance([good[i] for i in picked], [worse[i] for i in picked], 4)[0]
        )
    assert error == pytest.approx(np.std(drawn), rel=0.25)
    assert compare_acceptance(worse, good, 4) == pytest.approx((-difference, error))
    assert compare_acceptance(good, good, 4) == (0.0, 0.0)
