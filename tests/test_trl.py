"""SFT, DPO and KTO against TRL's trainers.

Loss, metrics and gradient norm are compared on the same rows and weights.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from common import make_critic, make_model, make_tokenizer, write_jsonl
from parity import worker_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2.config.schema import DPOLossConfig
from rl2.data.chat import ChatTemplate
from rl2.data.examples import LABELLED_ROWS, PAIR_ROWS, SFT_ROWS, Examples
from rl2.data.rows import load_rows
from rl2.trainer import dpo, rm, sft
from rl2.worker import Worker

trl = pytest.importorskip("trl")

PAIRS = [
    {
        "messages": [{"role": "user", "content": "q" * question_length}],
        "chosen": "ab" * chosen_length,
        "rejected": "yx" * rejected_length,
    }
    for question_length, chosen_length, rejected_length in ((3, 1, 4), (9, 2, 2), (5, 6, 1))
]
CHOSEN_THEN_REJECTED = [0, 2, 4, 1, 3, 5]  # the order of the rows in TRL's batches


def make_trl(cls, **settings):
    """A trainer of TRL that has only the attributes that its loss reads."""
    trainer = cls.__new__(cls)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
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


def load_trl_model(name, *outputs):
    """The model with TRL's fused head, which returns log-probabilities and `outputs`."""
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", *outputs))
    return model.train()


def read_examples(tmp_path, rows, kind):
    """(run, examples, ids, mask, attention mask) of `rows`.

    The last three are the sequences of the examples, padded like TRL's collators do.
    """
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, rows)
    tokenizer = make_tokenizer()
    loaded = load_rows(str(path), read=kind.read)
    examples = list(Examples(loaded, ChatTemplate(tokenizer), kind, max_length=400))
    sequences = [sequence for example in examples for sequence in example.sequences]
    width = max(len(tokens) for tokens, _ in sequences)

    def pad(columns):
        return torch.tensor([column + [0] * (width - len(column)) for column in columns])

    ids = pad([tokens for tokens, _ in sequences])
    mask = pad([mask for _, mask in sequences])
    attention_mask = pad([[1] * len(tokens) for tokens, _ in sequences])
    return SimpleNamespace(tokenizer=tokenizer), examples, ids, mask, attention_mask


def update(name, device, batch, loss_fn, **options):
    """The result of one update of a new worker, in several micro-batches."""
    config = worker_config(name, max_length_per_device=120, lr=1e-4)
    return Worker(config, device, False, 1).update(batch, loss_fn, **options)


def check_update(result, trl_loss, trl_model):
    """The update has the loss and the gradient norm of TRL."""
    trl_loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(trl_model.parameters(), 1e9)
    assert result.loss == pytest.approx(trl_loss.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(grad_norm.item(), rel=1e-4)


def test_sft_loss(tmp_path, device):
    name = make_model(tmp_path / "model")
    messages = []
    for i in (1, 3):
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": f"{role} {i}" * i})
    rows = [{"messages": messages}, {"text": "abc" * 9}]
    run, examples, ids, mask, attention_mask = read_examples(tmp_path, rows, SFT_ROWS)
    run.config = SimpleNamespace(actor=SimpleNamespace(average="token"))
    result = update(name, device, sft.make_batch(run, examples), sft.sft_loss)
    model = load_trl_model(name, "entropy", "is_top1")
    arguments = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    trainer = make_trl(trl.SFTTrainer, model=model, args=arguments)
    labels = ids.masked_fill(mask == 0, -100)
    inputs = {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}
    check_update(result, trainer.compute_loss(model, inputs), model)


@pytest.mark.parametrize(("loss", "beta"), [("sigmoid", 0.1), ("ipo", 0.3), ("hinge", 0.2)])
def test_dpo_loss(tmp_path, device, loss, beta):
    name = make_model(tmp_path / "model", seed=1)
    reference = make_model(tmp_path / "reference")
    run, examples, ids, mask, attention_mask = read_examples(tmp_path, PAIRS, PAIR_ROWS)
    settings = DPOLossConfig(beta=beta, loss=loss)
    run.config = SimpleNamespace(dpo=settings)
    batch = dpo.make_batch(run, examples)
    batch.ref_logps = Worker(worker_config(reference), device).score(batch).logps
    loss_fn = partial(dpo.preference_loss, settings)
    result = update(name, device, batch, loss_fn, keep_groups_together=True)
    model = load_trl_model(name, "entropy", "mean_logits", "is_top1")
    trainer = make_trl(
        trl.DPOTrainer,
        model=model,
        ref_model=load_trl_model(reference),
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
    inputs = {
        "input_ids": ids[CHOSEN_THEN_REJECTED],
        "attention_mask": attention_mask[CHOSEN_THEN_REJECTED],
        "completion_mask": mask[CHOSEN_THEN_REJECTED],
    }
    check_update(result, trainer._compute_loss(model, inputs, False), model)
    names = {"chosen": "chosen_reward", "rejected": "rejected_reward"}
    names |= {"accuracies": "accuracy", "margins": "margin"}
    for trl_name, rl2_name in names.items():
        expected = pytest.approx(result.metrics[rl2_name], rel=1e-5)
        assert trainer._metrics["train"][f"rewards/{trl_name}"] == [expected]


def test_kto_loss(tmp_path, device):
    """Labelled replies, with the KL estimate of TRL's mismatched rows."""
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    name = make_model(tmp_path / "model", seed=2)
    reference = make_model(tmp_path / "reference", seed=1)
    replies = [("q", "ab" * 3, True), ("qqqq", "yx", False), ("qq", "abab", True)]
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "completion": [{"role": "assistant", "content": reply}],
            "label": label,
        }
        for prompt, reply, label in replies
    ]
    run, examples, _, _, _ = read_examples(tmp_path, rows, LABELLED_ROWS)
    settings = DPOLossConfig(beta=0.3, loss="kto", desirable_weight=1.5, undesirable_weight=0.7)
    run.config = SimpleNamespace(dpo=settings, data=SimpleNamespace(max_length=400))
    run.worker = Worker(worker_config(name, max_length_per_device=120, lr=1e-4), device, False, 1)
    run.reference = Worker(worker_config(reference), device)
    batch = dpo.make_batch(run, examples)
    batch.ref_logps = run.reference.score(batch).logps
    batch.reference_point = dpo.find_reference_point(run, batch)
    result = run.worker.update(batch, partial(dpo.preference_loss, settings))

    features = []
    for example in examples:
        [(tokens, mask)] = example.sequences
        start = mask.index(1)
        reply = tokens[start : start + sum(mask)]  # without the newline after the end of the turn
        features.append({"prompt_ids": tokens[:start], "completion_ids": reply})
    for i, (_, _, label) in enumerate(replies):
        features[i]["label"] = label
        features[i]["KL_completion_ids"] = features[i - 1]["completion_ids"]
    model = load_trl_model(name, "entropy", "mean_logits")
    trainer = make_trl(
        trl.KTOTrainer,
        model=model,
        ref_model=load_trl_model(reference),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        precompute_ref_logps=False,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.7,
    )
    inputs = DataCollatorForUnpairedPreference(pad_token_id=0)(features)
    check_update(result, trainer._compute_loss(model, inputs, False), model)
    kl = trainer._metrics["train"]["kl"]
    assert kl == [pytest.approx(result.metrics["reference_point"], rel=1e-4)] and kl[0] > 0


def test_a_reply_that_ends_in_the_padding_token_is_scored_like_transformers(tmp_path, device):
    """In models like SmolLM2 the end of a turn is also the padding token.

    Transformers then scores the token before it.
    """
    name = make_critic(make_model(tmp_path / "model", pad_token_id=2))
    row = {"messages": "plain prompt ", "chosen": "good", "rejected": "evil"}
    run, examples, ids, _, attention_mask = read_examples(tmp_path, [row], PAIR_ROWS)
    run.tokenizer.pad_token = run.tokenizer.eos_token
    assert ids[0, -1] == run.tokenizer.pad_token_id == 2
    batch = rm.make_batch(run, examples)
    values = Worker(worker_config(name), device, critic=True).score(batch).values
    scores = (values * (batch.token_weights > 0)).sum(1)
    model = AutoModelForSequenceClassification.from_pretrained(name)
    expected = model(input_ids=ids, attention_mask=attention_mask).logits[:, 0].detach()
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
