"""SFT, DPO and reward models against TRL's trainers on the same rows and weights: loss, metrics and
gradient norm."""

import json
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import make_critic, make_model, make_tokenizer
from parity import SECTION
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2.data.examples import Examples, render_pair, render_sft
from rl2.parallel.mesh import init_distributed
from rl2.trainer import dpo, rm, sft
from rl2.worker import Worker

pytest.importorskip("trl")
PAIRS = [
    {
        "messages": [{"role": "user", "content": "q" * n}],
        "chosen": "ab" * c,
        "rejected": "yx" * r,
        "margin": 0.3 * n,
    }
    for n, c, r in ((3, 1, 4), (9, 2, 2), (5, 6, 1))
]


@pytest.fixture
def device():
    yield init_distributed()
    dist.destroy_process_group()


def make_trl(cls, **settings):
    """TRL's trainer with nothing but what its loss reads."""
    trainer = cls.__new__(cls)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        parallelism_config=None,
    )
    defaults = dict(
        accelerator=accelerator,
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer.__dict__.update({**defaults, **settings})
    return trainer


def fused(name, *outputs):
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", *outputs))
    return model.train()


def read(tmp_path, rows, render):
    """Our examples, and their sequences padded as TRL's collators do."""
    path, tokenizer = tmp_path / "rows.jsonl", make_tokenizer()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = {"shuffle": False, "seed": 0, "batch_size": len(rows)}
    examples = list(Examples(str(path), "train", tokenizer, render, max_length=400, **order))
    sequences = [sequence for example in examples for sequence in example.sequences]
    width = max(len(tokens) for tokens, _ in sequences)

    def padded(part):
        return torch.tensor(
            [sequence[part] + [0] * (width - len(sequence[part])) for sequence in sequences]
        )

    ids, mask = padded(0), padded(1)
    attention = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t, _ in sequences])
    return SimpleNamespace(tokenizer=tokenizer), examples, ids, mask, attention


def update(name, device, batch, loss_fn, critic=False, **options):
    """One step of ours, in several micro-batches."""
    section = SimpleNamespace(
        **{**SECTION, "model_name": name, "max_length_per_device": 120, "lr": 1e-4}
    )
    return Worker(section, device, critic, 1).update(batch, loss_fn, **options)


def check(told, loss, model):
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert told.loss == pytest.approx(loss.item(), rel=1e-5)
    assert told.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_sft_loss(tmp_path, device):
    from trl import SFTTrainer

    name = make_model(tmp_path / "model")
    talk = [
        {"role": role, "content": f"{role} {i}" * i}
        for i in (1, 3)
        for role in ("user", "assistant")
    ]
    run, examples, ids, mask, attention = read(
        tmp_path, [{"messages": talk}, {"text": "abc" * 9}], render_sft
    )
    run.config = SimpleNamespace(actor=SimpleNamespace(average="token"))
    told = update(name, device, sft.make_batch(run, examples), sft.sft_loss)
    model = fused(name, "entropy", "is_top1")
    arguments = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    trainer = make_trl(SFTTrainer, model=model, args=arguments)
    labels = ids.masked_fill(mask == 0, -100)
    loss = trainer.compute_loss(
        model, {"input_ids": ids, "attention_mask": attention, "labels": labels}
    )
    check(told, loss, model)


@pytest.mark.parametrize(
    ("loss", "beta"), [("sigmoid", 0.1), ("sigmoid", 0.5), ("ipo", 0.3), ("hinge", 0.2)]
)
def test_dpo_loss(tmp_path, device, loss, beta):
    from trl import DPOTrainer

    name, other = make_model(tmp_path / "model", seed=1), make_model(tmp_path / "reference")
    run, examples, ids, mask, attention = read(tmp_path, PAIRS, render_pair)
    batch = dpo.make_batch(run, examples)
    section = SimpleNamespace(**{**SECTION, "model_name": other})
    batch.ref_logps = Worker(section, device).infer(batch).logps
    settings = SimpleNamespace(beta=beta, loss=loss, label_smoothing=0.0)
    told = update(
        name, device, batch, partial(dpo.preference_loss, settings), keep_groups_together=True
    )
    model = fused(name, "entropy", "mean_logits", "is_top1")
    trainer = make_trl(
        DPOTrainer,
        model=model,
        ref_model=fused(other),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[loss],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
    )
    order = [
        *range(0, 6, 2),
        *range(1, 6, 2),
    ]  # TRL's batch holds all chosen replies, then all rejected ones
    inputs = {
        "input_ids": ids[order],
        "attention_mask": attention[order],
        "completion_mask": mask[order],
    }
    check(told, trainer._compute_loss(model, inputs, False), model)
    names = {
        "chosen": "chosen_reward",
        "rejected": "rejected_reward",
        "accuracies": "accuracy",
        "margins": "margin",
    }
    for theirs, ours in names.items():
        assert trainer._metrics["train"][f"rewards/{theirs}"] == [
            pytest.approx(told.metrics[ours], rel=1e-5)
        ]


@pytest.mark.parametrize("margin", [True, False])
@pytest.mark.parametrize("center", [0.0, 0.05])
def test_reward_loss(tmp_path, device, margin, center):
    from trl import RewardTrainer

    name = make_critic(make_model(tmp_path / "model"))
    rows = PAIRS if margin else [{key: row[key] for key in row if key != "margin"} for row in PAIRS]
    run, examples, ids, _, attention = read(tmp_path, rows, render_pair)
    loss_fn = partial(rm.reward_loss, center)
    told = update(
        name, device, rm.make_batch(run, examples), loss_fn, critic=True, keep_groups_together=True
    )
    model = AutoModelForSequenceClassification.from_pretrained(name, dtype=torch.float32).train()
    trainer = make_trl(
        RewardTrainer, model=model, args=SimpleNamespace(center_rewards_coefficient=center or None)
    )
    order = [*range(0, 6, 2), *range(1, 6, 2)]
    inputs = {"input_ids": ids[order], "attention_mask": attention[order]}
    if margin:
        inputs["margin"] = torch.tensor([row["margin"] for row in rows])
    check(told, trainer.compute_loss(model, inputs), model)
    for key in ("accuracy", "margin"):
        assert trainer._metrics["train"][key] == [pytest.approx(told.metrics[key], rel=1e-5)]


def test_what_ends_in_padding_is_scored_where_transformers_does(tmp_path, device):
    """Where the end of a turn is the padding token too, as in SmolLM2, transformers reads the token
    before it."""
    name = make_critic(make_model(tmp_path / "model", pad_token_id=2))
    row = {"messages": "plain prompt ", "chosen": "good", "rejected": "evil"}
    run, examples, ids, _, attention = read(tmp_path, [row], render_pair)
    run.tokenizer.pad_token = run.tokenizer.eos_token
    assert ids[0, -1] == run.tokenizer.pad_token_id == 2
    batch = rm.make_batch(run, examples)
    section = SimpleNamespace(**{**SECTION, "model_name": name})
    values = Worker(section, device, critic=True).infer(batch).values
    model = AutoModelForSequenceClassification.from_pretrained(name)
    expected = model(input_ids=ids, attention_mask=attention).logits[:, 0]
    torch.testing.assert_close(
        (values * (batch.token_weights > 0)).sum(1), expected.detach(), rtol=0, atol=1e-5
    )
