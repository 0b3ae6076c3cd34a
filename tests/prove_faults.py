"""Faults in rl2 that `python -m rl2 prove` must find, as edits of its source.

    python tests/prove_faults.py [NAME ...]

plants each of them, or those named, in a command of its own and in all its processes, and prints
which rows found it. test_prove.py plants those that need one process without starting another.
"""

import inspect
import os
import pkgutil
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from subprocess import CompletedProcess
from types import CodeType, FunctionType
from typing import NamedTuple

from common import ROOT, make_model, run
from transformers import AutoModelForCausalLM, GraniteConfig

SIZES = {"vocab_size": 98, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
# Overrides of `make_model` by the name of a model; its family is the first word.
MODELS = {
    "llama": {},
    "llama scaled": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "mistral window": {"sliding_window": 6},
    "qwen2": {"tied": False},
    "qwen3": {"tied": False},
    "gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {},
}
NEW_EPSILON = "[setattr(m, 'variance_epsilon', 1e-5) for m in hf.modules()]"
NO_BIAS = "{name: tensor * ('bias' not in name) for name, tensor in full.items()}"
ONE_DOCUMENT = "[[(sum(a + b for a, b in parts), 0)] for parts in chunks]"
BASE_WEIGHTS = (
    "[(name.replace('.base_layer', ''), weight.full_tensor())"
    " for name, weight in self.model.hf.named_parameters() if '.lora_' not in name]"
)
UNTIED = "hf.lm_head.weight = torch.nn.Parameter(hf.lm_head.weight.clone()); hf.tie_weights = dict"


ENGINE_START = "rl2.engine.local:LocalEngine.__init__"
LENGTH = "self.max_length = max_request_tokens(self.model.config)"
PACKING = "rl2.engine.linear:pack_linear_layers"
PACKED = 'module.__dict__["forward"] = linear'
LAST_DOWN = "module is model.base_model.layers[-1].mlp.down_proj"


class Fault(NamedTuple):
    row: str  # that finds it
    place: str  # of the function that is edited
    old: str
    new: str
    model: str = "llama"
    words: tuple[str, ...] = ()
    processes: int = 1
    named: str = ""  # in what is printed


HF = "config = hf.config.get_text_config()"  # where TokenModel looks at its model
FAULTS = {
    "rope base": Fault(
        "transformers",
        "rl2.model.token_model:attention_cost",
        HF,
        f"{HF}; hf.base_model.rotary_emb.inv_freq.pow_(1.1)",
    ),
    "rope scaling dropped": Fault(
        "transformers",
        "rl2.model.load:_read_class",
        "**labels)",
        "**labels); config.rope_parameters = {'rope_type': 'default', 'rope_theta': 1e4}",
        "llama scaled",
    ),
    "mask shifted by one": Fault(
        "transformers",
        "rl2.batch:collate",
        'mask=column("mask", torch.int8)',
        'mask=column("mask", torch.int8).roll(1, 1)',
    ),
    "positions not restarted": Fault(
        "packed",
        "rl2.packing:pack",
        "torch.arange(first_position, first_position + len(segment))",
        "cu_seqlens[-1] + torch.arange(len(segment))",
    ),
    "documents see each other": Fault(
        "packed",
        "rl2.attention.ring:PackedAttention.__init__",
        "self.layout = Layout(chunks, prefixes,",
        f"self.layout = Layout({ONE_DOCUMENT}, [],",
    ),
    "answers do not see their prompt": Fault(
        "packed", "rl2.packing:pack", "prefixes.append", "[].append"
    ),
    "world factor": Fault(
        "layout", "rl2.worker:Worker.update", "(loss * self.mesh.fsdp.size())", "loss", processes=2
    ),
    "ring sums gradients": Fault(
        "layout",
        "rl2.parallel.mesh:_AllReduce.backward",
        "return gradient",
        "return 2 * gradient",
        words=("actor.sp_size=2",),
        processes=2,
    ),
    "partial gradients of norms": Fault(
        "layout",
        "rl2.parallel.tensor:all_reduce_partial_gradients",
        "dist.all_reduce(gradient.to_local(), group=group)",
        "pass",
        "qwen3",
        ("actor.tp_size=2",),
        2,
    ),
    "dropped bias": Fault(
        "transformers",
        "rl2.model.load:load_model",
        "fsdp.scatter(model, full, mesh, change)",
        f"fsdp.scatter(model, full and {NO_BIAS}, mesh, change)",
        "qwen2",
    ),
    "norm epsilon": Fault(
        "transformers",
        "rl2.model.token_model:attention_cost",
        HF,
        f"{HF}; {NEW_EPSILON}",
    ),
    "embeddings not tied": Fault(
        "transformers", "rl2.model.load:load_model", "hf.tie_weights()", UNTIED
    ),
    "no logit scale": Fault(
        "transformers",
        "rl2.model.head:logit_divisor",
        "return divisor / ",
        "return 1.0 / ",
        "granite",
    ),
    "wrong window": Fault(
        "transformers",
        "rl2.attention.ring:PackedAttention._blocks",
        "if window is not None and",
        "window = window and window + 1\n    if window is not None and",
        "mistral window",
    ),
    "wrong temperature": Fault(
        "engine",
        "rl2.model.token_model:TokenModel._head_inputs",
        "temperature * self.logit_divisor",
        "self.logit_divisor",
    ),
    "stale layer in the engine": Fault(
        "engine",
        "rl2.engine.local:LocalEngine.load_weights",
        "weight.data.copy_(tensor)",
        "'layers.1.mlp' in _ or weight.data.copy_(tensor)",
    ),
    "engine position shifted": Fault(
        "engine", "rl2.engine.local:_Request.next_input", "+ num_new - 1", "+ num_new"
    ),
    "template drops a newline": Fault(
        "template",
        "rl2.data.chat:ChatTemplate.extend",
        "new_text = whole[len(before + sampled_text) :]",
        "new_text = whole[len(before + sampled_text) :].lstrip()",
    ),
    "system prompt dropped": Fault(
        "template",
        "rl2.data.chat:ChatTemplate.with_opening",
        "if self.system_prompt and",
        "if not self.system_prompt and",
        words=("data.system_prompt=Short.",),
    ),
    "mask covers the user": Fault(
        "template",
        "rl2.data.chat:ChatTemplate.training_sequences",
        "mask = [0] * start +",
        "mask = [1] * start +",
    ),
    "mask without the end of turn": Fault(
        "template",
        "rl2.data.chat:ChatTemplate._end_reply",
        "return tokens, end",
        "return tokens, end - 1",
    ),
    # In the engine alone, and most of them far below the tolerance of rounding.
    "rope base of the engine": Fault(
        "engine",
        ENGINE_START,
        LENGTH,
        f"{LENGTH}; self.model.base_model.rotary_emb.inv_freq.pow_(1.00001)",
        named="rotary_emb input and model.rotary_emb output",
    ),
    "norm epsilon of the engine": Fault(
        "engine",
        ENGINE_START,
        LENGTH,
        f"{LENGTH}; self.model.base_model.layers[0].input_layernorm.variance_epsilon *= 1.01",
        named="input_layernorm input and model.layers.0.input_layernorm output",
    ),
    "bias dropped in the engine": Fault(
        "engine",
        PACKING,
        PACKED,
        'module.__dict__["forward"] = partial(F.linear, weight=weight)',
        "qwen2",
        named="layers.0.self_attn.q_proj input and model.layers.0.self_attn.q_proj output",
    ),
    "packed copy of one layer is stale": Fault(
        "engine",
        PACKING,
        PACKED,
        f"linear = module.__dict__.setdefault('old', linear) if {LAST_DOWN} else linear; {PACKED}",
        named="layers.1.mlp.down_proj input and model.layers.1.mlp.down_proj output",
    ),
    "one layer is off by a unit in the last place": Fault(
        "engine",
        PACKING,
        PACKED,
        f"{PACKED} if not {LAST_DOWN} else partial(lambda f, x: f(x) * (1 + 2**-23), linear)",
        named="layers.1.mlp.down_proj input and model.layers.1.mlp.down_proj output",
    ),
    "positions of decoding shifted by one": Fault(
        "engine",
        "rl2.engine.local:LocalEngine._decode",
        "= inputs[:, :, None]",
        "= inputs[:, :, None] + torch.tensor([0, 1])[:, None, None]",
        named="embed_tokens output and model.rotary_emb input",
    ),
    "window of the cache off by one": Fault(
        "engine",
        "rl2.engine.cache:KVCache.__call__",
        "self.distances >= sliding_window",
        "self.distances > sliding_window",
        "mistral window",
        named="v_proj output and model.layers.0.self_attn.o_proj input",
    ),
    "keys of a prompt one place late": Fault(
        "engine",
        "rl2.engine.cache:PagedKVCache.write_prompt",
        "new_pages.transpose(0, 1)[:, None]",
        "new_pages.transpose(0, 1)[:, None].roll(1, 3)",
        named="v_proj output and model.layers.0.self_attn.o_proj input",
    ),
    "temperature not in the engine's log-probability": Fault(
        "engine",
        "rl2.engine.sampler:sample",
        "softmax.logps(logits, tokens, temperature)",
        "softmax.logps(logits, tokens, torch.ones_like(temperature))",
        named="at another temperature they agree",
    ),
    "export loses a weight": Fault(
        "export",
        "rl2.model.save:save_model",
        "full[name] = weight.cpu()",
        "'layers.1.mlp.up_proj' in name or full.update({name: weight.cpu()})",
    ),
    "adapters not merged": Fault(
        "export",
        "rl2.worker:Worker.export",
        "weights = self.iter_full_weights(self.dtype)",
        f"weights = {BASE_WEIGHTS}",
        words=("actor.lora_rank=2",),
    ),
}


def make(folder: Path, name: str) -> str:
    """Saves the model of this name of MODELS, with a tokenizer, and returns its path."""
    path = folder / name.replace(" ", "_")
    if path.exists():
        return str(path)
    if name == "granite":
        make_model(path)
        config = GraniteConfig(**SIZES, num_attention_heads=4, logits_scaling=8.0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return str(path)
    return make_model(path, name.split()[0], **MODELS[name])


def plant(fault: Fault, set_attribute) -> None:
    """Edits the function in place, so that all that have imported it get the fault."""
    function = pkgutil.resolve_name(fault.place)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.old) == 1, f"{fault.place} has not exactly one {fault.old!r}"
    names: dict = {}
    exec(source.replace(fault.old, fault.new), function.__globals__, names)
    [edited] = names.values()
    edited = getattr(edited, "__func__", edited)
    assert isinstance(edited, FunctionType) and isinstance(edited.__code__, CodeType)
    set_attribute(function, "__code__", edited.__code__)


def read_table(text: str) -> dict[str, str]:
    """The verdict of each row, from what the command prints."""
    table = text.partition("\nrow ")[2]
    lines = re.findall(r"^(\w+(?: \w+)?) {2,}.* (ok|DIFFERENT|skipped)$", table, re.MULTILINE)
    return dict(lines)


def arguments(fault: Fault, model: str) -> list[str]:
    """The arguments of the command for this fault."""
    return [f"--processes={fault.processes}", f"actor.model_name={model}", *fault.words]


def prove_planted(name: str | None, words: list[str]) -> CompletedProcess:
    """Runs the command with this fault in all its processes."""
    path = os.pathsep.join(str(folder) for folder in (ROOT / "tests/planted", ROOT, ROOT / "tests"))
    environment = {"RL2_PLANTED": name or "", "PYTHONPATH": path}
    return run("-m", "rl2", "prove", *words, check=False, env=environment)


def main(names):
    with tempfile.TemporaryDirectory() as folder:
        for name in names or FAULTS:
            fault = FAULTS[name]
            # The layout too, in all commands.
            words = arguments(fault._replace(processes=2), make(Path(folder), fault.model))
            done = prove_planted(name, words)
            verdicts = read_table(done.stdout)
            found = [row for row, verdict in verdicts.items() if verdict == "DIFFERENT"]
            skipped = [row for row, verdict in verdicts.items() if verdict == "skipped"]
            is_right = found == [fault.row] and done.returncode == 1
            print(f"{'right' if is_right else 'WRONG'}: {name}: {found}, skipped {skipped}")
            print(done.stdout.partition("\nrow ")[0] if is_right else done.stdout + done.stderr)
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
