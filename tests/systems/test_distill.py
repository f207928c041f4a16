"""The distill workload: two tokenizers aligned, the loss and its fallback, training in every precision, what breaks."""

import contextlib
import json
import math
import re

import pytest
import torch
from tests.slow import mostly_slow, slow
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from floatline.diagnosis.target_diagnosis import diagnose
from floatline.errors import GuardError, TargetError
from floatline.numerics import HalfOnCPU
from floatline.plans.presets import resolve_plan
from floatline.probe.runs.runs import run_target
from floatline.probe.steps.other_precision import as_fp32
from floatline.rescuing.rescue import find_plan
from floatline.training.trainer import Trainer
from floatline.workload import load_target

pytest.importorskip("transformers", reason="transformers is not installed")

from floatline.systems.distill import VARIANTS, Config, build, team_loop
from floatline.systems.distill.alignment import align_positions, coarsen, share_vocabulary, token_bytes
from floatline.systems.distill.model import TermLog, diverge, perplexity, unigram_perplexity
from floatline.systems.distill.text import load_tokenizer, read_text, split_text

QUICK = {"num_batches": 30}  # enough to learn


@pytest.fixture(scope="module")
def workload():
    return build(Config(**QUICK))


def spans(*pieces):
    """Begin and end of each piece of a text."""
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    return [(end - len(piece), end) for end, piece in zip(ends, pieces, strict=True)]


def test_positions_are_aligned_where_both_have_read_the_same_text():
    own = spans("un", "believ", "able", " tale")
    theirs = spans("unbe", "liev", "able ", "ta", "le")
    assert align_positions(own, theirs) == [-1, 1, -1, 4]
    assert align_positions(own, own) == [0, 1, 2, 3]


def test_a_token_that_ends_inside_a_character_is_not_aligned():
    # 'é' as two byte-level tokens: only the second one has read it all.
    assert align_positions(spans("caf", "é", "!"), [(0, 3), (3, 4), (3, 4), (4, 5)]) == [0, 2, 3]
    assert align_positions([(0, 3), (3, 4), (3, 4), (4, 5)], spans("caf", "é", "!")) == [0, -1, 1, 2]


@pytest.mark.parametrize(
    ("token", "byte_level", "raw"),
    [
        ("Ġthe", True, b" the"),
        ("Ċ", True, b"\n"),
        ("Ã©", True, "é".encode()),
        ("▁the", False, b" the"),
        ("<0xE9>", False, b"\xe9"),
        ("é", False, "é".encode()),
    ],
)
def test_a_token_is_known_by_its_bytes(token, byte_level, raw):
    assert token_bytes(token, byte_level=byte_level) == raw


def two_tokenizers():
    bytes_like = Tokenizer(
        models.BPE(vocab={"a": 0, "Ġa": 1, "Ġ": 2, "ab": 3, "b": 4}, merges=[("Ġ", "a"), ("a", "b")])
    )
    bytes_like.pre_tokenizer, bytes_like.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    marks = Tokenizer(
        models.BPE(vocab={"<unk>": 0, "b": 1, "▁a": 2, "a": 3, "▁": 4, "▁b": 5}, merges=[], unk_token="<unk>")
    )
    marks.decoder = decoders.Metaspace()
    return marks, bytes_like


def test_vocabularies_are_matched_by_bytes():
    marks, bytes_like = two_tokenizers()
    shared = share_vocabulary(marks, bytes_like, own_size=6, theirs_size=5)
    assert dict(zip(shared.own, shared.theirs, strict=True)) == {1: 4, 2: 1, 3: 0, 4: 2}
    assert shared.outcome_of().tolist() == [4, 0, 1, 2, 3, 4]  # '<unk>' and '▁b' are 'another token'
    assert [order.tolist() for order in shared.orders()] == [[1, 2, 3, 4, 0, 5], [4, 1, 0, 2, 3]]


def test_the_mass_of_other_tokens_is_kept_as_one_outcome():
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0])
    probs = coarsen(logits, torch.tensor([2, 0, 1, 3]), 2).exp()
    whole = logits.softmax(0)
    assert probs.tolist() == pytest.approx([x.item() for x in (whole[2], whole[0], whole[1] + whole[3])])


def test_the_divergence_of_coarsened_distributions_is_right():
    taught, own = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.2, 0.6]).log()
    by_hand = 0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3)
    assert diverge(own, taught, rest=True).item() == pytest.approx(by_hand)
    # A student without other tokens learns the shared ones, as far as the teacher speaks of them.
    own = torch.tensor([0.4, 0.6, 0.0]).clamp(min=1e-38).log()
    by_hand = 0.8 * (0.625 * math.log(0.625 / 0.4) + 0.375 * math.log(0.375 / 0.6))
    assert diverge(own, taught, rest=False).item() == pytest.approx(by_hand)


def test_the_shipped_tokenizers_differ_and_mostly_agree_on_where_words_end(workload):
    own, theirs = load_tokenizer(None, "student"), load_tokenizer(None, "teacher")
    assert own.get_vocab_size() == 768
    assert theirs.get_vocab_size() == 1024
    text = "Mr. Bennet was among the earliest of those who waited on Mr. Bingley.\n"
    assert own.decode(own.encode(text).ids) == theirs.decode(theirs.encode(text).ids) == text
    assert own.encode(text).tokens != theirs.encode(text).tokens
    aligned = torch.stack([inputs[3] for inputs, _ in workload.batches]).float().mean()
    assert 0.85 < aligned < 1


def test_aligned_positions_have_read_the_same_text(workload):
    own, theirs = load_tokenizer(None, "student"), load_tokenizer(None, "teacher")
    (ids, teacher_ids, positions, aligned), _ = workload.batches[0]
    for place in aligned[0].nonzero()[:, 0].tolist():
        read = own.decode(ids[0, : place + 1].tolist())
        assert theirs.decode(teacher_ids[0, : positions[0, place] + 1].tolist()) == read


def test_the_loss_is_the_weighted_sum_with_the_squared_temperature(workload):
    (ids, teacher_ids, positions, aligned), (labels,) = workload.batches[0]
    with torch.no_grad():
        terms = workload.model(ids, teacher_ids, positions, aligned)
        model, kinds = workload.model, workload.loss_fn
        ce = torch.nn.functional.cross_entropy(terms.logits.flatten(0, 1), labels.flatten())
        wanted = kinds.ce_weight * ce + kinds.kd_weight * terms.kd
        wanted += kinds.router_weight * terms.router + kinds.feature_weight * terms.feature
        assert kinds(terms, labels).item() == pytest.approx(wanted.item(), rel=1e-6)
        # One exit is no choice: the divergence of the tempered distributions by hand.
        model.exits, before = (3,), model.exits
        try:
            weight = model.router
            model.router = torch.nn.Linear(weight.in_features, 1)
            kd = model(ids, teacher_ids, positions, aligned).kd
        finally:
            model.exits, model.router = before, weight
        theirs = model.teacher(teacher_ids).logits[torch.arange(len(ids))[:, None], positions]
        taught = coarsen(theirs / 1.5, model.teacher_order, model.num_shared)
        own = coarsen(terms.logits / 1.5, model.order, model.num_shared)
        by_hand = (taught.exp() * (taught - own)).sum(-1)[aligned].mean() * 1.5**2
    assert kd.item() == pytest.approx(by_hand.item(), rel=1e-5)


def spoil_teacher(model):
    with torch.no_grad():
        model.teacher.transformer.ln_f.weight[0] = math.inf


def test_a_distillation_term_that_is_not_finite_leaves_the_text_alone_and_comes_back():
    workload = build(Config(**QUICK))
    inputs, targets = workload.batches[0]
    terms = workload.model(*inputs)
    sound = workload.model.teacher.transformer.ln_f.weight.detach().clone()
    spoil_teacher(workload.model)
    terms = workload.model(*inputs)
    loss = workload.loss_fn(terms, *targets)
    ce = torch.nn.functional.cross_entropy(terms.logits.flatten(0, 1), targets[0].flatten())
    assert not terms.kd.isfinite()
    assert loss.item() == pytest.approx(workload.loss_fn.ce_weight * ce.item())
    loss.backward()
    grads = [p.grad for p in workload.model.parameters() if p.grad is not None]
    assert all(bool(grad.isfinite().all()) for grad in grads)
    (wanted,) = torch.autograd.grad(
        0.4 * workload_ce(workload, inputs, targets), [workload.model.student.lm_head.weight]
    )
    assert torch.equal(workload.model.student.lm_head.weight.grad, wanted)
    workload.model.teacher.transformer.ln_f.weight.data.copy_(sound)
    terms = workload.model(*inputs)
    assert terms.sound
    assert workload.loss_fn(terms, *targets) > loss
    assert workload.model.kd_failures == 1


def workload_ce(workload, inputs, targets):
    logits = workload.model.student(inputs[0][:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[0].flatten())


def test_the_ledger_tells_how_many_batches_had_no_distillation(tmp_path):
    workload = build(Config(**QUICK))
    spoil_teacher(workload.model)
    result = Trainer(workload, plan="fp32", folder=tmp_path / "run", steps=3).run()
    assert result.applied == 3
    lines = "".join(part.read_text() for part in (tmp_path / "run").glob("ledger-*.jsonl"))
    assert "3 batches were trained on the text alone" in lines


def test_the_ledger_tells_the_parts_of_the_loss_and_the_success_rate(tmp_path):
    workload = build(Config(**QUICK))
    Trainer(workload, plan="fp32", folder=tmp_path / "run", steps=3, save_every=3).run()
    lines = "".join(part.read_text() for part in sorted((tmp_path / "run").glob("ledger-*.jsonl")))
    said = re.findall(r"kd=([\d.]+), ce=([\d.]+) over (\d+) batches, 100 % of them finite", lines)
    assert sum(int(batches) for *_, batches in said) == 3
    assert all(float(kd) > 0 and 5 < float(ce) < 8 for kd, ce, _ in said)
    assert "success rate 100.00 %" in lines


def test_a_canary_is_no_batch_of_the_log():
    workload = build(Config(**QUICK))
    for training in (True, False):
        workload.model.train(training)
        workload.loss_fn(workload.model(*workload.batches[0][0]), *workload.batches[0][1])
    assert "over 1 batches" in workload.loss_fn.terms.describe()


def test_means_leave_out_what_is_not_finite_and_say_so():
    terms = TermLog()
    assert terms.describe() == ""
    for number in (1.0, 3.0, math.nan):
        terms.add(torch.tensor(number / 2), torch.tensor(number))
    assert terms.describe() == "kd=1.0000, ce=2.0000 over 3 batches, 67 % of them finite"
    assert terms.describe() == ""
    terms.add(*torch.full((2,), math.inf))
    assert terms.describe() == "kd and ce not finite over 1 batches, 0 % of them finite"


def test_a_progressive_start_raises_every_learning_rate_evenly_and_then_keeps_it():
    workload = build(Config(**QUICK, progressive_steps=4, student_lr=0.008, router_lr=0.004))
    optimizer = workload.make_optimizer(workload.model)
    seen = []
    for _ in range(6):
        seen.append([group["lr"] for group in optimizer.param_groups[:2]])
        optimizer.step()
    assert seen == [[0.002, 0.001], [0.004, 0.002], [0.006, 0.003], [0.008, 0.004], [0.008, 0.004], [0.008, 0.004]]


@slow
@pytest.mark.parametrize("seed", mostly_slow([0, 1, 2], every=3))
def test_the_teams_whole_fix_is_nan_from_the_second_step_on_half_weights(seed, caplog):
    with HalfOnCPU():
        run = team_loop.train(14, seed)
    assert run.first_nan == 2 and run.applied == 1 and math.isnan(run.perplexity)
    assert len(run.losses) == 11 and "Too many NaN batches" in caplog.text


@pytest.mark.parametrize(("dtype", "finite"), [(torch.float16, False), (torch.float32, True)])
def test_a_warm_up_from_a_learning_rate_of_0_does_not_help_half_weights(dtype, finite):
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    weight.grad = torch.tensor([0.0, 1e-5, 1.0], dtype=dtype)
    torch.optim.AdamW([weight], lr=0.0).step()
    assert bool(weight.isfinite().all()) is finite


@slow
def test_the_same_settings_and_weights_stay_finite_with_an_exact_master():
    workload = build(Config(**QUICK | VARIANTS["team-fix"]))
    plan = resolve_plan("fp16-true").model_copy(update={"update": "exact"})
    result = Trainer(workload, plan=plan, folder=None, steps=4).run()
    assert result.applied == 4 and math.isfinite(result.metric)


def test_selecting_the_loss_alone_would_let_nan_into_the_gradients():
    weight = torch.ones(2, requires_grad=True)
    term = (weight * torch.tensor([math.inf, 1.0])).sum()
    torch.where(term.isfinite(), term, 0.0).backward()
    assert not weight.grad.isfinite().all()


def test_a_cross_entropy_that_is_not_finite_is_reported_as_it_is(workload):
    inputs, targets = workload.batches[0]
    with torch.no_grad():
        terms = workload.model(*inputs)
        spoilt = terms._replace(logits=terms.logits * math.nan)
    assert workload.loss_fn(spoilt, *targets).isnan()


def test_every_part_has_its_own_learning_rate_and_the_teacher_none(workload):
    config = Config(student_lr=1e-4, router_lr=2e-4, projection_lr=3e-4)
    optimizer = build(config.model_copy(update=QUICK)).make_optimizer(workload.model)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert {name: group["lr"] for name, group in groups.items()} == {
        "student": 1e-4,
        "router": 2e-4,
        "projection": 3e-4,
    }
    trained = {id(p) for group in groups.values() for p in group["params"]}
    assert not trained & {id(p) for p in workload.model.teacher.parameters()}
    assert trained == {id(p) for p in workload.model.parameters() if p.requires_grad}


def test_shipped_weights_are_the_same_when_a_diagnosis_builds_in_fp32(workload):
    with as_fp32():
        built = build(Config(num_batches=1))
    name = "transformer.wte.weight"
    assert torch.equal(built.model.teacher.get_parameter(name), workload.model.teacher.get_parameter(name))


def test_seeds_share_text_and_teacher_and_differ_in_student_and_windows():
    one, two, again = (build(Config(**QUICK), seed=seed) for seed in (0, 1, 0))
    name = "transformer.wte.weight"
    assert torch.equal(one.model.teacher.get_parameter(name), two.model.teacher.get_parameter(name))
    assert not torch.equal(one.model.student.get_parameter(name), two.model.student.get_parameter(name))
    assert not torch.equal(one.batches[0][0][0], two.batches[0][0][0])
    assert torch.equal(one.batches[0][0][0], again.batches[0][0][0])
    assert torch.equal(one.model.student.get_parameter(name), again.model.student.get_parameter(name))


def test_the_held_out_chapter_is_not_trained_on():
    train, held_out = split_text(read_text())
    assert held_out.startswith("Chapter 16\n")
    assert "Chapter 16" not in train


def test_the_teacher_is_better_than_the_baseline(workload):
    from floatline.systems.distill.text import tile_tokens

    held = tile_tokens(split_text(read_text())[1], length=48, student=load_tokenizer(None, "teacher"))
    with torch.no_grad():
        logits = workload.model.teacher(held[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten())
    assert loss < 4.5  # a unigram model has more than 6 nats


@slow
@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed", "bf16-mixed"])  # FP16 weights: see the rescue of the broken one
def test_it_learns_in_every_precision(plan):
    config = Config(**QUICK)
    result = Trainer(build(config), plan=plan, folder=None, steps=30).run()
    assert result.applied >= 28
    assert result.metric < 0.85 * unigram_perplexity(config)


def test_an_untrained_student_does_not_beat_the_baseline(workload):
    fresh = build(Config(**QUICK))
    assert fresh.evaluate(fresh.model) > unigram_perplexity(Config(**QUICK))


@slow
def test_pure_half_weights_under_adam_turn_nan_at_once_the_optimizer_is_blamed_and_the_rescue_trains():
    seen = run_target(load_target("distill:broken"), steps=3)
    assert math.isfinite(seen.losses[0])
    assert math.isnan(seen.losses[2])
    rescued = find_plan("distill:broken", steps=4)
    found = rescued.diagnosis
    assert (found.verdict, found.primary.cause.id) == ("precision", "optimizer-state-underflow")
    assert "Adam" in found.primary.op
    assert (rescued.plan.weights, rescued.plan.update) == ("fp16", "exact")
    result = Trainer(build(Config(**QUICK, optimizer="adam")), plan=rescued.plan, folder=None, steps=30).run()
    assert result.metric < 0.85 * unigram_perplexity(Config(**QUICK))


def test_half_weights_under_adam_are_refused_by_the_trainer_in_one_line():
    with pytest.raises(GuardError, match="rounds small updates of 16-bit weights to nothing. Use floatline.optim.Adam"):
        Trainer(build(Config(**QUICK, **VARIANTS["broken"])), folder=None, steps=1)


@slow
def test_healthy_distillation_is_left_in_peace():
    assert diagnose("distill", steps=4).verdict == "healthy"


def test_a_clamped_loss_above_the_bound_has_no_gradient_of_the_text():
    workload = build(Config(**QUICK, **VARIANTS["clamped-loss"], kd_weight=0, router_weight=0, feature_weight=0))
    inputs, targets = workload.batches[0]
    workload.loss_fn(workload.model(*inputs), *targets).backward()
    assert all(not p.grad.any() for p in workload.model.student.parameters())


def test_clamped_logits_cannot_be_confident():
    workload = build(Config(**QUICK, **VARIANTS["clamped-logits"]))
    with torch.no_grad():
        workload.model.student.lm_head.weight.mul_(1000)
        logits = workload.model(*workload.batches[0][0]).logits
    assert logits.abs().max() == 5
    # One token at 5 and 767 at -5: the loss cannot fall below this.
    assert math.log(1 + 767 * math.exp(-10)) > 0.03


def test_steps_above_the_norm_are_skipped_and_the_ledger_tells():
    config = Config(**QUICK, skip_norm_above=0.1)
    result = Trainer(build(config), plan="fp32", folder=None, steps=5).run()
    assert result.applied == 0
    assert sum(result.skipped.values()) == 5


def test_a_norm_that_is_only_told_skips_no_step(capsys):
    result = Trainer(build(Config(**QUICK, warn_norm_above=1e-3)), plan="fp32", folder=None, steps=2).run()
    assert result.applied == 2
    assert "large gradient norm in step 1" in capsys.readouterr().err


def test_bad_batches_in_a_row_stop_the_run():
    workload = build(Config(**QUICK, skip_norm_above=0.1, most_bad=3))
    result = Trainer(workload, plan="fp32", folder=None, steps=20).run()
    assert "3 " in result.stopped
    assert result.attempted < 20


@slow
@pytest.mark.parametrize(("name", "rate"), [("balanced", 1e-5), ("ultra-conservative", 5e-6)])
def test_presets_bring_their_plan_and_their_policy(name, rate):
    workload = load_target("distill", preset=name).build()
    trainer = Trainer(workload, folder=None, steps=1)
    with contextlib.closing(trainer.guard):
        assert trainer.plan.name == name
        assert trainer.plan.clip.max_norm == 0.5
        assert trainer.guard.run.optimizer.param_groups[0]["lr"] == rate
        assert (trainer.guard.run.policy.most_bad == 10) == (name == "ultra-conservative")


@slow
def test_a_memory_budget_cuts_batches_and_keeps_the_update():
    free = build(Config(**QUICK))
    tight = build(Config(**QUICK, memory_budget_gib=0.012))
    size = len(tight.batches[0][0][0])
    assert size < 16
    assert resolve_plan(tight.precision).accumulate * size == 16
    assert torch.equal(torch.cat([i[0] for i, _ in tight.batches]), torch.cat([i[0] for i, _ in free.batches]))
    with pytest.raises(TargetError, match="does not hold a step of one window: it takes 0.0"):
        build(Config(**QUICK, memory_budget_gib=0.001))


def test_local_models_are_loaded_from_safetensors_with_their_tokenizer(tmp_path, workload):
    student, theirs = workload.model.student, tmp_path / "student"
    student.save_pretrained(theirs)
    with pytest.raises(TargetError, match="has no tokenizer.json"):
        build(Config(**QUICK, student_path=str(theirs)))
    load_tokenizer(None, "student").save(str(theirs / "tokenizer.json"))
    load_tokenizer.cache_clear()
    loaded = build(Config(**QUICK, student_path=str(theirs)), seed=5)
    name = "transformer.wte.weight"
    assert torch.equal(loaded.model.student.get_parameter(name), student.get_parameter(name))
    (theirs / "model.safetensors").rename(theirs / "model.bin")
    with pytest.raises(TargetError, match=r"has no \.safetensors file"):
        build(Config(**QUICK, student_path=str(theirs)))


@pytest.mark.parametrize("damaged", ['{"version"', "{}", ""])
def test_a_damaged_tokenizer_is_one_line_with_its_file(tmp_path, damaged):
    (tmp_path / "tokenizer.json").write_text(damaged)
    load_tokenizer.cache_clear()
    with pytest.raises(TargetError, match=r"teacher_path: '.*tokenizer\.json' is no tokenizer: ") as error:
        load_tokenizer(str(tmp_path), "teacher")
    assert "\n" not in str(error.value)
    load_tokenizer(None, "teacher").save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path), "teacher").get_vocab_size() == 1024  # a whole one is read


def test_a_loaded_teacher_is_read_at_its_last_layer_unless_others_are_asked_for(tmp_path):
    teacher = build(Config(**QUICK, teacher="random", teacher_layers=2, exits=())).model.teacher
    teacher.save_pretrained(tmp_path)
    load_tokenizer(None, "teacher").save(str(tmp_path / "tokenizer.json"))
    load_tokenizer.cache_clear()
    found = [build(Config(**QUICK, teacher_path=str(tmp_path), **more)).model.exits for more in ({}, {"exits": (1, 2)})]
    assert found == [(2,), (1, 2)]
    assert build(Config(**QUICK)).model.exits == (2, 3)


def test_a_llama_student_is_a_student_too():
    workload = build(Config(**QUICK, student_family="llama"))
    inputs, targets = workload.batches[0]
    assert workload.loss_fn(workload.model(*inputs), *targets).isfinite()
    assert perplexity(workload.model, targets[0]) > 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"exits": (4,)}, "which has 3. Use 1 to 3."),
        ({"length": 120}, "the teacher takes 96. Give a smaller length."),
        ({"text_path": "no/such.txt"}, "cannot be read"),
        ({"temperature": 0}, "temperature"),
    ],
)
def test_wrong_settings_say_what_to_do(settings, says):
    with pytest.raises(TargetError, match=says):
        build(Config(**QUICK | {"num_batches": 1} | settings))


def test_the_shipped_files_are_small():
    from floatline.systems.distill.text import TEACHER_WEIGHTS, TOKENIZERS

    sizes = [path.stat().st_size for path in (TEACHER_WEIGHTS, *TOKENIZERS.values())]
    assert max(sizes) <= 1_000_000
    assert len(read_text()) <= 150_000
    assert json.loads(TOKENIZERS["teacher"].read_text())["model"]["type"] == "BPE"
